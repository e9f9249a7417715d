"""Locus controls: one trigger with the guard, nothing before it fires, and what each says it does after."""

import pytest
import torch

from qkpipe.errors import BadInput
from qkpipe.interventions.moments import Moments
from qkpipe.interventions.spectral_cap import cap_singular_values
from tiny_training import equal_bits, tiny_run, tiny_trainer, weights

TAU = 1.0
CONTROLS = {
    "value_norm": {"kind": "value_norm"},
    "mlp_norm": {"kind": "mlp_norm"},
    "lr_cut": {"kind": "lr_cut", "factor": 0.25},
    "tight_clip": {"kind": "tight_clip", "limit": 0.01},
    "moments_reset": {"kind": "moments", "action": "reset", "routes": ["all", "embed"]},
    "moments_flip": {"kind": "moments", "action": "flip", "routes": ["qk"]},
    "moments_shuffle": {"kind": "moments", "action": "shuffle", "routes": ["qk"]},
    "weight_decay": {"kind": "weight_decay", "rate": 2.0, "routes": ["value", "mlp"]},
    "spectral_cap": {"kind": "spectral_cap"},
}
GUARDS = {"guard": {"kind": "guard"}, "log": {"kind": "guard", "mode": "log"}}


def make(tmp_path, name=None, seed=0, steps=12, **changes):
    acting = {**CONTROLS, **GUARDS}.get(name)
    return tiny_trainer(
        tmp_path,
        seed=seed,
        optimizer={"lr": 5e-2},
        train={"steps": steps, **changes.pop("train", {})},
        interventions=[] if acting is None else [{**acting, "threshold": TAU}],
        **changes,
    )


def fired(tmp_path, name, **changes):
    """(trainer, hook) right after the step at which it fired."""
    trainer = make(tmp_path, name, **changes)
    hook = trainer.hooks[0]
    while hook.fire_step is None:
        trainer.step()
    return trainer, hook


@pytest.mark.parametrize("seed", range(3))
def test_guard_log_and_controls_fire_at_one_step_and_train_alike_until_then(tmp_path, seed):
    plain = make(tmp_path, seed=seed)
    log = make(tmp_path, "log", seed=seed)
    for _ in range(12):
        log.step()
    step = log.hooks[0].fire_step
    assert 0 < step < 11, "else nothing is tested"
    for _ in range(step + 1):
        plain.step()
    before = weights(plain)
    after = weights(log)
    for name in ("guard", *CONTROLS):
        trainer, hook = fired(tmp_path, name, seed=seed)
        assert hook.fire_step == step, name
        assert hook.active
        assert all(equal_bits(before[n], p) for n, p in weights(trainer).items()), name
        rows = trainer.writer.tables["steps"]
        assert [row["loss"] for row in rows] == [row["loss"] for row in plain.writer.tables["steps"]]
        while trainer.step_index < 12:
            trainer.step()
        assert hook.fire_step == step
        assert [row["guard_active"] for row in rows] == [s > step for s in range(12)], name
        assert any(not equal_bits(after[n], p) for n, p in weights(trainer).items()), f"{name} did nothing"


@pytest.mark.parametrize("name", CONTROLS)
def test_never_past_the_threshold_it_is_not_there(tmp_path, name):
    plain = make(tmp_path, steps=4)
    trainer = make(tmp_path, name, steps=4)
    trainer.hooks[0]._sensor.guard.threshold = 1e9
    for _ in range(4):
        plain.step(), trainer.step()
    assert trainer.hooks[0].fire_step is None
    assert all(equal_bits(p, weights(trainer)[n]) for n, p in weights(plain).items())
    assert plain.writer.tables["steps"] == trainer.writer.tables["steps"]


def test_values_have_unit_rms_by_head(tmp_path):
    trainer, _ = fired(tmp_path, "value_norm")
    v = trainer.model.attentions[0].W_V(torch.randn(2, 16, 16)).view(2, 16, 2, 8)
    assert torch.allclose(v.square().mean(-1), torch.ones(2, 16, 2), atol=1e-5)


def test_mlp_outputs_have_unit_rms(tmp_path):
    trainer, _ = fired(tmp_path, "mlp_norm")
    out = trainer.model.blocks[1].mlp(torch.randn(2, 16, 16))
    assert torch.allclose(out.square().mean(-1), torch.ones(2, 16), atol=1e-5)


def test_the_learning_rate_is_cut_and_said_so(tmp_path):
    trainer, _ = fired(tmp_path, "lr_cut")
    trainer.step()
    plain = make(tmp_path)
    for _ in range(trainer.step_index):
        plain.step()
    ours, theirs = (t.writer.tables["steps"][-1] for t in (trainer, plain))
    assert ours["lr"] == theirs["lr"] * 0.25
    assert ours["update_norm"] == pytest.approx(theirs["update_norm"] * 0.25, rel=1e-3)


def test_the_clip_is_tightened_and_said_so(tmp_path):
    trainer, _ = fired(tmp_path, "tight_clip")
    trainer.step()
    row = trainer.writer.tables["steps"][-1]
    assert row["grad_norm"] > 0.01
    assert row["clipped_norm"] == 0.01
    used = torch.stack([p.grad.norm() for p in trainer.parameters]).norm()
    assert float(used) == pytest.approx(0.01, rel=1e-4)


def moments_after(tmp_path, name):
    """First and second moments, step counts, by parameter, before and after the action."""
    trainer, hook = fired(tmp_path, name)

    def memory():
        return {
            n: {key: value.clone() for key, value in trainer.optimizer.state[p].items()}
            for n, p in trainer.model.named_parameters()
        }

    before = memory()
    hook.before_update(trainer.step_index)
    after = memory()
    hook.before_update(trainer.step_index + 1)
    again = memory()
    same = {n: all(equal_bits(after[n][key], again[n][key]) for key in after[n]) for n in after}
    assert all(same.values()), "once"
    return before, after


def is_qk(name):
    return "W_Q" in name or "W_K" in name


def test_reset_forgets_everything(tmp_path):
    before, after = moments_after(tmp_path, "moments_reset")
    assert all(before.values()) and not any(after.values())


@pytest.mark.parametrize("action", ["flip", "shuffle"])
def test_flip_and_shuffle_touch_the_first_moment_of_their_route_alone(tmp_path, action):
    before, after = moments_after(tmp_path, f"moments_{action}")
    for name, old in before.items():
        new = after[name]
        assert equal_bits(old["exp_avg_sq"], new["exp_avg_sq"]) and equal_bits(old["step"], new["step"])
        if not is_qk(name):
            assert equal_bits(old["exp_avg"], new["exp_avg"])
        elif action == "flip":
            assert equal_bits(new["exp_avg"], -old["exp_avg"])
        else:
            assert not equal_bits(new["exp_avg"], old["exp_avg"])
            assert equal_bits(*(m["exp_avg"].flatten().sort().values for m in (old, new)))


def test_sgd_without_momentum_has_no_moment_to_flip():
    run = tiny_run(optimizer={"name": "sgd", "momentum": 0.0})
    with pytest.raises(BadInput, match="momentum must be above 0"):
        Moments(action="flip", routes=("qk",)).check(run)
    Moments(action="reset", routes=("qk",)).check(run)


def test_sgd_s_momentum_is_its_first_moment(tmp_path):
    trainer = tiny_trainer(
        tmp_path,
        optimizer={"name": "sgd", "lr": 1.0},
        interventions=[{"kind": "moments", "action": "flip", "routes": ["qk"], "threshold": 1e-6}],
    )
    trainer.step()
    W = trainer.model.attentions[0].W_Q.weight
    before = trainer.optimizer.state[W]["momentum_buffer"].clone()
    trainer.hooks[0].before_update(1)
    assert equal_bits(trainer.optimizer.state[W]["momentum_buffer"], -before)


def test_weights_of_the_named_routes_decay(tmp_path):
    trainer, hook = fired(tmp_path, "weight_decay")
    before = weights(trainer)
    hook.after_update(trainer.step_index)
    for name, new in weights(trainer).items():
        decays = any(matrix in name for matrix in ("W_V", "W_up", "W_down"))
        assert torch.equal(new, before[name] * (1 - 0.05 * 2.0) if decays else before[name]), name


def test_singular_values_are_capped_and_the_rest_stays():
    U, V = (torch.linalg.qr(torch.randn(n, 3, generator=torch.Generator().manual_seed(n))).Q for n in (4, 6))
    W = U @ torch.diag(torch.tensor([5.0, 3.0, 1.0])) @ V.mT
    wanted = U @ torch.diag(torch.tensor([2.0, 2.0, 1.0])) @ V.mT
    assert torch.allclose(cap_singular_values(W, 2.0), wanted, atol=1e-5)
    assert cap_singular_values(W, 5.1) is None
    assert cap_singular_values(W * torch.nan, 1.0) is None


@pytest.mark.parametrize("cap", [None, 0.2])
def test_the_cap_is_the_given_one_or_the_norm_at_firing(tmp_path, cap):
    config = {"kind": "spectral_cap", "threshold": TAU, "cap": cap}
    trainer = tiny_trainer(tmp_path, optimizer={"lr": 5e-2}, train={"steps": 12}, interventions=[config])
    hook = trainer.hooks[0]
    while hook.fire_step is None:
        trainer.step()
    matrices = [W.detach() for a in trainer.model.attentions for W in (a.W_Q.weight, a.W_K.weight)]
    at_firing = [float(torch.linalg.matrix_norm(W, ord=2)) for W in matrices]
    trainer.step()
    trainer.step()
    for W, sigma in zip(matrices, at_firing, strict=True):
        limit = sigma if cap is None else cap
        assert float(torch.linalg.matrix_norm(W, ord=2)) <= limit * (1 + 1e-5)
