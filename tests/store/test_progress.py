import pytest

from qkpipe.store import progress
from store.synthetic import write_study


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    return write_study(tmp_path_factory.mktemp("study"))


def test_a_clean_pass_costs_a_second_forward_and_backward(study):
    faulty, splice = study.resolve("faulty", 0), study.resolve("splice_mlp", 0)
    assert progress.flops_per_token(splice) == 2 * progress.flops_per_token(faulty)
    sustained = 100.0 * progress.flops_per_token(faulty)
    assert progress._speed(splice, {"faulty": 100.0}, sustained) == pytest.approx(50.0)
    assert progress._speed(splice, {"splice_mlp": 80.0}, sustained) == 80.0


def test_hours_count_every_seed_of_every_arm_and_every_start(synthetic):
    paths, study = synthetic
    line = next(line for line in progress.plan(study, paths, seeds=[7, 8]) if "measured on" in line)
    _, target, runs, missing, tokens, hours, *basis = line.split()
    arms = len(study.requested("core", [7]))
    assert (target, int(runs), int(missing)) == ("core", 2 * arms, 2 * arms)
    each = 400 * study.resolve("faulty", 7).tokens_per_step
    assert float(tokens) == pytest.approx(2 * arms * each, rel=1e-2)
    assert float(hours) == pytest.approx(2 * arms * (each / 3.0e4 + progress.START_S) / 3600, abs=0.006)
    assert "measured" in basis
