"""A run broken off anywhere and called again leaves the files of an unbroken one, bit for bit; what is not its own it refuses."""

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from qkpipe.data.shards import open_tokens, write_tokens
from qkpipe.errors import BadInput
from qkpipe.paths import RUN_TABLES
from qkpipe.telemetry.writer import PartWriter
from qkpipe.train import checkpoint
from qkpipe.train import run as run_module
from qkpipe.train.run import train_run
from qkpipe.train.trainer import Trainer
from tiny_training import FAULTY, STREAM, tiny_run, tiny_study, write_noise

STEPS, EVERY = 9, 3
SHARED = {"train": {"steps": STEPS, "checkpoint_every": EVERY}}
ARMS = {
    "guard": {
        "attention": FAULTY,
        "optimizer": {"lr": 5e-2},
        "interventions": [{"kind": "guard", "threshold": 0.3}],
    },
    "probe": {"attention": FAULTY, "probe": {"kind": "causal", "action": "on_target", "k": 3}},
    "splice": {"attention": FAULTY, "interventions": [{"kind": "splice", "routes": ["qk"]}]},
    "held": {
        "faults": [{"kind": "injected", "routes": ["mlp"], "structure": "held", "hold": 4, "gain": 5.0}]
    },
    "stochastic": {
        "attention": {**STREAM, "precision": {"uniform": 3, "io": 7, "mode": "stochastic"}},
        "faults": [
            {"kind": "quantizer", "routes": ["vo"], "format": {"rounding": "stochastic"}, "gain": 2.0},
            {
                "kind": "quantizer",
                "routes": ["mlp"],
                "placement": "operand",
                "format": {"rounding": "stochastic"},
            },
            {"kind": "quantizer", "routes": ["qk"], "placement": "pre_reduction"},
        ],
        "train": {**SHARED["train"], "accumulation": 2},
    },
    "sgd": {"optimizer": {"name": "sgd", "lr": 0.1, "schedule": "cosine"}},
}


def arm(name, **changes):
    return tiny_run(arm=name, **{**SHARED, **ARMS[name], **changes})


class Broken(Exception):
    pass


class Interrupter:
    """Breaks training off before the given steps, each of them once."""

    def __init__(self, monkeypatch, *steps):
        self.left = list(steps)
        own = Trainer.step

        def step(trainer):
            if self.left and trainer.step_index == self.left[0]:
                self.left.pop(0)
                raise Broken
            return own(trainer)

        monkeypatch.setattr(Trainer, "step", step)


def finish(run, paths):
    """Call until done; returns how often it broke off."""
    broken = 0
    while True:
        try:
            train_run(run, paths, progress=False)
            return broken
        except Broken:
            assert not paths.run(run.arm, run.seed).record.exists()
            broken += 1


def contents(run, paths):
    """Bytes of every file but timing."""
    place = paths.run(run.arm, run.seed)
    return {path.name: path.read_bytes() for path in place.outputs if path.name != "timing.parquet"}


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """Files of every arm, trained in one go."""
    paths = tiny_study(tmp_path_factory.mktemp("unbroken"))
    files = {}
    for name in ARMS:
        train_run(arm(name), paths, progress=False)
        files[name] = contents(arm(name), paths)
    return files


@pytest.fixture
def paths(tmp_path):
    return tiny_study(tmp_path)


@pytest.mark.parametrize("name", ARMS)
def test_broken_off_in_every_interval_and_at_every_boundary(name, unbroken, paths, monkeypatch):
    """Before the first checkpoint, right after one, and between two; several times in one run."""
    Interrupter(monkeypatch, 1, 3, 5, 6, 8)
    assert finish(arm(name), paths) == 5
    assert contents(arm(name), paths) == unbroken[name]
    assert not paths.scratch(arm(name).run_id).folder.exists(), "nothing is left behind"


@pytest.mark.parametrize("step", range(STEPS))
def test_broken_off_before_any_step(step, unbroken, paths, monkeypatch):
    Interrupter(monkeypatch, step)
    assert finish(arm("guard"), paths) == 1
    assert contents(arm("guard"), paths) == unbroken["guard"]


def test_the_guard_of_these_tests_fires_between_checkpoints(unbroken):
    record = json.loads(unbroken["guard"]["run.json"])
    assert 0 < record["fire_step"] < STEPS - 1


@pytest.mark.parametrize("every", [1, 2, 100])
def test_how_often_a_checkpoint_is_written_plays_no_part(every, unbroken, paths, monkeypatch):
    train = {"steps": STEPS, "checkpoint_every": every}
    Interrupter(monkeypatch, 4, 7)
    finish(arm("probe", train=train), paths)
    tables = {name: raw for name, raw in contents(arm("probe"), paths).items() if name != "run.json"}
    assert tables == {name: raw for name, raw in unbroken["probe"].items() if name != "run.json"}


@pytest.mark.parametrize("where", ["writer", "record", "checkpoint"])
def test_broken_off_while_writing(where, unbroken, paths, monkeypatch):
    """Between the parts and their checkpoint, and between the tables and the record."""
    owner, attribute = {
        "writer": (PartWriter, "finish"),
        "record": (run_module, "_write_record"),
        "checkpoint": (checkpoint, "save"),
    }[where]
    own, calls = getattr(owner, attribute), []

    def once(*arguments):
        calls.append(1)
        if len(calls) == (2 if where == "checkpoint" else 1):
            raise Broken
        return own(*arguments)

    monkeypatch.setattr(owner, attribute, once)
    assert finish(arm("guard"), paths) == 1
    assert contents(arm("guard"), paths) == unbroken["guard"]


def test_killed_by_the_operating_system(unbroken, paths):
    """SIGKILL in the middle; while it lives, the run is locked."""
    run = arm("guard")
    code = f"""
        import sys, time
        sys.path.insert(0, {str(Path(__file__).parents[1])!r})
        from pathlib import Path
        from qkpipe.config.models import RunConfig
        from qkpipe.paths import StudyPaths
        from qkpipe.train.run import train_run
        from qkpipe.train.trainer import Trainer

        own = Trainer.step
        def slow(trainer):
            if trainer.step_index == 5:
                time.sleep(600)
            return own(trainer)
        Trainer.step = slow
        run = RunConfig.model_validate_json({run.model_dump_json()!r})
        train_run(run, StudyPaths("tiny", Path({str(paths.root)!r})), progress=False)
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)])
    try:
        scratch = paths.scratch(run.run_id)
        deadline = time.monotonic() + 400
        while not scratch.checkpoint.exists():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        with pytest.raises(BadInput, match=r"lock: held by a live process training guard/seed=0"):
            train_run(run, paths, progress=False)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    train_run(run, paths, progress=False)
    assert contents(run, paths) == unbroken["guard"]
    timing = pq.read_table(paths.run("guard", 0).table("timing"))
    assert timing["resumes"].to_pylist() == [1]


class TestRefused:
    """One line, and nothing overwritten."""

    @pytest.fixture
    def half(self, paths, monkeypatch):
        """A run broken off after its first checkpoint, at step 4."""
        run = arm("guard")
        with monkeypatch.context() as patch:
            Interrupter(patch, 4)
            with pytest.raises(Broken):
                train_run(run, paths, progress=False)
        return run

    @staticmethod
    def files(scratch):
        found = (path for path in scratch.folder.rglob("*") if path.is_file() and path != scratch.lock)
        return {path: path.read_bytes() for path in found}

    def refused(self, run, paths):
        scratch = paths.scratch(run.run_id)
        before = self.files(scratch)
        with pytest.raises(BadInput) as caught:
            train_run(run, paths, progress=False)
        assert self.files(scratch) == before
        assert not paths.run(run.arm, run.seed).folder.exists()
        message = str(caught.value)
        assert "\n" not in message
        return message

    def test_checkpoint_of_another_config(self, half, paths):
        other = arm("guard", optimizer={"lr": 1e-3})
        scratch = paths.scratch(other.run_id)
        shutil.copytree(paths.scratch(half.run_id).folder, scratch.folder)
        message = self.refused(other, paths)
        assert f"{scratch.checkpoint}: config_hash={half.config_hash[:12]} is not this run's" in message

    def test_checkpoint_of_other_data(self, half, paths):
        write_noise(paths.data("noise", "bytes"), train=2999)
        assert "checkpoint.pt: data_hash=" in self.refused(half, paths)

    @pytest.mark.parametrize("damage", ["truncated", "empty", "garbage", "one byte"])
    def test_damaged_checkpoint(self, half, paths, damage):
        path = paths.scratch(half.run_id).checkpoint
        raw = bytearray(path.read_bytes())
        weight = torch.load(path)["trainer"]["model"]["blocks.0.attention.W_Q.weight"].numpy().tobytes()
        at = bytes(raw).index(weight)
        spoilt = {
            "truncated": raw[: len(raw) // 2],
            "empty": b"",
            "garbage": b"not a checkpoint",
            "one byte": raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :],
        }
        path.write_bytes(spoilt[damage])
        assert f"{path}: not a readable checkpoint" in self.refused(half, paths)

    def test_a_file_of_another_kind(self, half, paths):
        path = paths.scratch(half.run_id).checkpoint
        torch.save(torch.zeros(3), path)
        assert "checkpoint.pt: " in self.refused(half, paths)

    def test_missing_data(self, paths):
        shutil.rmtree(paths.data("noise", "bytes"))
        assert "meta.json: no such file" in self.refused(arm("sgd"), paths)

    def test_a_vocabulary_that_is_not_the_tokenizers(self, paths):
        meta = paths.data("noise", "bytes") / "meta.json"
        tokens = open_tokens(meta.parent, 16)
        write_tokens(meta.parent, {"train": tokens.train, "validation": tokens.validation}, 64)
        assert "sgd: tokenizer bytes has 256 tokens, the shards have 64" in self.refused(arm("sgd"), paths)

    @pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is available here")
    def test_a_device_that_is_not_there(self, paths):
        with pytest.raises(BadInput, match=r"train.device: 'cuda' is not available here; allowed: cpu"):
            train_run(tiny_run(train={"device": "cuda"}), paths, progress=False)


class TestFinished:
    def test_is_left_alone(self, paths):
        run = arm("sgd")
        record = train_run(run, paths, progress=False)
        before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in record.parent.iterdir()}
        shutil.rmtree(paths.data("noise", "bytes"))  # not even looked at
        assert train_run(run, paths, progress=False) == record
        assert before == {
            path: (path.stat().st_mtime_ns, path.read_bytes()) for path in record.parent.iterdir()
        }

    def test_of_another_config_is_moved_aside_and_said_so(self, paths, caplog):
        old = arm("sgd")
        train_run(old, paths, progress=False)
        files = contents(old, paths)
        new = arm("sgd", optimizer={"name": "sgd", "lr": 0.2})
        assert new.config_hash != old.config_hash
        record = train_run(new, paths, progress=False)
        assert json.loads(record.read_text())["config_hash"] == new.config_hash
        (aside,) = (paths.results / "superseded" / "sgd").iterdir()
        assert {name: (aside / name).read_bytes() for name in files} == files
        assert "moved to" in caplog.text and str(aside) in caplog.text

    def test_record(self, paths):
        run = arm("guard")
        place = train_run(run, paths, progress=False)
        record = json.loads(place.read_text())
        assert record["config"] == run.model_dump(mode="json")
        assert (record["run_id"], record["config_hash"]) == (run.run_id, run.config_hash)
        assert (record["steps_planned"], record["steps_done"]) == (STEPS, STEPS)
        assert (record["diverged"], record["stop_reason"]) == (False, "completed")
        assert record["tokens"] == STEPS * 2 * 16
        assert record["epochs"] == pytest.approx(STEPS * 2 * 16 / 3000)
        assert {path.name for path in place.parent.iterdir()} == {
            "run.json",
            *(f"{t}.parquet" for t in RUN_TABLES),
        }

    @pytest.mark.parametrize("interrupted", [False, True])
    def test_a_diverged_run_is_a_result(self, paths, monkeypatch, interrupted):
        run = arm("sgd", optimizer={"name": "sgd", "lr": 1e30, "clip": None, "warmup": 0})
        if interrupted:
            own = run_module._write_record
            monkeypatch.setattr(run_module, "_write_record", lambda *a: (_ for _ in ()).throw(Broken()))
            with pytest.raises(Broken):
                train_run(run, paths, progress=False)
            monkeypatch.setattr(run_module, "_write_record", own)
        record = json.loads(train_run(run, paths, progress=False).read_text())
        assert record["diverged"] is True
        assert record["stop_reason"] == "nonfinite_loss"
        assert 0 < record["steps_done"] < STEPS
        steps = pq.read_table(paths.run("sgd", 0).table("steps")).to_pylist()
        assert len(steps) == record["steps_done"]
        events = pq.read_table(paths.run("sgd", 0).table("events")).to_pylist()
        assert [event["kind"] for event in events][-1] == "diverged"


def test_the_lock_is_given_back_after_an_error(paths, monkeypatch):
    """Also while the error is still being handled, as in a retry within one process."""
    run = arm("sgd")
    Interrupter(monkeypatch, 2)
    try:
        train_run(run, paths, progress=False)
    except Broken:
        train_run(run, paths, progress=False)
    assert paths.run("sgd", 0).record.exists()
