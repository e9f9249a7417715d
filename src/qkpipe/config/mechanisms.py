"""Finds the mechanisms (faults, interventions, probes) and makes one pydantic type of each family."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from typing import Annotated, Any, Union

from pydantic import Field

from qkpipe.config.base import Mechanism


@cache
def mechanisms(package: str) -> dict[str, type[Mechanism]]:
    """``kind`` -> config class, over every module of ``package`` (sorted by kind)."""
    root = importlib.import_module(package)
    found: dict[str, type[Mechanism]] = {}
    for info in pkgutil.iter_modules(root.__path__):
        module = importlib.import_module(f"{package}.{info.name}")
        for value in vars(module).values():
            declared = (
                isinstance(value, type) and issubclass(value, Mechanism) and "kind" in value.model_fields
            )
            if declared and value.__module__ == module.__name__:
                kind = value.model_fields["kind"].default
                if kind in found:
                    raise TypeError(f"{package}: two mechanisms are called {kind!r}")
                found[kind] = value
    return dict(sorted(found.items()))


def mechanism_type(package: str) -> Any:
    """Tagged union of the mechanisms of ``package``, told apart by ``kind``."""
    members = tuple(mechanisms(package).values()) or (Mechanism,)
    if len(members) == 1:
        return members[0]
    return Annotated[Union[members], Field(discriminator="kind")]  # noqa: UP007 (built at run time)
