"""Two ranks train what one does, within the error of another order of sums; their checkpoints go on anywhere."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from pydantic import ValidationError

from qkpipe.errors import BadInput
from qkpipe.paths import RUN_TABLES
from qkpipe.train.distributed import ONE_RANK, Ranks, _fingerprint
from qkpipe.train.run import train_run
from ranks import train_on_ranks
from tiny_training import STREAM, tiny_run, tiny_study

DDP, FSDP2 = {"kind": "ddp", "ranks": 2}, {"kind": "fsdp2", "ranks": 2}
TRAIN = {"steps": 6, "accumulation": 4, "val_batches": 2, "checkpoint_every": 4}
GUARD = {"kind": "guard", "threshold": 0.12}
CLEAN = {"attention": STREAM, "optimizer": {"lr": 2e-2}}


def quantizer(placement, **options):
    return {"kind": "quantizer", "routes": ["mlp"], "placement": placement, "gain": 3.0, **options}


# What is trained on two ranks, and how: mechanisms of every kind that could see too little or the wrong share.
CASES = {
    "guard": (DDP, {**CLEAN, "interventions": [GUARD]}),
    "pre": (DDP, {"faults": [quantizer("pre_reduction")]}),
    "post": (DDP, {"faults": [quantizer("post_reduction")]}),
    "operand": (
        DDP,
        {
            "faults": [quantizer("operand", format={"rounding": "stochastic"})],
            "interventions": [{"kind": "splice", "routes": ["qk"]}],
        },
    ),
    "probe": (DDP, {**CLEAN, "probe": {"kind": "causal", "action": "on_target", "k": 2}}),
    "noise": (DDP, {"faults": [{"kind": "label_noise", "rate": 0.3}]}),
    "sharded": (
        FSDP2,
        {
            **CLEAN,
            "faults": [quantizer("post_reduction")],
            "interventions": [GUARD, {"kind": "splice", "routes": ["qk"]}],
        },
    ),
}


def case(name, *, parallel=None, **changes):
    own, settings = CASES[name]
    return tiny_run(arm=name, **{"train": TRAIN, "parallel": parallel or own, **settings, **changes})


def alone(name):
    return case(name, parallel={"kind": "none"})


def table(paths, name, which):
    return pq.read_table(paths.run(name, 0).table(which)).drop_columns(["run_id"]).to_pydict()


def assert_same_run(found, wanted, name):
    """Every number of every table but timing, within float error; every event."""
    for which in (t for t in RUN_TABLES if t != "timing"):
        ours, theirs = table(found, name, which), table(wanted, name, which)
        assert ours.keys() == theirs.keys()
        for column, values in theirs.items():
            where = f"{name}: {which}.{column}"
            if column == "detail":
                ours[column], values = ([_numbers(v) for v in side] for side in (ours[column], values))
            if not all(isinstance(v, float | None) for v in values):
                assert ours[column] == values, where
                continue
            a, b = (np.array(side, dtype=float) for side in (ours[column], values))
            # A mean of signs moves by whole elements.
            atol = 2e-3 if column in ("coherence", "update_coherence", "spectral_alignment") else 2e-5
            np.testing.assert_allclose(a, b, rtol=2e-4, atol=atol, err_msg=where)


def _numbers(detail):
    return {
        key: pytest.approx(v, rel=1e-4) if isinstance(v, float) else v
        for key, v in json.loads(detail).items()
    }


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    paths = tiny_study(tmp_path_factory.mktemp("two"))
    train_on_ranks(paths.root, [case(name) for name in CASES])
    return paths


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    paths = tiny_study(tmp_path_factory.mktemp("one"))
    for name in CASES:
        train_run(alone(name), paths, progress=False)
    return paths


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_train_what_one_does(name, one, two):
    assert_same_run(two, one, name)
    record = json.loads(two.run(name, 0).record.read_text())
    assert record["config"]["parallel"] == CASES[name][0]
    assert record["config_hash"] == alone(name).config_hash
    assert record["tokens"] == json.loads(one.run(name, 0).record.read_text())["tokens"]
    assert not (two.root / "scratch").exists() or not any((two.root / "scratch").iterdir())


def test_the_guard_saw_the_largest_logit_of_any_rank(one, two):
    """It fired, and before the end: or the comparison above would say nothing about it."""
    assert table(one, "guard", "events")["kind"] == ["guard_fired"]
    assert 0 < json.loads(two.run("guard", 0).record.read_text())["fire_step"] < TRAIN["steps"] - 1


def test_pre_and_post_reduction_differ(two):
    pre, post = (table(two, name, "routes") for name in ("pre", "post"))
    on_mlp = [r == "mlp" for r in pre["route"]]
    errors = [np.array(t["error_norm"], dtype=float)[on_mlp] for t in (pre, post)]
    assert np.all(np.abs(errors[0] - errors[1]) > 1e-3 * errors[1])
    assert table(two, "pre", "steps")["loss"] != table(two, "post", "steps")["loss"]


@pytest.mark.slow
@pytest.mark.parametrize(("first", "then"), [(FSDP2, None), (None, FSDP2), (FSDP2, DDP)], ids=str)
def test_a_checkpoint_goes_on_with_other_ranks(first, then, one, tmp_path, monkeypatch):
    """Broken off in the second interval, continued by another kind or number of ranks."""
    paths = tiny_study(tmp_path)
    for parallel, stop in ((first, 5), (then, None)):
        run = case("sharded", parallel=parallel or {"kind": "none"})
        if parallel is not None:
            train_on_ranks(paths.root, [run], break_before=stop)
        else:
            _train_here(run, paths, stop, monkeypatch)
        assert paths.run(run.arm, run.seed).record.exists() == (stop is None)
    assert table(paths, "sharded", "timing")["resumes"][-1] == 1
    assert_same_run(paths, one, "sharded")


def _train_here(run, paths, stop, monkeypatch):
    from qkpipe.train.trainer import Trainer

    class Broken(Exception):
        pass

    own = Trainer.step

    def step(trainer):
        if trainer.step_index == stop:
            raise Broken
        return own(trainer)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", step)
        try:
            train_run(run, paths, progress=False)
        except Broken:
            assert stop is not None


def test_the_ranks_cut_a_step_into_neighbours_and_the_leader_has_the_last():
    ranks = [Ranks() for _ in range(3)]
    for number, rank in enumerate(ranks):
        rank.rank, rank.size = number, 3
    assert [list(rank.cut(6)) for rank in ranks] == [[4, 5], [2, 3], [0, 1]]
    assert list(ONE_RANK.cut(4)) == [0, 1, 2, 3]


def test_a_fingerprint_tells_one_bit():
    weights = {"a": torch.ones(3, 2), "b": torch.zeros(2, dtype=torch.int64)}
    other = {name: tensor.clone() for name, tensor in weights.items()}
    assert _fingerprint(other) == _fingerprint(weights)
    other["a"][2, 1] = torch.nextafter(torch.tensor(1.0), torch.tensor(2.0))
    assert _fingerprint(other) != _fingerprint(weights)


def test_what_cannot_be_cut_is_refused():
    with pytest.raises(
        ValidationError, match=r"train\.accumulation=3 must be a multiple of parallel\.ranks=2"
    ):
        tiny_run(train={"accumulation": 3}, parallel=DDP)
    with pytest.raises(ValidationError, match=r"train\.val_batches=3 must be a multiple"):
        tiny_run(train={"accumulation": 2, "val_batches": 3}, parallel=DDP)
    with pytest.raises(ValidationError, match="kind=ddp with ranks=1"):
        tiny_run(parallel={"kind": "ddp"})


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"probe": {"kind": "causal", "action": "on_target"}}, "causal"),
        ({"faults": [quantizer("pre_reduction")]}, "quantizer"),
        ({"faults": [{"kind": "injected", "routes": ["mlp"], "structure": "native"}]}, "injected"),
        ({"model": {"weight_norm": "sigma_reparam"}}, "sigma_reparam"),
        ({"optimizer": {"name": "sgd"}}, "torch's fused sgd"),
    ],
)
def test_what_needs_whole_weights_is_refused_under_fsdp2(settings, named):
    with pytest.raises(ValidationError, match=f"each weight, and {named} needs whole ones; use ddp"):
        tiny_run(train={"accumulation": 4}, parallel=FSDP2, **settings)


def test_another_number_of_processes_is_refused(tmp_path):
    with pytest.raises(BadInput, match=r"parallel\.ranks: 2, and 1 processes were started"):
        train_run(case("post"), tiny_study(tmp_path), progress=False)


STUDY = {
    "scale": "tiny",
    "corpora": {"noise": {"package": "none", "version": "0", "sha256": "0" * 64}},
    "scales": {
        "tiny": {
            "corpus": "noise",
            "model": {"d_model": 16, "n_layers": 2, "n_heads": 2, "context": 16},
            "train": {
                "steps": 100,
                "batch_size": 2,
                "accumulation": 2,
                "val_batches": 2,
                "checkpoint_every": 10,
            },
            "parallel": DDP,
        }
    },
    "roles": {"tuning": {"seeds": [0]}},
    "targets": {"core": {"arms": ["fp32"], "role": "tuning"}},
}


@pytest.mark.slow
def test_a_killed_rank_ends_the_job_and_a_retry_resumes(tmp_path):
    """By the command itself, which starts torchrun."""
    paths = tiny_study(tmp_path)
    config = tmp_path / "config"
    config.mkdir()
    (config / "study.yaml").write_text(yaml.safe_dump(STUDY))
    (config / "arms.yaml").write_text("fp32: {}\n")
    command = [
        sys.executable,
        "-m",
        "qkpipe",
        "--config",
        config,
        "--root",
        tmp_path,
        "train",
        "--arm",
        "fp32",
        "--seed",
        "0",
    ]
    job = subprocess.Popen(
        list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        _wait(lambda: list(tmp_path.glob("scratch/*/checkpoint.pt")))
        ranks = _children(job.pid)
        assert len(ranks) == 2
        os.kill(ranks[1], signal.SIGKILL)
        said = job.communicate(timeout=120)[0]
    finally:
        job.terminate()
    assert job.returncode != 0, said
    _wait(lambda: not any(Path(f"/proc/{rank}").exists() for rank in ranks))
    assert not paths.run("fp32", 0).record.exists()

    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("step 100 of 100") == 1  # the leader alone speaks
    timing = table(paths, "fp32", "timing")
    assert timing["resumes"][-1] == 1
    assert table(paths, "fp32", "steps")["step"] == list(range(100))


def _children(pid):
    return sorted(int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split())


def _wait(for_what, seconds=400):
    end = time.monotonic() + seconds
    while not for_what():
        assert time.monotonic() < end
        time.sleep(0.05)
