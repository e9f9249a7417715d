"""Studies whose jobs meet accidents, and Snakemake as a process that submits them to Slurm."""

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import yaml

from project import ROOT, snakemake_command
from qkpipe.config import load_study
from qkpipe.data.shards import prepare
from qkpipe.paths import RUN_TABLES, StudyPaths

TINY = ROOT / "tests" / "tiny"
ARMS = ("first", "second")


def wait_for(condition, what, seconds=300):
    """The first true value of ``condition()``."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, f"waited {seconds} s for {what}"
        time.sleep(0.1)
    return value


def slurm(*command):
    """Output of a Slurm command."""
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


class Accident:
    """A study folder of its own, with arms ``first`` and ``second`` whose run takes a few seconds and asks for one GPU."""

    def __init__(self, folder, data, **resources):
        self.config = folder / "config"
        self.config.mkdir(parents=True)
        body = yaml.safe_load((TINY / "study.yaml").read_text())
        tiny = body["scales"]["tiny"]
        tiny["train"] |= {"steps": 600, "telemetry_every": 50, "val_every": 300, "checkpoint_every": 20}
        tiny["resources"] |= {"gpus": 1, **resources}
        del body["portability"]  # it names other arms
        (self.config / "study.yaml").write_text(yaml.safe_dump(body))
        arms = {arm: {"description": arm, "attention": {"kind": "sdpa"}} for arm in ARMS}
        (self.config / "arms.yaml").write_text(yaml.safe_dump(arms))
        self.study = load_study(self.config)
        self.paths = StudyPaths("tiny", folder)
        if data is None:
            scale = self.study.scale_config
            prepare(self.study, self.paths, scale.corpus, scale.tokenizer)
        else:
            place = self.paths.results / "data"
            place.parent.mkdir(parents=True)
            place.symlink_to(data)
        (self.paths.results / "kernels.compiled").touch()  # torch's own attention needs none
        self._submitted = []

    def record(self, arm="first"):
        return self.paths.run(arm, 0).record

    def scratch(self, arm="first"):
        return self.paths.scratch(self.study.resolve(arm, 0).run_id)

    def submit(self, *options, files=None, retries=0):
        """`snakemake --profile slurm` for ``files``, by default the first arm's run, as a process of its own group."""
        wanted = [path.relative_to(self.paths.root) for path in files or [self.record()]]
        told = ["--config", f"study={self.config}", "seeds=[0]", "--retries", retries, *options]
        self._submitted.append(Submission(self.paths.root, *wanted, *told))
        return self._submitted[-1]

    def close(self):
        """End every Snakemake and every job that is left."""
        for submission in self._submitted:
            submission.kill()
        for line in slurm("squeue", "-h", "-o", "%A %Z").splitlines():
            job, folder = line.split(maxsplit=1)
            if Path(folder) == self.paths.root:
                slurm("scancel", job)

    def trained(self, arm="first"):
        """The process that trains the arm's run, once it has written a checkpoint."""
        wait_for(self.scratch(arm).checkpoint.exists, f"a checkpoint of {arm}")
        return next(pid for pid in _processes() if self._trains(pid, arm))

    def contents(self, arm="first"):
        """Bytes of every file of the run but ``timing``."""
        run = self.paths.run(arm, 0)
        files = [run.record, *(run.table(name) for name in RUN_TABLES if name != "timing")]
        return {path.name: path.read_bytes() for path in files}

    def _trains(self, pid, arm):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            return (
                b"qkpipe" in command
                and arm.encode() in command
                and Path(f"/proc/{pid}/cwd").samefile(self.paths.root)
            )
        except OSError:  # it ended meanwhile
            return False


class Submission:
    """A running Snakemake that submits to Slurm; what it says goes to a file."""

    def __init__(self, folder, *args):
        profile = ["--profile", ROOT / "profiles" / "slurm", "--latency-wait", "10"]
        quick = ["--slurm-init-seconds-before-status-checks", "2"]
        command = snakemake_command(folder, *args, *profile, *quick)
        at = command.index("--cores")
        del command[at : at + 2]  # `jobs` of the profile
        self._log = folder / f"snakemake-{time.monotonic_ns()}.log"
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                command, cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    @property
    def said(self):
        return self._log.read_text()

    @property
    def jobs(self):
        """Slurm's numbers of the jobs submitted so far."""
        return [int(number) for number in re.findall(r"submitted with SLURM jobid (\d+)", self.said)]

    def job(self):
        """The number of the first job, once it is submitted."""
        return wait_for(lambda: self.jobs, "a submission")[0]

    def end(self, timeout=600):
        """Wait for the end; returns the exit status."""
        return self.process.wait(timeout)

    def interrupt(self):
        """Ctrl-C, where it is still running: it cancels its jobs."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGINT)
        self.process.wait(60)

    def kill(self):
        """End Snakemake without a word: the job lives on in Slurm."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def _processes():
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
