"""Every mechanism goes on after a kill as if there had been none: its state is in the checkpoint, or follows from the step."""

import json

import pyarrow.parquet as pq
import pytest

from qkpipe.config.mechanisms import mechanisms
from qkpipe.train.run import train_run
from qkpipe.train.trainer import Trainer
from tiny_training import tiny_run, tiny_study

STEPS, EVERY = 8, 2
NOISE = {"format": {"rounding": "stochastic"}, "routes": ["qk", "mlp"], "gain": 3.0}
TRIGGERED = {"threshold": 0.3}
NO_CLIP = {"optimizer": {"lr": 5e-2, "clip": None}}

# One run or more a kind: with the settings under which it has something to remember.
FAULTS = [
    {"kind": "quantizer", **NOISE},
    {"kind": "injected", "structure": "held", "hold": 3, "routes": ["mlp"], "gain": 3.0},
    {"kind": "weight_noise", "routes": ["mlp"]},
    {"kind": "frozen", "routes": ["mlp"]},
    {"kind": "label_noise", "rate": 0.2},
    {"kind": "learning_rate", "factor": 2.0},
]
INTERVENTIONS = [
    {"kind": "splice", "routes": ["qk"]},
    {"kind": "fault_only", "routes": ["qk"]},
    {"kind": "guard", **TRIGGERED},
    {"kind": "guard", "mode": "log", **TRIGGERED},
    {"kind": "value_norm", **TRIGGERED},
    {"kind": "mlp_norm", **TRIGGERED},
    {"kind": "lr_cut", **TRIGGERED},
    {"kind": "tight_clip", **TRIGGERED},
    {"kind": "moments", "action": "reset", "routes": ["all"], **TRIGGERED},
    {"kind": "moments", "action": "flip", "routes": ["qk"], **TRIGGERED},
    {"kind": "moments", "action": "shuffle", "routes": ["qk"], **TRIGGERED},
    {"kind": "weight_decay", "routes": ["value", "mlp"], **TRIGGERED},
    {"kind": "spectral_cap", **TRIGGERED},
    {"kind": "qk_clip", **TRIGGERED},
    {"kind": "zclip", "z_threshold": 0.1, "warmup": 3, "max_norm": None},
    {"kind": "adagc", "warmup": 3},
    {"kind": "spam", "reset_every": 3, "rewarm": 2, "settle": 1},
]
PROBES = [{"kind": "causal", "action": "on_target", "k": 2}]
MODELS = [{"qk_norm": "layernorm"}, {"qk_norm": "rms_full"}, {"weight_norm": "sigma_reparam"}]
CLIPLESS = ("zclip", "adagc")


def cases():
    for fault in FAULTS:
        yield fault["kind"], {"faults": [fault]}
    for action in INTERVENTIONS:
        name = "-".join(str(action[key]) for key in ("kind", "mode", "action") if key in action)
        fault = (
            {"faults": [{"kind": "quantizer", **NOISE}]} if action["kind"] in ("splice", "fault_only") else {}
        )
        yield name, {"interventions": [action], **fault, **(NO_CLIP if action["kind"] in CLIPLESS else {})}
    for probe in PROBES:
        yield probe["kind"], {"probe": probe}
    for model in MODELS:
        yield "-".join(model.values()), {"model": model}


CASES = dict(cases())


def run_of(name):
    settings = {
        "optimizer": {"lr": 5e-2},
        "train": {"steps": STEPS, "checkpoint_every": EVERY},
        **CASES[name],
    }
    return tiny_run(arm=name.replace("_", "-"), **settings)


def contents(run, paths):
    """Bytes of every file but timing."""
    place = paths.run(run.arm, run.seed)
    return {path.name: path.read_bytes() for path in place.outputs if path.name != "timing.parquet"}


class Killed(Exception):
    pass


@pytest.fixture(scope="module")
def losses(tmp_path_factory):
    """Losses of a run, trained once however many ask."""
    paths, known = tiny_study(tmp_path_factory.mktemp("plain")), {}

    def of(run):
        if run.config_hash not in known:
            train_run(run, paths, progress=False)
            known[run.config_hash] = pq.read_table(paths.run(run.arm, 0).table("steps"))["loss"].to_pylist()
        return known[run.config_hash]

    return of


@pytest.mark.parametrize("name", CASES)
def test_a_killed_and_resumed_run_is_the_unbroken_one(name, tmp_path, monkeypatch, losses):
    run = run_of(name)
    whole = tiny_study(tmp_path / "whole")
    train_run(run, whole, progress=False)

    # In the second interval between checkpoints, and right after the third checkpoint.
    left, own = [EVERY + 1, 3 * EVERY], Trainer.step

    def step(trainer):
        if left and trainer.step_index == left[0]:
            left.pop(0)
            raise Killed
        return own(trainer)

    broken = tiny_study(tmp_path / "broken")
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", step)
        for _ in range(2):
            with pytest.raises(Killed):
                train_run(run, broken, progress=False)
        train_run(run, broken, progress=False)
    assert contents(run, broken) == contents(run, whole)

    if any(hasattr(action, "threshold") for action in run.interventions):
        fire_step = json.loads(whole.run(run.arm, 0).record.read_text())["fire_step"]
        assert 0 < fire_step < STEPS - 2, "else there is nothing to remember"
    if run.mechanisms:
        plain = run.model_copy(update={"arm": "plain", "faults": [], "interventions": [], "probe": None})
        own_losses = pq.read_table(whole.run(run.arm, 0).table("steps"))["loss"].to_pylist()
        assert (own_losses == losses(plain)) == (name == "guard-log"), "the mechanism must act"


def test_no_mechanism_is_forgotten():
    for family, tried in (("faults", FAULTS), ("interventions", INTERVENTIONS), ("probes", PROBES)):
        missing = set(mechanisms(f"qkpipe.{family}")) - {config["kind"] for config in tried}
        assert not missing, (
            f"add to {family.upper()} a config under which they have something to remember: {missing}"
        )
