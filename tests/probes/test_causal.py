"""Causal probe: energies, norms, sides, controls, and that observing changes no bit."""

import math
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from pydantic import ValidationError

from qkpipe.errors import BadInput
from qkpipe.probes.causal import ActingProbe, CausalProbe, component, project_update

SIDES = ["two_sided", "left", "right", "either"]
ACTIONS = ["on_target", "off_target", "off_target_unscaled", "isotropic"]


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def orthonormal(n, k, seed):
    return torch.linalg.qr(torch.randn(n, k, generator=generator(seed), dtype=torch.float64)).Q


def energy(X):
    return X.square().sum((-2, -1))


@pytest.fixture
def case():
    D = torch.randn(2, 12, 9, generator=generator(), dtype=torch.float64)
    U = torch.stack([orthonormal(12, 2, 1), orthonormal(12, 2, 2)])
    V = torch.stack([orthonormal(9, 2, 3), orthonormal(9, 2, 4)])
    return D, U, V


def test_component_by_projectors(case):
    D, U, V = case
    P, Q = U @ U.mT, V @ V.mT
    left, right = torch.eye(12, dtype=torch.float64) - P, torch.eye(9, dtype=torch.float64) - Q
    expected = {"two_sided": P @ D @ Q, "left": P @ D, "right": D @ Q, "either": D - left @ D @ right}
    for side, C in expected.items():
        torch.testing.assert_close(component(D, U, V, side), C)


@pytest.mark.parametrize("side", SIDES)
def test_energies(case, side):
    D, U, V = case
    total = energy(D)
    on = energy(component(D, U, V, side))
    torch.testing.assert_close(on + energy(D - component(D, U, V, side)), total)
    results = {action: project_update(D, U, V, action=action, side=side) for action in ACTIONS}
    for action, result in results.items():
        assert result.feasible.all(), action
        torch.testing.assert_close(result.total, total)
        torch.testing.assert_close(result.on, on)
        torch.testing.assert_close(result.removed, on)
    # On target: none of C is left, the rest points where it did, the norm is that of D.
    kept = results["on_target"].D
    torch.testing.assert_close(energy(component(kept, U, V, side)), torch.zeros_like(on), atol=1e-24, rtol=0)
    rest = D - component(D, U, V, side)
    torch.testing.assert_close(kept, rest * (total / energy(rest)).sqrt()[:, None, None])
    torch.testing.assert_close(energy(kept), total)
    # Off target, unscaled: C is untouched and |C|^2 is gone from the rest.
    bare = results["off_target_unscaled"].D
    torch.testing.assert_close(component(bare, U, V, side), component(D, U, V, side))
    torch.testing.assert_close(energy(bare), total - on)
    # Off target: the same direction at the norm of D.
    scaled = results["off_target"].D
    torch.testing.assert_close(energy(scaled), total)
    torch.testing.assert_close(scaled, bare * (total / (total - on)).sqrt()[:, None, None])
    # Isotropic: the direction of D, the same energy less.
    torch.testing.assert_close(results["isotropic"].D, D * (1 - on / total).sqrt()[:, None, None])


def test_rounding_of_directions_is_not_amplified():
    """With D inside the span, D - C is rounding: it must not be blown up to |D|."""
    U, V = orthonormal(12, 2, 1), orthonormal(9, 2, 3)
    D = U @ torch.tensor([[3.0, 1.0], [0.5, 2.0]], dtype=torch.float64) @ V.T
    for action in ("on_target", "off_target", "off_target_unscaled"):
        result = project_update(D, U, V, action=action, side="two_sided")
        assert not result.feasible and result.removed == 0 and torch.equal(result.D, D)
    shrunk = project_update(D, U, V, action="isotropic", side="two_sided")
    assert shrunk.feasible and energy(shrunk.D) < 1e-20 * energy(D)


def test_off_target_needs_room(case):
    D, U, V = case
    D = D.clone()
    D[0] = D[0] + 20 * U[0] @ V[0].T  # |C|^2 > |D - C|^2 in the first matrix only
    result = project_update(D, U, V, action="off_target", side="two_sided")
    assert result.feasible.tolist() == [False, True]
    assert torch.equal(result.D[0], D[0]) and not torch.equal(result.D[1], D[1])
    assert result.removed[0] == 0 and result.removed[1] == result.on[1]
    assert project_update(D, U, V, action="on_target", side="two_sided").feasible.all()


@pytest.mark.parametrize("action", [*ACTIONS, "observe"])
def test_no_update_is_no_event(case, action):
    D, U, V = case
    result = project_update(torch.zeros_like(D), U, V, action=action, side="either")
    assert result.feasible.all() and torch.equal(result.D, torch.zeros_like(D))


@pytest.mark.parametrize("action", [*ACTIONS, "observe"])
def test_not_finite_is_left_alone(case, action):
    D, U, V = case
    D[0, 0, 0] = float("nan")
    result = project_update(D, U, V, action=action, side="two_sided")
    assert result.feasible.tolist() == [False, True]
    assert torch.equal(result.D[0].nan_to_num(), D[0].nan_to_num())


def weights(seed=0, shapes=((10, 8), (6, 8), (10, 8))):
    return [
        (i, name, torch.randn(shape, generator=generator(seed + i)))
        for i, (name, shape) in enumerate(zip(("W_Q", "W_K", "W_Q"), shapes))
    ]


def step_all(matrices, seed=100, size=0.01):
    for i, (_, _, W) in enumerate(matrices):
        W += size * torch.randn(W.shape, generator=generator(seed + i))


def acted(config, seed=0):
    """Old weights, optimizer's weights and final weights of one step, with the rows."""
    matrices = weights()
    old = [W.clone() for _, _, W in matrices]
    probe = ActingProbe(config, matrices, seed)
    probe.before_step(0)
    step_all(matrices)
    stepped = [W.clone() for _, _, W in matrices]
    rows, events = probe.after_step(0)
    return old, stepped, [W for _, _, W in matrices], rows, events


@pytest.mark.parametrize("directions, first", [("leading", 0), ("next", 2)])
def test_acts_along_singular_directions_of_the_old_weight(directions, first):
    old, stepped, new, rows, events = acted(CausalProbe(action="on_target", k=2, directions=directions))
    assert not events and len(rows) == 3
    rows = {row["layer"]: row for row in rows}
    for i, (W_old, W_step, W_new) in enumerate(zip(old, stepped, new)):
        U, _, Vh = torch.linalg.svd(W_old.double())
        U, V = U[:, first : first + 2], Vh[first : first + 2].T
        D, D_new = W_step.double() - W_old.double(), W_new.double() - W_old.double()
        assert energy(U.T @ D_new @ V) < 1e-9 * energy(D)
        torch.testing.assert_close(energy(D_new), energy(D), rtol=1e-5, atol=0)
        assert rows[i]["energy_total"] == pytest.approx(energy(D).item())
        assert rows[i]["energy_on"] == rows[i]["energy_removed"] == pytest.approx(energy(U.T @ D @ V).item())


def test_removed_energy_is_equal_across_actions():
    removed = [
        [row["energy_removed"] for row in acted(CausalProbe(action=action, k=2))[3]] for action in ACTIONS
    ]
    assert all(row == removed[0] for row in removed) and min(removed[0]) > 0


def test_observing_changes_no_bit():
    _, stepped, new, rows, events = acted(CausalProbe(action="observe", k=2))
    assert all(torch.equal(a, b) for a, b in zip(stepped, new)) and not events
    assert all(row["energy_removed"] == 0 < row["energy_on"] < row["energy_total"] for row in rows)


def test_infeasible_step_keeps_the_update_and_says_so():
    matrices = weights()
    probe = ActingProbe(CausalProbe(action="off_target", k=2), matrices, 0)
    probe.before_step(0)
    _, _, W = matrices[1]
    U, _, Vh = torch.linalg.svd(W)
    W += U[:, :2] @ Vh[:2]
    stepped = W.clone()
    rows, events = probe.after_step(0)
    assert torch.equal(W, stepped)
    assert [(e["layer"], e["matrix"], e["action"]) for e in events] == [(1, "W_K", "off_target")]
    assert {row["layer"]: row["energy_removed"] for row in rows}[1] == 0


def test_late_start_observes_before():
    probe_from_two = CausalProbe(action="isotropic", k=2, start_step=2)
    matrices = weights()
    probe = ActingProbe(probe_from_two, matrices, 0)
    for step in range(3):
        probe.before_step(step)
        step_all(matrices, seed=step)
        before = matrices[0][2].clone()
        rows, _ = probe.after_step(step)
        assert torch.equal(before, matrices[0][2]) == (step < 2)
        assert (rows[0]["energy_removed"] > 0) == (step >= 2)


def test_random_directions_are_fixed_for_the_run_and_differ_by_seed_and_matrix():
    config = CausalProbe(action="observe", k=2, directions="random")

    def energies(seed, drift):
        matrices = weights()
        probe = ActingProbe(config, matrices, seed)
        step_all(matrices, seed=7, size=drift)  # another pre-step weight must not change the directions
        probe.before_step(0)
        step_all(matrices)
        return [row["energy_on"] for row in probe.after_step(0)[0]]

    assert energies(0, 0.0) == pytest.approx(energies(0, 0.5), rel=1e-3)
    assert energies(0, 0.0) != pytest.approx(energies(1, 0.0), rel=1e-3)
    one, two = ActingProbe(config, weights(), 0), ActingProbe(config, weights()[2:], 0)
    torch.testing.assert_close(one._random[(10, 8)][0][1], two._random[(10, 8)][0][0])
    assert not torch.allclose(one._random[(10, 8)][0][0], one._random[(10, 8)][0][1])
    U = one._random[(10, 8)][0]
    torch.testing.assert_close(U.mT @ U, torch.eye(2, dtype=torch.float64).expand(2, 2, 2))


@pytest.mark.parametrize("size", [24, 128])
def test_resume_is_bit_exact(size):
    """With a warm start (128) and without one (24): state_dict holds all that changes later bits."""

    def make():
        g = generator(3)
        return [
            (0, "W_Q", torch.randn(size, size, generator=g)),
            (0, "W_K", torch.randn(size, size, generator=g)),
        ]

    def train(probe, matrices, steps):
        for step in steps:
            probe.before_step(step)
            step_all(matrices, seed=10 * step)
            rows, _ = probe.after_step(step)
        return rows

    config = CausalProbe(action="on_target", k=3)
    straight = make()
    rows = train(ActingProbe(config, straight, 0), straight, range(4))

    first = make()
    probe = ActingProbe(config, first, 0)
    train(probe, first, range(2))
    state = probe.state_dict()
    assert bool(state) == (size == 128)
    resumed = [(layer, name, W.clone()) for layer, name, W in first]
    second = ActingProbe(config, resumed, 0)
    second.load_state_dict(state)
    assert train(second, resumed, range(2, 4)) == rows
    assert all(torch.equal(a[2], b[2]) for a, b in zip(straight, resumed))


@pytest.mark.parametrize(
    "directions, allowed", [("leading", "1 to 5"), ("random", "1 to 5"), ("next", "1 to 2")]
)
def test_k_must_leave_directions(directions, allowed):
    with pytest.raises(BadInput, match=rf"probe\.k: 6 .*{directions}.*W_K.*{allowed}"):
        ActingProbe(CausalProbe(action="observe", k=6, directions=directions), weights(), 0)


def test_check_before_any_work():
    model = SimpleNamespace(d_model=64, d_head=32, kv_heads=1, d_hidden=256)
    run = SimpleNamespace(model=model)
    CausalProbe(action="observe", k=31).check(run)
    CausalProbe(action="observe", k=63, matrices=("W_Q", "W_up")).check(run)
    with pytest.raises(BadInput, match=r"probe\.k: 32 .*W_K.*1 to 31"):
        CausalProbe(action="observe", k=32).check(run)


@pytest.mark.parametrize(
    "bad", [{"k": 0}, {"action": "sideways"}, {"matrices": ()}, {"matrices": ("W_X",)}, {"sides": "left"}]
)
def test_config_refuses(bad):
    with pytest.raises(ValidationError):
        CausalProbe(**{"action": "observe", **bad})


def test_labels_tell_arms_apart():
    configs = [
        CausalProbe(action="on_target"),
        CausalProbe(action="on_target", k=5),
        CausalProbe(action="on_target", side="left"),
        CausalProbe(action="on_target", directions="next"),
        CausalProbe(action="on_target", start_step=100),
    ]
    assert len({config.label() for config in configs}) == len(configs)


def test_hook_writes_rows_and_events():
    rows, events = [], []
    matrices = [(0, "W_Q", torch.nn.Parameter(torch.randn(8, 8, generator=generator())))]
    context = SimpleNamespace(
        matrices=lambda names: matrices,
        run=SimpleNamespace(seed=0),
        writer=SimpleNamespace(add=lambda table, **row: rows.append((table, row))),
        event=lambda step, kind, **detail: events.append((step, kind, detail)),
    )
    hook = CausalProbe(action="isotropic", k=2).build(context)
    hook.before_update(5)
    with torch.no_grad():
        matrices[0][2].add_(0.1)
    hook.after_update(5)
    ((table, row),) = rows
    assert table == "probe" and not events
    assert set(row) == {"step", "layer", "matrix", "energy_total", "energy_on", "energy_removed"}
    hook.before_update(6)
    with torch.no_grad():
        matrices[0][2].fill_(math.nan)
    hook.after_update(6)
    assert events[0][:2] == (6, "probe_infeasible")


def test_import_does_not_load_torch():
    code = "import sys, qkpipe.probes.causal; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
