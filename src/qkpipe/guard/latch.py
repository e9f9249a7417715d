"""When the guard switches: one vector of integers on the model's device, advanced once a step without asking the host.

A unit is what is switched as one: the model, a layer or a head. Integers survive ``model.half()``, and a vector of them is a
buffer like any other to DDP, FSDP and every checkpoint format.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

KINDS = ("model", "layer", "head")

VERSION, KIND, EXPLICIT, STEP, COUNT, FIRST, LATEST, HEADER = 0, 1, 2, 3, 4, 5, 9, 13
"""Places in the vector. FIRST and LATEST hold four each: step, layer, head, bits of the fp32 logit. After the header come a flag
for every unit (past the threshold), then a level for every unit (how far normalisation is on, of FULL).
"""

FULL = 1 << 20


def fp32_at_most(limit: float) -> float:
    """The largest fp32 number that is no larger than ``limit``: an fp32 logit passes the one where it passes the other. torch
    would round ``limit`` to the nearest.
    """
    nearest = torch.tensor(limit, dtype=torch.float32)
    if float(nearest) > limit:
        nearest = torch.nextafter(nearest, torch.tensor(-torch.inf))
    return float(nearest)


@dataclass(frozen=True)
class Firing:
    """Which head crossed the threshold: ``step`` counts training steps from 0, ``logit`` is after the scale."""

    step: int
    layer: int
    head: int
    logit: float


@dataclass(frozen=True)
class Latch:
    """The rule. Peaks are (layers, heads), -inf where there was nothing to see.

    A unit's flag is set by a peak above ``threshold`` (or NaN) and, with ``release``, cleared once all its *raw* peaks, those it
    would have without normalisation, are at or below ``release``. Its level follows the flag in ``hand_over`` steps, where
    ``acts``.
    """

    kind: str
    threshold: float
    acts: bool
    release: float | None
    hand_over: int
    layers: int

    def fresh(self, heads: int) -> Tensor:
        """The state of a guard that has seen nothing."""
        units = {"model": 1, "layer": self.layers, "head": self.layers * max(1, heads)}[self.kind]
        state = torch.zeros(HEADER + 2 * units, dtype=torch.int64)
        state[VERSION], state[KIND] = 1, KINDS.index(self.kind)
        return state

    def widen(self, state: Tensor, heads: int) -> Tensor:
        """The same state with room for more heads a layer."""
        old = state[HEADER:].view(2, self.layers, -1)
        wide = self.fresh(heads).to(state.device)
        wide[:HEADER] = state[:HEADER]
        wide[HEADER:].view(2, self.layers, heads)[:, :, : old.shape[-1]] = old
        return wide

    def advance(self, state: Tensor, peaks: Tensor | None, raw: Tensor | None) -> Tensor:
        """The state after one more step; ``peaks`` is None where the step was not sensed."""
        flag, level = state[HEADER:].view(2, -1).unbind()
        header = state[:HEADER]
        if peaks is not None:
            crossed = self._any(~(peaks <= self.threshold))
            new = crossed & (flag == 0)
            header = self._record(header, peaks, new)
            if self.release is not None:
                # A layer left out of this step (LayerDrop) has shown nothing, so it is not calm.
                calm = self._any(raw > float("-inf")) & ~self._any(~(raw <= self.release))
                flag = torch.where(calm, 0, flag)
            flag = torch.where(crossed, 1, flag)
        if self.acts:
            stride = -(-FULL // self.hand_over)
            level = (level + torch.where(flag > 0, stride, -stride)).clamp(0, FULL)
        one_more = torch.zeros_like(header)
        one_more[STEP] = 1
        return torch.cat([header + one_more, flag, level])

    def strength(self, state: Tensor) -> Tensor:
        """How strongly to normalise, in [0, 1]: (), (layers,) or (layers, heads)."""
        level = state[HEADER:].view(2, -1)[1] / FULL
        if self.kind == "model":
            return level[0]
        return level if self.kind == "layer" else level.view(self.layers, -1)

    def _any(self, of: Tensor) -> Tensor:
        """(layers, heads) to units."""
        if self.kind == "model":
            return of.any().view(1)
        return of.any(1) if self.kind == "layer" else of.flatten()

    def _record(self, header: Tensor, peaks: Tensor, new: Tensor) -> Tensor:
        shape = peaks.shape if self.kind == "head" else (-1, 1)
        candidates = torch.where(new.view(shape), peaks, float("-inf")).flatten()
        where = candidates.argmax()  # takes NaN for the largest
        # Indexing by a tensor without dimensions would ask the host for it.
        bits = candidates.gather(0, where.view(1)).view(torch.int32).long()[0]
        heads = peaks.shape[1]
        found = torch.stack([header[STEP], where // heads, where % heads, bits])
        fired = new.any()
        first, latest = header[FIRST:LATEST], header[LATEST:HEADER]
        return torch.cat([
            header[:COUNT],
            (header[COUNT] + fired).view(1),
            torch.where(fired & (header[COUNT] == 0), found, first),
            torch.where(fired, found, latest),
        ])  # fmt: skip


def read_firing(state: list[int], place: int = FIRST) -> Firing | None:
    """The record at FIRST or LATEST of a state brought to the host; None before the first."""
    if state[COUNT] == 0:
        return None
    step, layer, head, bits = state[place : place + 4]
    return Firing(step, layer, head, float(torch.tensor(bits, dtype=torch.int32).view(torch.float32)))


def normalises(state: Tensor) -> bool:
    """Whether a state has normalisation on anywhere, in part or whole."""
    return bool((state[HEADER:].view(2, -1)[1] > 0).any())
