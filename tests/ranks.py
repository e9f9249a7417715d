"""Trains runs on several ranks of this machine, by gloo: one process a rank, which takes one run after another."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent


def train_on_ranks(
    root: Path, runs: list[Any], *, break_before: int | None = None, timeout: int = 300
) -> None:
    """Train ``runs``, all of one number of ranks, in the study at ``root``; ``break_before``: break off before this step."""
    jobs = [
        {"run": run.model_dump(mode="json"), "break_before": break_before, "port": _port()} for run in runs
    ]
    size = runs[0].parallel.ranks
    place = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    path = os.pathsep.join([str(TESTS), *sys.path])
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, str(root), json.dumps(jobs)],
            env={**os.environ, **place, "PYTHONPATH": path, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(size)
    ]  # fmt: skip
    try:
        said = [process.communicate(timeout=timeout)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * size, "\n".join(said)


def _port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _main(root: str, jobs: str) -> None:
    from qkpipe.config.models import RunConfig
    from qkpipe.paths import StudyPaths
    from qkpipe.train.run import train_run
    from qkpipe.train.trainer import Trainer

    class Broken(BaseException):
        pass

    own = Trainer.step
    for job in json.loads(jobs):

        def step(trainer: Trainer, stop: int | None = job["break_before"]) -> Any:
            if trainer.step_index == stop:
                raise Broken
            return own(trainer)

        Trainer.step = step
        os.environ["MASTER_PORT"] = str(job["port"])
        run = RunConfig.model_validate(job["run"])
        try:
            train_run(run, StudyPaths(run.scale, Path(root)), progress=False)
        except Broken:
            import torch.distributed as dist

            dist.destroy_process_group()


if __name__ == "__main__":
    _main(*sys.argv[1:])
