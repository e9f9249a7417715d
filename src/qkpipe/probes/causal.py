"""Causal probe: does the runaway need the part of the update that lies along the leading singular directions?

After the optimizer has acted, D = W_new - W_old is the realised update (step and weight decay) of a weight as
torch stores it, (out, in). U (out, k) and V (in, k) are singular directions of W_old. C is D's component
along them:

    two_sided  U U' D V V'        left   U U' D
    right      D V V'             either D - (I - U U') D (I - V V')

Each is an orthogonal projection of D in the Frobenius inner product, so |D|^2 = |C|^2 + |D - C|^2. The
actions remove the same energy |C|^2 in different places:

    on_target            (D - C) * |D| / |D - C|
    off_target_unscaled  C + a (D - C),  a^2 = 1 - |C|^2 / |D - C|^2
    off_target           the same, rescaled to |D| (which amplifies C)
    isotropic            D * sqrt(1 - |C|^2 / |D|^2)
    observe              D

On target needs D - C != 0, off target |C|^2 <= |D - C|^2 and C != D. Where that fails, D is left as it is and
an event says so; leaving a step out instead would be a second intervention. D = 0 is no such case: nothing is
removed, no event.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from pydantic import Field

from qkpipe.config.base import Mechanism
from qkpipe.errors import BadInput
from qkpipe.hooks import Hook
from qkpipe.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

Action = Literal["on_target", "off_target", "off_target_unscaled", "isotropic", "observe"]
Side = Literal["two_sided", "left", "right", "either"]
Matrix = Literal["W_Q", "W_K", "W_V", "W_O", "W_up", "W_gate", "W_down"]

# Of sigma, where directions are iterated (large matrices). An angle is about the root of it over the relative
# gap: 0.002 between the third and the seventeenth value of a random 768x768 matrix, less as soon as one leads.
_SIGMA_TOLERANCE = 1e-6
# A rest |D - C|^2 below this fraction of |D|^2 is rounding: nothing is left that could be rescaled.
_NOTHING = 1e-20


class CausalProbe(Mechanism):
    """``causal``: acts on the realised update along k singular directions of the pre-step weight (paper: k =
    3).

    ``directions``: ``leading`` 1..k; ``next`` k+1..2k and ``random`` (orthonormal, fixed for the run) are
    controls. Before ``start_step`` the probe only observes, so energies are recorded throughout.
    """

    kind: Literal["causal"] = "causal"
    action: Action
    k: Annotated[int, Field(ge=1)] = 3
    side: Side = "two_sided"
    matrices: Annotated[tuple[Matrix, ...], Field(min_length=1)] = ("W_Q", "W_K")
    directions: Literal["leading", "next", "random"] = "leading"
    start_step: Annotated[int, Field(ge=0)] = 0

    def label(self) -> str:
        directions = "" if self.directions == "leading" else f",{self.directions}"
        start = f",from={self.start_step}" if self.start_step else ""
        return f"{self.action}(k={self.k},{self.side}{directions}{start})"

    def check(self, run: Any) -> None:
        model = run.model
        shortest = dict.fromkeys(self.matrices, model.d_model)
        for name in self.matrices:
            if name in ("W_K", "W_V"):
                shortest[name] = model.kv_heads * model.d_head
            elif name in ("W_up", "W_gate", "W_down"):
                shortest[name] = min(model.d_hidden, model.d_model)
        self.check_rank(*min(shortest.items(), key=lambda item: item[1]))

    def check_rank(self, name: str, shortest: int) -> None:
        """Raise BadInput unless the directions asked for leave others in a matrix with this shorter side."""
        used = 2 if self.directions == "next" else 1
        if used * self.k >= shortest:
            raise BadInput(
                f"probe.k: {self.k} is not allowed with directions: {self.directions} "
                f"({name} has rank {shortest} at most): 1 to {(shortest - 1) // used}"
            )

    def build(self, context: Any) -> Hook:
        return _CausalProbeHook(context, self)


class Projection(NamedTuple):
    """Result of :func:`project_update`. Energies are squared Frobenius norms, float64, one a matrix (shape
    (...))."""

    D: Tensor
    total: Tensor
    """|D|^2 of the update as it came."""
    on: Tensor
    """|C|^2 of the update as it came."""
    removed: Tensor
    """Energy the action took out before any rescaling: |C|^2, or 0 where it could not act or only
    observes."""
    feasible: Tensor
    """False where the action is impossible, or a number is not finite; D is then returned unchanged."""


def component(D: Tensor, U: Tensor, V: Tensor, side: Side) -> Tensor:
    """C, the component of D (..., out, in) along the columns of U (..., out, k) and V (..., in, k)."""
    if side == "left":
        return U @ (U.mT @ D)
    right = (D @ V) @ V.mT
    if side == "right":
        return right
    if side == "two_sided":
        return U @ (U.mT @ right)
    return right + U @ (U.mT @ (D - right))


def project_update(D: Tensor, U: Tensor, V: Tensor, *, action: Action, side: Side) -> Projection:
    """Act on the realised update D (..., out, in), as the module docstring defines; float64 throughout."""
    D, U, V = D.double(), U.double(), V.double()
    C = component(D, U, V, side)
    rest = D - C
    on, off = C.square().sum((-2, -1)), rest.square().sum((-2, -1))
    total = D.square().sum((-2, -1))
    feasible = total.isfinite() & on.isfinite()
    if action == "observe":
        return Projection(D, total, on, torch.zeros_like(on), feasible)
    norm = total.sqrt()
    if action == "isotropic":
        changed = D * _ratio(off, total).sqrt()
    elif action == "on_target":
        feasible &= (off > _NOTHING * total) | (total == 0)
        changed = rest * _ratio(norm, off.sqrt())
    else:
        feasible &= (on <= off) & ((off > _NOTHING * total) | (total == 0))
        changed = C + (1 - _ratio(on, off)).clamp_min(0.0).sqrt() * rest
        if action == "off_target":
            changed = changed * _ratio(norm, changed.square().sum((-2, -1)).sqrt())
    D_new = torch.where(feasible[..., None, None], changed, D)
    return Projection(D_new, total, on, torch.where(feasible, on, 0.0), feasible)


def _ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """numerator / denominator, 0 where the denominator is 0, shaped (..., 1, 1) to scale matrices."""
    return torch.where(denominator > 0, numerator / denominator, 0.0)[..., None, None]


class ActingProbe:
    """The probe at work on ``matrices``, a list of (layer, name, weight): call `before_step`, the optimizer,
    `after_step`.

    Weights of one shape are handled as one stack. Raises BadInput if k is not below the rank of every matrix.
    """

    def __init__(self, config: CausalProbe, matrices: list[tuple[int, str, Tensor]], seed: int) -> None:
        for _, name, weight in sorted(matrices, key=lambda entry: min(entry[2].shape)):
            config.check_rank(name, min(weight.shape))
        self._config = config
        self._groups: dict[tuple[int, int], list[tuple[int, str, Tensor]]] = {}
        for entry in matrices:
            self._groups.setdefault(tuple(entry[2].shape), []).append(entry)
        self._random = (
            {shape: _random_directions(group, config.k, seed) for shape, group in self._groups.items()}
            if config.directions == "random"
            else {}
        )
        self._warm: dict[tuple[int, int], Tensor | None] = dict.fromkeys(self._groups)
        self._before: dict[tuple[int, int], tuple[Tensor, Tensor, Tensor]] = {}

    def before_step(self, step: int) -> None:
        """Keep the pre-step weights and find their singular directions."""
        for shape, group in self._groups.items():
            W_old = torch.stack([weight.detach() for _, _, weight in group])
            self._before[shape] = (W_old, *self._directions(shape, W_old))

    def after_step(self, step: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Replace the realised updates in place. Returns rows of the ``probe`` table, and what could not be
        done."""
        action = self._config.action if step >= self._config.start_step else "observe"
        rows, events = [], []
        for shape, group in self._groups.items():
            W_old, U, V = self._before.pop(shape)
            W_old = W_old.double()
            D = torch.stack([weight.detach() for _, _, weight in group]).double() - W_old
            result = project_update(D, U, V, action=action, side=self._config.side)
            energies = torch.stack([result.total, result.on, result.removed], -1).tolist()
            for index, ((layer, name, weight), feasible) in enumerate(zip(group, result.feasible.tolist())):
                total, on, removed = energies[index]
                row = {"layer": layer, "matrix": name, "energy_total": total, "energy_on": on}
                rows.append({**row, "energy_removed": removed})
                if not feasible:
                    events.append({**row, "action": action})
                elif action != "observe":
                    with torch.no_grad():
                        weight.copy_(W_old[index] + result.D[index])
        return rows, events

    def _directions(self, shape: tuple[int, int], W_old: Tensor) -> tuple[Tensor, Tensor]:
        from qkpipe.numerics.spectra import leading_triplets

        if self._random:
            U, V = self._random[shape]
            return U.to(W_old.device), V.to(W_old.device)
        k = self._config.k
        first = k if self._config.directions == "next" else 0
        U, _, V, self._warm[shape] = leading_triplets(
            W_old, first + k, self._warm[shape], tolerance=_SIGMA_TOLERANCE
        )
        return U[..., first:], V[..., first:]

    def state_dict(self) -> dict[str, Any]:
        """Warm starts of the singular directions, by shape; empty at small sizes, where none are used."""
        return {f"{m}x{n}": state for (m, n), state in self._warm.items() if state is not None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._warm = {(m, n): state.get(f"{m}x{n}") for m, n in self._warm}


def _random_directions(group: list[tuple[int, str, Tensor]], k: int, seed: int) -> tuple[Tensor, Tensor]:
    """Orthonormal U (matrices, out, k) and V (matrices, in, k) that depend on seed, layer and name alone."""
    U, V = [], []
    for layer, name, weight in group:
        generator = torch.Generator().manual_seed(zlib.crc32(f"causal probe {seed} {layer} {name}".encode()))
        for side, size in zip((U, V), weight.shape):
            side.append(torch.linalg.qr(torch.randn(size, k, generator=generator, dtype=torch.float64)).Q)
    return torch.stack(U), torch.stack(V)


class _CausalProbeHook(Hook):
    def __init__(self, context: Any, config: CausalProbe) -> None:
        self._context = context
        self._probe = ActingProbe(config, context.matrices(config.matrices), context.run.seed)

    def before_update(self, step: int) -> None:
        self._probe.before_step(step)

    def after_update(self, step: int) -> None:
        rows, events = self._probe.after_step(step)
        for row in rows:
            self._context.writer.add("probe", step=step, **row)
        for event in events:
            self._context.event(step, "probe_infeasible", **event)

    def state_dict(self) -> dict[str, Any]:
        return self._probe.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._probe.load_state_dict(state)
