"""Brings values to the host without making it wait for the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from qkpipe.guard.latch import COUNT


@dataclass
class _Letter:
    state: Tensor
    largest: Tensor | None
    arrived: torch.cuda.Event | None


class Mailbox:
    """Delivers (state, whether something newly fired, largest logit or None) in order: at once from a CPU, from a GPU by a
    copy that later calls of :meth:`poll` find done.
    """

    def __init__(self, deliver: Callable[[list[int], bool, float | None], None]) -> None:
        self._deliver = deliver
        self._letters: deque[_Letter] = deque()
        self._fired = 0

    def restart(self, fired: int) -> None:
        """Forget what is under way; so many firings are known already."""
        self._letters.clear()
        self._fired = fired

    def post(self, state: Tensor, largest: Tensor | None) -> None:
        if state.is_cuda:
            values = [None if x is None else x.to("cpu", non_blocking=True) for x in (state.clone(), largest)]
            arrived = torch.cuda.Event()
            arrived.record()
        else:
            values, arrived = [state, largest], None
        self._letters.append(_Letter(*values, arrived))
        self.poll()

    def poll(self) -> None:
        """Deliver what has arrived."""
        while self._letters and (self._letters[0].arrived is None or self._letters[0].arrived.query()):
            letter = self._letters.popleft()
            state = letter.state.tolist()
            fired, self._fired = state[COUNT] > self._fired, state[COUNT]
            self._deliver(state, fired, None if letter.largest is None else float(letter.largest))
