"""What a run is, in columns to select by: every table and figure asks for properties, none for an arm's name."""

from __future__ import annotations

import math
from typing import Any

from qkpipe.config import RunConfig
from qkpipe.config.models import RepairConfig
from qkpipe.numerics.precision import FP32_BITS, QUANTITIES, Rounding

NONE = "none"
EVERY = "all"
RECURRENCE = tuple(quantity for quantity in QUANTITIES if quantity != "io")
GAINS = ("delta_gain", "out_gain")
HOLDS = {"coherent": math.inf, "dc": math.inf, "resampled": 1.0}
"""Steps for which an injected error keeps its signs, where its structure says so by itself."""


def settings(run: RunConfig) -> dict[str, Any]:
    """Columns of ``runs`` that come from the resolved config alone (meanings: :data:`qkpipe.telemetry.schema.RUNS`)."""
    return {
        **_sizes(run),
        **_attention(run),
        **_faults(run),
        "correction": _correction(run),
        "threshold": next((float(a.threshold) for a in run.interventions if hasattr(a, "threshold")), None),
        **_probe(run),
    }


def _sizes(run: RunConfig) -> dict[str, Any]:
    model, optimizer = run.model, run.optimizer
    return {
        "tokenizer": run.tokenizer_name,
        "d_model": model.d_model,
        "n_layers": model.n_layers,
        "d_head": model.d_head,
        "context": model.context,
        "optimizer_name": optimizer.name,
        "lr": optimizer.lr,
        "beta1": optimizer.beta1 if optimizer.name == "adamw" else optimizer.momentum,
        "warmup": optimizer.warmup,
        "accumulation": run.train.accumulation,
    }


def _attention(run: RunConfig) -> dict[str, Any]:
    attention = run.attention
    precision = attention.precision.resolve()
    roundings = {quantity: Rounding.parse(getattr(precision, quantity), quantity) for quantity in RECURRENCE}
    rounded = {quantity: found for quantity, found in roundings.items() if found.bits < FP32_BITS}
    names = "+".join(rounded) or NONE
    repairs = {
        key: value
        for key, value in attention.repair.model_dump().items()
        if key not in GAINS and value != RepairConfig.model_fields[key].default
    }
    return {
        "attention": attention.kind,
        "tile": attention.tile if attention.kind == "streaming" else None,
        "tiles": math.ceil(run.model.context / attention.tile) if attention.kind == "streaming" else None,
        "quantities": EVERY if len(rounded) == len(RECURRENCE) else names,
        "bits": min((found.bits for found in rounded.values()), default=None),
        "rounding": "+".join(sorted({found.mode for found in rounded.values()})) or None,
        "repair": ",".join(f"{key}={value}" for key, value in repairs.items()) or NONE,
        "attention_gain": max(
            *(getattr(attention.repair, name) for name in GAINS),
            *(getattr(found, "gain", 1.0) for found in rounded.values()),
        ),
    }


def _faults(run: RunConfig) -> dict[str, Any]:
    """Properties of the faults outside the recurrence; of several, the first that has the property."""

    def first(name: str) -> Any:
        return next(
            (value for fault in run.faults if (value := getattr(fault, name, None)) is not None), None
        )

    structure, hold = first("structure"), first("hold")
    return {
        "fault": "+".join(fault.kind for fault in run.faults) or NONE,
        "structure": structure,
        "hold": float(hold) if hold is not None else HOLDS.get(structure),
        "placement": first("placement"),
        "fault_gain": first("gain"),
    }


def _correction(run: RunConfig) -> str:
    """Kinds of what acts against a collapse, ``none`` where nothing does; a guard that only logs is none."""
    kinds = [action.kind for action in run.interventions if getattr(action, "mode", None) != "log"]
    if _attention(run)["repair"] != NONE:
        kinds.append("repair")
    if run.attention.softcap is not None:
        kinds.append("soft_cap")
    if run.model.qk_norm != NONE:
        kinds.append("qk_norm")
    if run.model.weight_norm != NONE:
        kinds.append(run.model.weight_norm)
    return "+".join(kinds) or NONE


def _probe(run: RunConfig) -> dict[str, Any]:
    probe = run.probe
    names = ("action", "k", "side", "directions", "start_step")
    return {f"probe_{name}": getattr(probe, name, None) for name in names}
