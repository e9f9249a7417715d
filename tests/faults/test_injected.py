"""Injected errors: as large as the quantizer's own, with exactly the structure in time that is named."""

import copy
import json
from types import SimpleNamespace

import pytest
import torch

from qkpipe.errors import BadInput
from qkpipe.faults.injected import Injected
from qkpipe.numerics import quantize_mx
from tiny_training import equal_bits, step_gradients, tiny_run, tiny_trainer, weights

STRUCTURES = ("native", "coherent", "resampled", "held", "mean_removed", "mean_only", "dc")


class Bench:
    """The fault on one matrix and one gain vector, with gradients that change from step to step."""

    def __init__(self, structure, seed=0, **changes):
        hold = {"hold": 3} if structure == "held" else {}
        config = Injected(routes=("mlp",), structure=structure, **hold | changes)
        self.matrix = torch.nn.Parameter(torch.zeros(48, 64))
        self.gains = torch.nn.Parameter(torch.zeros(64))
        self.observed = {}
        context = SimpleNamespace(
            parameters=lambda routes: [("matrix", self.matrix), ("gains", self.gains)],
            run=SimpleNamespace(seed=seed),
            errors=SimpleNamespace(observe=lambda step, name, error: self.observed.update({name: error})),
        )
        self.hook = config.build(context)

    def error(self, step):
        """(the error put in, the quantizer's own error) in ``step``."""
        generator = torch.Generator().manual_seed(step)
        gradient = torch.randn(48, 64, generator=generator) * 0.01
        self.matrix.grad = gradient.clone()
        self.gains.grad = torch.full((64,), 0.3)
        self.hook.reduced_gradient(step)
        assert set(self.observed) == {"matrix"}
        assert (self.gains.grad == 0.3).all(), "a vector of gains is no matrix"
        error = self.observed["matrix"].clone()
        torch.testing.assert_close(self.matrix.grad, gradient + error)
        return error, quantize_mx(gradient) - gradient


@pytest.mark.parametrize("gain", [0.5, 1.0, 30.0])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_size_is_the_quantizers_own_times_the_gain(structure, gain):
    error, own = Bench(structure, gain=gain).error(2)
    # Two norms of 3072 fp32 numbers and one product: a few ulps.
    assert float(error.double().norm()) == pytest.approx(gain * float(own.double().norm()), rel=2e-6)


def test_native_is_the_error_itself():
    error, own = Bench("native").error(0)
    torch.testing.assert_close(error, own, rtol=1e-6, atol=0)


@pytest.mark.parametrize("structure", ["coherent", "resampled", "held"])
def test_signed_structures_keep_every_elements_size(structure):
    error, own = Bench(structure).error(0)
    torch.testing.assert_close(error.abs(), own.abs(), rtol=1e-6, atol=0)
    positive = float((error[own != 0] > 0).float().mean())
    assert positive == pytest.approx(0.5, abs=0.05), "fair coins"


def signs(structure, steps, **changes):
    """Sign patterns where no step's own error is zero."""
    bench = Bench(structure, **changes)
    errors = [bench.error(step) for step in steps]
    there = torch.stack([own != 0 for _, own in errors]).all(0)
    return [error.sign()[there] for error, _ in errors]


def test_coherent_signs_are_those_of_the_run():
    first, *others = signs("coherent", range(5))
    assert all(torch.equal(first, other) for other in others)
    assert not torch.equal(signs("coherent", [0], seed=1)[0], first)


def test_resampled_signs_differ_every_step():
    patterns = signs("resampled", range(5))
    for step in range(4):
        agreement = float((patterns[step] * patterns[step + 1]).mean())
        assert abs(agreement) < 0.1


def test_held_signs_change_every_h_steps():
    patterns = signs("held", range(9), hold=3)
    for step in range(8):
        same = torch.equal(patterns[step], patterns[step + 1])
        assert same == (step % 3 != 2), step


def test_held_limits():
    """Held for one step is resampled, held for ever is coherent: to the bit."""
    for other, hold in (("resampled", 1), ("coherent", 10**6)):
        benches = Bench("held", hold=hold), Bench(other)
        for step in range(4):
            assert equal_bits(*(bench.error(step)[0] for bench in benches))


def test_a_pattern_does_not_depend_on_what_was_drawn_before():
    """So that a resumed run goes on with the same signs."""
    fresh = signs("held", [7], hold=3)[0]
    bench = Bench("held", hold=3)
    for step in range(7):
        bench.error(step)
    error, own = bench.error(7)
    assert torch.equal(error.sign()[own != 0], fresh)


def test_means():
    removed, own = Bench("mean_removed").error(0)
    assert float(removed.double().mean()) == pytest.approx(0, abs=1e-9)
    centred = own - own.mean()
    torch.testing.assert_close(removed, centred * (own.norm() / centred.norm()))
    only, own = Bench("mean_only").error(0)
    assert len(only.unique()) == 1
    assert torch.sign(only[0, 0]) == torch.sign(own.mean())
    for step in range(5):
        dc, own = Bench("dc").error(step)
        torch.testing.assert_close(dc, torch.full_like(dc, float(own.norm()) / 3072**0.5))


@pytest.mark.parametrize(
    ("structure", "low", "high"), [("coherent", 0.97, 1.0), ("dc", 1.0, 1.0), ("resampled", -0.1, 0.1)]
)
def test_coherence_column(tmp_path, structure, low, high):
    trainer = tiny_trainer(
        tmp_path,
        faults=[{"kind": "injected", "routes": ["mlp"], "structure": structure}],
        train={"steps": 8, "telemetry_every": 1},
    )
    for _ in range(8):
        trainer.step()
    rows = [row for row in trainer.writer.tables["routes"] if row["route"] == "mlp"]
    assert all(row["coherence"] is None for row in rows if row["step"] == 0)
    late = [row["coherence"] for row in rows if row["step"] > 0]
    assert len(late) == 14
    assert all(low <= value <= high + 1e-9 for value in late)


def test_nothing_is_injected_into_a_gradient_without_error(tmp_path):
    bench = Bench("coherent")
    bench.matrix.grad, bench.gains.grad = torch.zeros(48, 64), torch.zeros(64)
    bench.hook.reduced_gradient(0)
    assert not bench.matrix.grad.any()
    assert not bench.observed


@pytest.mark.parametrize(("structure", "hold"), [("held", None), ("coherent", 3)])
def test_hold_goes_with_held_alone(structure, hold):
    fault = {"kind": "injected", "routes": ["mlp"], "structure": structure, "hold": hold}
    run = tiny_run(faults=[fault])
    with pytest.raises(BadInput, match=r"faults.hold: goes with structure 'held'"):
        run.faults[0].check(run)


def matched(tmp_path, structure, optimizer, match="update_norm", **changes):
    fault = {"kind": "injected", "routes": ["mlp"], "structure": structure, "gain": 10, "match": match}
    return tiny_trainer(
        tmp_path, faults=[fault | changes], optimizer=optimizer, train={"steps": 6, "telemetry_every": 1}
    )


def updates(trainer):
    """Realised updates of a step, by parameter name."""
    before = weights(trainer)
    trainer.step()
    return {name: p.detach() - before[name] for name, p in trainer.model.named_parameters()}


OPTIMIZERS = [{"name": "adamw", "weight_decay": 0.1}, {"name": "sgd", "lr": 0.1}, {"clip": None}]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("structure", ["coherent", "resampled", "dc"])
def test_first_update_has_the_native_errors_norm(tmp_path, structure, optimizer):
    """From equal weights and moments the native arm itself is the reference; later the weights part."""
    native = updates(matched(tmp_path, "native", optimizer, match="gradient_norm"))
    trainer = matched(tmp_path, structure, optimizer)
    found = updates(trainer)
    unmatched = updates(matched(tmp_path, structure, optimizer, match="gradient_norm"))
    for name, update in found.items():
        if ".mlp." in name:
            assert float(update.norm()) == pytest.approx(float(native[name].norm()), rel=1e-4), name
            cosine = torch.cosine_similarity(update.flatten(), unmatched[name].flatten(), dim=0)
            assert float(cosine) == pytest.approx(1, abs=1e-5), "the direction is its own"
        else:
            assert equal_bits(update, unmatched[name]), name


def test_matched_norms_are_logged_and_resampled_errors_had_shrunk(tmp_path):
    trainer = matched(tmp_path, "resampled", {})
    for _ in range(6):
        trainer.step()
    details = [
        json.loads(e["detail"]) for e in trainer.writer.tables["events"] if e["kind"] == "update_matched"
    ]
    assert len(details) == 6
    assert all(detail["update_norm"] > 0 for detail in details)
    assert details[-1]["reference_norm"] != pytest.approx(details[-1]["update_norm"], rel=1e-3)


def test_a_matched_run_resumes_with_its_references_moments(tmp_path):
    whole, first, second = (matched(tmp_path, "held", {}, hold=2) for _ in range(3))
    for _ in range(6):
        whole.step()
    for _ in range(3):
        first.step()
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for _ in range(3):
        second.step()
    ours, theirs = weights(whole), weights(second)
    assert all(equal_bits(ours[name], theirs[name]) for name in ours)


def test_native_is_its_own_reference():
    fault = {"kind": "injected", "routes": ["mlp"], "structure": "native", "match": "update_norm"}
    run = tiny_run(faults=[fault])
    with pytest.raises(BadInput, match=r"faults.match: 'update_norm'"):
        run.faults[0].check(run)


def test_the_last_block_alone(tmp_path):
    fault = {"kind": "injected", "routes": ["mlp"], "structure": "coherent", "layers": [-1]}
    plain, faulty = (step_gradients(tiny_trainer(tmp_path, faults=faults)) for faults in ([], [fault]))
    changed = {name for name in plain if not torch.equal(plain[name], faulty[name])}
    assert changed == {"blocks.1.mlp.W_up.weight", "blocks.1.mlp.W_down.weight"}
