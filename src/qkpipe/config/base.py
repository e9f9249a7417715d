"""Base classes every config model shares, and the contract a mechanism (fault, intervention, probe) fulfils."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class Frozen(BaseModel):
    """An immutable config value that refuses keys it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def later(default: Any, **constraints: Any) -> Any:
    """A field that came after runs had been made: left out of dumps, and so of a run's identity, while at its default.

    A new option thus retrains nothing that does not use it.
    """
    return Field(default, exclude_if=lambda value: value == default, **constraints)


class Mechanism(Frozen):
    """Config of one mechanism: a subclass declares ``kind: Literal["..."]`` and builds the object that acts in training.

    Every public subclass in the packages ``qkpipe.faults``, ``qkpipe.interventions`` and ``qkpipe.probes`` is found by itself:
    a new mechanism is one file there, nothing else changes. Such a file imports torch through :mod:`qkpipe.lazy`.
    """

    @property
    def passes(self) -> int:
        """Forwards and backwards that it needs in a step, beside the run's own; mechanisms share theirs."""
        return 0

    @property
    def sharded(self) -> bool:
        """Whether it works where every rank holds a share of each weight and gradient (``parallel.kind: fsdp2``)."""
        return False

    def label(self) -> str:
        """Short name for tables and figures."""
        return str(self.kind)  # type: ignore[attr-defined]

    def check(self, run: Any) -> None:
        """Raise :class:`qkpipe.errors.BadInput` if this mechanism cannot act in ``run`` (a resolved ``RunConfig``)."""

    def build(self, context: Any) -> Any:
        """The acting object, given a :class:`qkpipe.train.context.BuildContext`."""
        raise NotImplementedError
