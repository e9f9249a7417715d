"""What a plan counts, against numbers worked out by hand."""

import pytest

from qkpipe.config import load_study
from qkpipe.store import progress
from tiny_training import tiny_run

SMALL = load_study(scale="gpt2-small")


def test_flops_of_a_model_small_enough_to_count():
    """Width 16, two layers, context 16, 256 tokens: 12 * 16^2 weights a layer and 16 * 256 of the head."""
    run = tiny_run()
    weights = 2 * 12 * 16**2 + 256 * 16
    assert weights == 10_240
    attention = 6 * 2 * 16 * 16
    assert progress.flops_per_token(run) == 6 * weights + attention == 64_512
    assert progress.training_flops(run) == 64_512 * 6 * 2 * 16
    assert progress.parameters(run) == weights + 16 * 16


def test_grouped_heads_and_a_gated_mlp_are_counted_as_they_are():
    model = {"n_kv_heads": 1, "mlp": "swiglu", "d_ff": 40, "position": "rope", "tied_head": False}
    run = tiny_run(model=model)
    layer = 16 * 16 * (1 + 1 + 0.5 + 0.5) + 3 * 16 * 40
    assert progress.matrix_weights(run) == 2 * layer + 256 * 16
    assert progress.parameters(run) == 2 * layer + 2 * 256 * 16


def test_a_clean_splice_is_a_second_pass_however_many_ask_for_it():
    splices = [{"kind": "splice", "routes": ["qk"]}, {"kind": "fault_only", "routes": ["mlp"]}]
    spliced = tiny_run(interventions=splices)
    assert progress.flops_per_token(spliced) == 2 * progress.flops_per_token(tiny_run())


def test_gpt2_small_is_the_known_model():
    """124M parameters; 6ND and attention of 6000 steps of 2^19 tokens; three numbers a parameter in a checkpoint."""
    run = SMALL.resolve("fp32", 0)
    assert run.tokens_per_step == 2**19
    assert progress.parameters(run) == 12 * 12 * 768**2 + (50_257 + 1024) * 768 == 124_318_464
    per_token = 6 * (12 * 12 * 768**2 + 50_257 * 768) + 6 * 12 * 1024 * 768
    assert progress.training_flops(run) == pytest.approx(per_token * 6000 * 2**19)
    assert progress.checkpoint_bytes(run) == 12 * 124_318_464


def test_sharding_shares_out_what_belongs_to_the_weights():
    whole, shared = (
        tiny_run(train={"accumulation": 2}, parallel={"kind": kind, "ranks": 2}) for kind in ("ddp", "fsdp2")
    )
    saved = progress.device_bytes(whole) - progress.device_bytes(shared)
    assert saved == 20 * progress.parameters(whole) / 2


def test_rows_of_a_run():
    """Six steps; looks at 0, 2, 4: two layers, two heads each, four routes each, and the embeddings' route."""
    assert progress.run_bytes(tiny_run()) == progress.ROW_BYTES * (6 + 3 * (2 + 4 + 8 + 1))


def test_an_arm_not_timed_yet_runs_at_the_flops_of_those_that_were():
    plain = tiny_run()
    spliced = tiny_run(interventions=[{"kind": "splice", "routes": ["mlp"]}])
    sustained = 100.0 * progress.flops_per_token(plain)
    tokens = plain.train.steps * plain.tokens_per_step
    assert progress._seconds(spliced, {"fp32": 100.0}, sustained) == pytest.approx(
        progress.START_S + tokens / 50
    )
    assert progress._seconds(spliced, {spliced.arm: 80.0}, sustained) == progress.START_S + tokens / 80


def test_hours_count_every_seed_of_every_arm_and_every_start(synthetic):
    paths, study = synthetic
    line = next(line for line in progress.plan(study, paths, seeds=[7, 8]) if "measured on" in line)
    _, target, jobs, tokens, _, hours, _, _, *basis = line.split()
    arms = len(study.requested("core", [7]))
    assert (target, int(jobs)) == ("core", 2 * arms)
    each = 400 * study.resolve("faulty", 7).tokens_per_step
    assert float(tokens) == pytest.approx(2 * arms * each, rel=1e-2)
    assert float(hours) == pytest.approx(2 * arms * (each / 3.0e4 + progress.START_S) / 3600, abs=0.006)
    assert "measured" in basis
