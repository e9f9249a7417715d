"""Which arm an arm is compared with; read from the config alone, so that a new arm brings its own comparisons."""

from __future__ import annotations

from qkpipe.config import Study


def parent(study: Study, arm: str) -> str | None:
    """The nearest runnable arm that ``arm`` extends: the same arm without what ``arm`` adds."""
    ancestor = study.arms[arm].extends
    while ancestor is not None and ancestor not in study.runnable:
        ancestor = study.arms[ancestor].extends
    return ancestor


def references(study: Study, arm: str) -> dict[str, str]:
    """Reference arms by relation: ``twin`` (differs by the fault alone) and ``parent``; a parent that is the twin once."""
    found = {"twin": study.arms[arm].twin, "parent": parent(study, arm)}
    if found["parent"] == found["twin"]:
        del found["parent"]
    return {relation: reference for relation, reference in found.items() if reference not in (None, arm)}
