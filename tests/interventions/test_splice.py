"""Clean splice and its complement: what is clean is exactly clean, what is not is left alone to the bit."""

import pytest

from qkpipe.model.routes import route_of
from tiny_training import FAULTY, STREAM, equal_bits, step_gradients, tiny_trainer, weights

SPLICE_QK = {"kind": "splice", "routes": ["qk"]}


def quantizer(**changes):
    return {"kind": "quantizer", "routes": ["mlp"], "gain": 3.0, **changes}


FAULTS_ELSEWHERE = {
    "post_reduction": quantizer(),
    "pre_reduction": quantizer(placement="pre_reduction"),
    "operand": quantizer(placement="operand"),
    "operand on vo": quantizer(placement="operand", routes=["vo"]),
    "stochastic": quantizer(placement="operand", format={"rounding": "stochastic"}),
    "injected": {"kind": "injected", "routes": ["vo", "mlp"], "structure": "resampled", "gain": 3.0},
}


@pytest.mark.parametrize("attention", [{"kind": "sdpa"}, STREAM], ids=["sdpa", "stream"])
@pytest.mark.parametrize("fault", FAULTS_ELSEWHERE)
def test_over_clean_attention_a_fault_elsewhere_is_not_spliced(tmp_path, attention, fault):
    """Such a cell of the factorial is not applicable: the trajectory is the unspliced one, bit for bit."""
    shared = {
        "attention": attention,
        "faults": [FAULTS_ELSEWHERE[fault]],
        "train": {"accumulation": 2, "steps": 3},
    }
    plain = tiny_trainer(tmp_path, **shared)
    spliced = tiny_trainer(tmp_path, **shared, interventions=[SPLICE_QK])
    healthy = tiny_trainer(tmp_path, attention=attention, train=shared["train"])
    for _ in range(3):
        losses = [trainer.step().loss for trainer in (plain, spliced, healthy)]
        assert losses[0] == losses[1]
    ours, theirs, without = weights(plain), weights(spliced), weights(healthy)
    assert all(equal_bits(ours[name], theirs[name]) for name in ours)
    assert any(not equal_bits(ours[name], without[name]) for name in ours), "the fault must act"
    assert plain.writer.tables["heads"] == spliced.writer.tables["heads"]
    assert plain.writer.tables["layers"] == spliced.writer.tables["layers"]


def test_over_clean_attention_the_bits_hold_at_the_size_of_the_study(tmp_path):
    """Kernels change with the size of a matrix product."""
    shared = {
        "model": {"d_model": 64, "n_layers": 1, "context": 128},
        "faults": [quantizer(placement="operand")],
        "train": {"batch_size": 8, "steps": 1},
    }
    plain = step_gradients(tiny_trainer(tmp_path, **shared))
    spliced = step_gradients(tiny_trainer(tmp_path, **shared, interventions=[SPLICE_QK]))
    assert all(equal_bits(plain[name], spliced[name]) for name in plain)


@pytest.fixture(params=[1, 2], ids=["one batch", "accumulating"])
def three(tmp_path, request):
    """Gradients of the first step: clean, faulty, and a function giving those with an intervention."""

    def first_step(attention, *interventions):
        return step_gradients(
            tiny_trainer(
                tmp_path,
                attention=attention,
                interventions=list(interventions),
                train={"accumulation": request.param},
            )
        )

    return first_step(STREAM), first_step(FAULTY), lambda *acting: first_step(FAULTY, *acting)


@pytest.mark.parametrize("routes", [("qk",), ("mlp",), ("vo",), ("value", "embed"), ("all",)])
def test_the_named_routes_are_clean_and_the_others_faulty(three, routes):
    clean, faulty, step = three
    named = {"vo": ("value", "proj"), "all": ("qk", "value", "proj", "mlp")}
    members = {r for route in routes for r in named.get(route, (route,))}
    spliced = step({"kind": "splice", "routes": routes})
    complement = step({"kind": "fault_only", "routes": routes})
    for name in clean:
        inside = route_of(name)[0] in members
        assert equal_bits(spliced[name], clean[name] if inside else faulty[name]), name
        assert equal_bits(complement[name], faulty[name] if inside else clean[name]), name
        assert not equal_bits(clean[name], faulty[name]), "else nothing is tested"


def test_a_fault_on_the_route_itself_is_taken_out(tmp_path):
    shared = {"train": {"accumulation": 2}}
    healthy = step_gradients(tiny_trainer(tmp_path, **shared))
    for placement in ("post_reduction", "pre_reduction", "operand"):
        faults = [quantizer(placement=placement, routes=["qk"])]
        spliced = step_gradients(tiny_trainer(tmp_path, **shared, faults=faults, interventions=[SPLICE_QK]))
        assert all(equal_bits(spliced[name], healthy[name]) for name in healthy), placement


def test_the_clean_pass_is_seen_by_neither_guard_nor_telemetry(tmp_path):
    """Faulty and clean logits differ; the first step's rows and the guard's maximum are those of the faulty pass."""
    guard = {"kind": "guard", "threshold": 1e6}
    alone = tiny_trainer(tmp_path, attention=FAULTY, interventions=[guard])
    with_splice = tiny_trainer(
        tmp_path, attention=FAULTY, interventions=[guard, {"kind": "splice", "routes": ["all"]}]
    )
    for trainer in (alone, with_splice):
        trainer.step()
    assert alone.writer.tables["heads"] == with_splice.writer.tables["heads"]
    assert alone.writer.tables["layers"] == with_splice.writer.tables["layers"]
    guards = [trainer.hooks[0].guard for trainer in (alone, with_splice)]
    assert guards[0].max_logit() == guards[1].max_logit()
    assert guards[0].state_dict() == guards[1].state_dict()


def test_the_error_of_every_route_is_logged(tmp_path):
    trainer = tiny_trainer(tmp_path, attention=FAULTY, interventions=[SPLICE_QK])
    clean, faulty = (
        step_gradients(tiny_trainer(tmp_path, attention=attention)) for attention in (STREAM, FAULTY)
    )
    trainer.step()
    for row in trainer.writer.tables["routes"]:
        names = [name for name in clean if route_of(name) == (row["route"], row["layer"])]
        squares = sum(float((faulty[name] - clean[name]).double().square().sum()) for name in names)
        assert row["error_norm"] == pytest.approx(squares**0.5, rel=1e-4)
