"""A scale changes sizes and never an arm; what it cannot have it says."""

import pytest

from qkpipe.config import load_study
from qkpipe.errors import BadInput

GPU_SCALES = ("gpt2-small", "gpt2-medium", "350m")


@pytest.fixture(scope="module")
def studies():
    names = ("micro", *GPU_SCALES, *(f"{name}-60k" for name in GPU_SCALES))
    return {name: load_study(scale=name) for name in names}


@pytest.mark.parametrize("scale", GPU_SCALES)
def test_an_arm_is_the_same_mechanisms_at_every_scale(studies, scale):
    micro, other = studies["micro"], studies[scale]
    shared = [arm for arm in other.runnable if arm in micro.runnable]
    assert len(shared) > 150
    for arm in shared:
        here, there = micro.resolve(arm, 0), other.resolve(arm, 0)
        assert here.faults == there.faults and here.probe == there.probe, arm
        assert here.attention.precision == there.attention.precision, arm
        assert [action.kind for action in here.interventions] == [a.kind for a in there.interventions], arm


@pytest.mark.parametrize("scale", GPU_SCALES)
def test_no_arm_brings_sizes_of_another_scale(studies, scale):
    study = studies[scale]
    plain = study.resolve("fp32_stream", 0)
    for arm in study.runnable:
        run = study.resolve(arm, 0)
        assert run.train == plain.train, arm
        assert run.attention.kind == "sdpa" or run.attention.tile in (plain.attention.tile, 1024), arm
        assert run.optimizer.name == "sgd" or run.optimizer.lr == plain.optimizer.lr, arm
        for size in ("d_model", "n_layers", "n_heads", "context", "d_ff"):
            assert getattr(run.model, size) == getattr(plain.model, size), arm


def test_the_recipe_of_paper_scale(studies):
    run = studies["gpt2-small"].resolve("fp32_stream", 0)
    assert (run.model.n_layers, run.model.d_model, run.model.n_heads, run.model.context) == (
        12,
        768,
        12,
        1024,
    )
    optimizer = run.optimizer
    assert (optimizer.beta1, optimizer.beta2, optimizer.weight_decay) == (0.9, 0.95, 0.0)
    assert (optimizer.lr, optimizer.warmup, optimizer.clip) == (1e-3, 2000, 1.0)
    for name in GPU_SCALES:
        run = studies[name].resolve("faulty", 0)
        assert 0.33e6 <= run.tokens_per_step <= 0.53e6
        assert run.attention.tile == 512
        assert run.train.accumulation % run.parallel.ranks == 0


@pytest.mark.parametrize("scale", GPU_SCALES)
def test_the_long_horizon_differs_by_its_steps_alone(studies, scale):
    short, long = (studies[name].resolve("faulty", 0) for name in (scale, f"{scale}-60k"))
    assert long.train.steps == 60_000
    sizes = {"steps": short.train.steps, "telemetry_every": short.train.telemetry_every}
    assert long.train.model_copy(update=sizes) == short.train
    assert (long.model, long.optimizer, long.attention) == (short.model, short.optimizer, short.attention)


def test_an_arm_that_a_scale_cannot_have_is_refused_with_the_reason(studies):
    small = studies["gpt2-small"]
    with pytest.raises(BadInput, match=r"scales\.gpt2-small\.excludes: wide-faulty: sized for scale micro"):
        small.resolve("wide-faulty", 0)
    for name in ("all", "candidates"):
        assert not {run.arm for run in small.requested(name)} & small.excluded.keys()
    assert "wide-faulty" in studies["micro"].runnable
    assert "paper-carries" in studies["micro"].excluded


def test_a_scale_without_a_threshold_of_its_own_uses_the_papers(studies):
    for name in GPU_SCALES:
        assert studies[name].resolve("paper-carries-guard", 0).interventions[0].threshold == 30.0


def test_the_papers_doses_have_no_gain(studies):
    small = studies["gpt2-small"]
    for arm in {run.arm for run in small.requested("paper")}:
        run = small.resolve(arm, 0)
        assert run.attention.precision.gain == 1, arm
        assert all(fault.gain == 1 for fault in run.faults), arm


def test_the_prediction_of_the_residual_law_has_its_runs(studies):
    """Its horizon, its rate and its dose are those of arms that can be run by name."""
    from qkpipe.analysis.law import GPT2_SMALL, PREDICTED_BITS

    long = studies["gpt2-small-60k"]
    runs = [long.resolve(run.arm, run.seed) for run in long.requested("prediction")]
    [faulty] = {run.arm: run for run in runs if run.arm == "bits_7"}.values()
    assert faulty.train.steps == GPT2_SMALL["horizon"]
    assert faulty.optimizer.lr == GPT2_SMALL["lr"]
    assert faulty.attention.precision.uniform == PREDICTED_BITS
    assert {run.arm for run in runs} >= {"fp32_stream", "bits_7"}
