"""The gradient quantizer: where each placement rounds, what a gain does, and what stays untouched."""

from types import SimpleNamespace

import pytest
import torch
from pydantic import ValidationError

from qkpipe.errors import BadInput
from qkpipe.faults.quantizer import Quantizer, QuantizerFormat
from qkpipe.model.linear import Linear
from qkpipe.model.routes import route_of
from qkpipe.numerics import quantize_mx
from qkpipe.train.distributed import ONE_RANK
from tiny_training import equal_bits, step_gradients, tiny_run, tiny_trainer

PLACEMENTS = ("post_reduction", "pre_reduction", "operand")


def fault(**changes):
    return {"kind": "quantizer", "routes": ["mlp"], **changes}


def gradients(tmp_path, *faults, accumulation=1):
    return step_gradients(tiny_trainer(tmp_path, faults=list(faults), train={"accumulation": accumulation}))


def test_after_reduction_the_gradient_is_the_quantized_one(tmp_path):
    plain, faulty = gradients(tmp_path), gradients(tmp_path, fault())
    for name, gradient in plain.items():
        expected = quantize_mx(gradient, "mxfp4") if route_of(name)[0] == "mlp" else gradient
        assert equal_bits(faulty[name], expected), name
        assert (route_of(name)[0] != "mlp") or not torch.equal(gradient, expected)


def test_before_reduction_each_micro_batch_is_quantized(tmp_path):
    """By hand: the micro-batches' own gradients come from a batch of which the other half is left out."""
    before = gradients(tmp_path, fault(placement="pre_reduction"), accumulation=2)
    after = gradients(tmp_path, fault(placement="post_reduction"), accumulation=2)
    trainer = tiny_trainer(tmp_path, train={"accumulation": 2})
    halves = []
    for windows in trainer._batch(0):
        trainer.model.zero_grad()
        (trainer.model(windows[:, :-1], windows[:, 1:]) / 2).backward()
        halves.append({name: p.grad for name, p in trainer.model.named_parameters()})
    for name in before:
        own, other = (half[name] for half in halves)
        if route_of(name)[0] == "mlp":
            assert equal_bits(before[name], quantize_mx(own) + quantize_mx(other)), name
            assert equal_bits(after[name], quantize_mx(own + other)), name
            assert not torch.equal(before[name], after[name])
        else:
            assert equal_bits(before[name], own + other), name


@pytest.mark.parametrize("gain", [0.0, 1.0, 2.5])
def test_operands_by_hand(gain):
    """Both operands of dy' x, blocks along the tokens."""
    torch.manual_seed(0)
    layer = Linear(6, 5)
    x, dy = torch.randn(2, 40, 6), torch.randn(2, 40, 5)
    errors = []
    context = SimpleNamespace(
        model=layer,
        parameters=lambda routes: [("weight", layer.weight)],
        run=SimpleNamespace(seed=0, train=SimpleNamespace(accumulation=1)),
        ranks=ONE_RANK,
        errors=SimpleNamespace(observe=lambda step, name, error: errors.append(error)),
    )
    hook = Quantizer(routes=("mlp",), placement="operand", gain=gain).build(context)
    hook.begin_step(0)
    layer(x).backward(dy)
    hook.micro_gradient(0, 0)
    hook.reduced_gradient(0)
    exact = dy.flatten(0, 1).mT @ x.flatten(0, 1)
    faulty = quantize_mx(dy.flatten(0, 1), axis=0).mT @ quantize_mx(x.flatten(0, 1), axis=0)
    if gain == 1.0:
        assert equal_bits(layer.weight.grad, faulty)
    torch.testing.assert_close(layer.weight.grad, exact + gain * (faulty - exact))
    torch.testing.assert_close(errors, [gain * (faulty - exact)])


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_gain_is_linear(tmp_path, placement):
    def error(gain):
        made = gradients(tmp_path, fault(placement=placement, gain=gain), accumulation=2)
        return {name: made[name] - plain[name] for name in plain}

    plain = gradients(tmp_path, accumulation=2)
    nothing, once, thrice = error(0.0), error(1.0), error(3.0)
    for name, gradient in plain.items():
        torch.testing.assert_close(nothing[name], torch.zeros_like(gradient), rtol=0, atol=1e-8)
        torch.testing.assert_close(thrice[name], 3 * once[name], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_only_matrices_of_the_route_are_touched(tmp_path, placement):
    plain = gradients(tmp_path, accumulation=2)
    faulty = gradients(tmp_path, fault(routes=["vo"], placement=placement), accumulation=2)
    changed = {name for name in plain if not torch.equal(plain[name], faulty[name])}
    assert changed == {f"blocks.{layer}.attention.{W}.weight" for layer in (0, 1) for W in ("W_V", "W_O")}


def test_gains_of_the_norms_are_left_alone(tmp_path):
    plain, faulty = gradients(tmp_path), gradients(tmp_path, fault(routes=["embed"]))
    changed = {name for name in plain if not torch.equal(plain[name], faulty[name])}
    assert changed == {"embed.weight", "position.weight"}


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_stochastic_rounding_is_a_function_of_the_step(tmp_path, placement):
    stochastic = fault(placement=placement, format={"rounding": "stochastic"})
    first, again = (gradients(tmp_path, stochastic, accumulation=2) for _ in range(2))
    assert all(equal_bits(first[name], again[name]) for name in first)
    to_even = gradients(tmp_path, fault(placement=placement), accumulation=2)
    assert any(not torch.equal(first[name], to_even[name]) for name in first)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_the_error_is_logged(tmp_path, placement):
    trainer = tiny_trainer(tmp_path, faults=[fault(placement=placement)], train={"accumulation": 2})
    plain = gradients(tmp_path, accumulation=2)
    faulty = step_gradients(trainer)
    rows = {(row["layer"], row["route"]): row for row in trainer.writer.tables["routes"]}
    for layer in (0, 1):
        names = [n for n in plain if route_of(n) == ("mlp", layer)]
        errors = torch.cat([(faulty[n] - plain[n]).flatten() for n in names])
        assert rows[layer, "mlp"]["error_norm"] == pytest.approx(float(errors.norm()), rel=1e-4)
        assert rows[layer, "mlp"]["error_mean"] == pytest.approx(float(errors.mean()), rel=1e-2, abs=1e-10)
        assert rows[layer, "qk"]["error_norm"] is None


def test_placements_that_would_do_nothing_are_refused():
    run = tiny_run(faults=[fault(placement="pre_reduction")])
    with pytest.raises(BadInput, match=r"faults.placement: 'pre_reduction'.*accumulation must be at least 2"):
        run.faults[0].check(run)
    run = tiny_run(faults=[fault(placement="operand", routes=["mlp", "embed"])])
    with pytest.raises(BadInput, match=r"faults.routes: 'embed'.*allowed: qk, value, proj, vo, mlp, all"):
        run.faults[0].check(run)
    for placement in ("post_reduction", "operand"):
        run = tiny_run(faults=[fault(placement=placement)])
        run.faults[0].check(run)


def test_a_scale_rule_that_the_format_does_not_have_is_refused():
    with pytest.raises(ValidationError, match="nvfp4 has a rule of its own"):
        QuantizerFormat(fmt="nvfp4", scale_rule="even")
    x = torch.randn(3, 32)
    for fmt in ("mxfp4", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp8_e4m3", "mxfp8_e5m2", "nvfp4"):
        assert QuantizerFormat(fmt=fmt).quantize(x, axis=-1, draw=0).shape == x.shape


def changed_matrices(tmp_path, **selection):
    plain = gradients(tmp_path, accumulation=2)
    faulty = gradients(tmp_path, fault(**selection), accumulation=2)
    return {name for name in plain if not torch.equal(plain[name], faulty[name])}


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_layers_and_matrices_narrow_the_choice(tmp_path, placement):
    last = {"routes": ["all"], "layers": [-1], "matrices": ["W_Q", "W_down"], "placement": placement}
    names = {"blocks.1.attention.W_Q.weight", "blocks.1.mlp.W_down.weight"}
    assert changed_matrices(tmp_path, **last) == names


def test_the_head_alone(tmp_path):
    run = {"model": {"tied_head": False}}
    head = fault(routes=["embed"], matrices=["head"])
    plain = step_gradients(tiny_trainer(tmp_path, **run))
    faulty = step_gradients(tiny_trainer(tmp_path, faults=[head], **run))
    assert {name for name in plain if not torch.equal(plain[name], faulty[name])} == {"head.weight"}


@pytest.mark.parametrize(
    ("selection", "words"),
    [
        ({"layers": [2]}, "faults.layers: 2: the model has 2 layers; allowed: -2 to 1"),
        ({"layers": [0], "routes": ["embed"]}, "faults.layers: route 'embed' lies outside the layers"),
        ({"matrices": ["W_gate"]}, "faults.matrices: 'W_gate' .* on mlp; allowed: W_up, W_down"),
        ({"matrices": ["head"], "routes": ["embed"]}, "faults.matrices: 'head'.*allowed: embed, position"),
    ],
)
def test_a_choice_of_nothing_is_refused(selection, words):
    run = tiny_run(faults=[fault(**selection)])
    with pytest.raises(BadInput, match=words):
        run.faults[0].check(run)


def test_two_operand_quantizers_on_one_matrix_are_refused():
    """Each would replace the other's GEMM: the last would win."""
    run = tiny_run(faults=[fault(placement="operand"), fault(placement="operand", routes=["all"])])
    with pytest.raises(BadInput, match=r"faults.placement: two 'operand' quantizers on W_down of layer 0"):
        run.faults[1].check(run)
    apart = [fault(placement="operand", layers=[layer]) for layer in (0, 1)]
    for faults in (apart, [fault(placement="operand"), fault()]):
        run = tiny_run(faults=faults)
        for each in run.faults:
            each.check(run)


def test_two_faults_on_a_route_are_logged_as_their_sum(tmp_path):
    trainer = tiny_trainer(tmp_path, faults=[fault(placement="operand"), fault(gain=3.0)])
    plain = gradients(tmp_path)
    faulty = step_gradients(trainer)
    rows = {(row["layer"], row["route"]): row for row in trainer.writer.tables["routes"]}
    errors = torch.cat([(faulty[n] - plain[n]).flatten() for n in plain if route_of(n) == ("mlp", 0)])
    assert rows[0, "mlp"]["error_norm"] == pytest.approx(float(errors.norm()), rel=1e-4)
