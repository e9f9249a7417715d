"""What acting elsewhere does at the same trigger, and what the rivals of the guard do (Table 4)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa

from qkpipe.analysis.frames import COUNTED, counted, of_run, spread, spread_columns, study_runs, write_frame
from qkpipe.analysis.references import parent
from qkpipe.analysis.settings import NONE
from qkpipe.config import Study
from qkpipe.paths import StudyPaths

OUTPUTS = ("loci",)

MEASURES = ("final_val_loss", "loss_over_twin", "final_sigma_q", "peak_logit", "lead")

LOCI = pa.schema(
    [
        *(
            (name, pa.string())
            for name in ("arm", "group", "unprotected", "correction", "intervention", "model")
        ),
        ("threshold", pa.float64()),
        *COUNTED,
        *(
            (name, pa.int64())
            for name in ("pairs", "at_stake", "rescued", "fired", "same_fire_step", "fire_pairs")
        ),
        *spread_columns(*MEASURES),
    ]
)
"""One row an arm in which something acts against a source (``unprotected``: the same arm without it, paired by seed).
``at_stake``: pairs in which the unprotected run collapses, ``rescued`` those of them in which this one does not.
``same_fire_step``: seeds in which a live trigger fired at the step at which the guard with the same threshold fired, of
``fire_pairs`` in which both did: equal by construction. ``loss_over_twin``: final validation loss less that of the healthy
twin; ``lead``: from the firing to the unprotected run's collapse.
"""


def build(paths: StudyPaths, study: Study) -> list[Path]:
    """Write ``analysis/loci.parquet`` from ``runs``; returns the file."""
    return [write_frame(paths.analysis("loci"), loci(study_runs(paths), study), LOCI)]


def unprotected(study: Study, arm: str, corrections: dict[str, str]) -> str | None:
    """The nearest ancestor in which nothing acts."""
    ancestor = parent(study, arm)
    while ancestor is not None and corrections.get(ancestor, NONE) != NONE:
        ancestor = parent(study, ancestor)
    return ancestor


def loci(runs: pd.DataFrame, study: Study) -> list[dict[str, Any]]:
    """Rows of ``LOCI``, in the config's order."""
    corrections = runs.drop_duplicates("arm").set_index("arm")["correction"].to_dict()
    of = {name: of_run(runs, name) for name in ("collapse_step", "collapsed", "final_val_loss")}
    acting = runs[(runs["correction"] != NONE) & (runs["source"] != NONE) & runs["probe_action"].isna()]
    guards = acting[acting["correction"] == "guard"]
    rows = []
    for arm, own in acting.groupby("arm", sort=False):
        first = own.iloc[0]
        base, twin = unprotected(study, arm, corrections), study.arms[arm].twin
        own = own.assign(
            base_collapse=[of["collapse_step"].get((base, seed)) for seed in own["seed"]],
            base_collapsed=[of["collapsed"].get((base, seed)) for seed in own["seed"]],
            twin_loss=[of["final_val_loss"].get((twin, seed)) for seed in own["seed"]],
        )
        paired = own[own["base_collapsed"].notna()]
        stake = paired[paired["base_collapsed"].astype(bool)]
        same = _same_trigger(own, guards)
        row = {
            key: first[key] for key in ("arm", "group", "correction", "intervention", "model", "threshold")
        }
        row |= {"unprotected": base} | counted(own)
        row |= {
            "pairs": len(paired),
            "at_stake": len(stake),
            "rescued": int((~stake["collapsed"].astype(bool)).sum()),
            "fired": int(own["fire_step"].notna().sum()),
            "same_fire_step": int((same["fire_step"] == same["fire_step_guard"]).sum()),
            "fire_pairs": len(same),
        }
        own["loss_over_twin"] = own["final_val_loss"] - own["twin_loss"].astype(float)
        own["lead"] = own["base_collapse"].astype(float) - own["fire_step"].astype(float)
        for name in MEASURES:
            row |= spread(own[name], name)
        rows.append(row)
    return rows


def _same_trigger(own: pd.DataFrame, guards: pd.DataFrame) -> pd.DataFrame:
    """Fired runs of one arm beside the guard's of the same source, model, optimizer, threshold and seed."""
    key = ["source", "model", "optimizer", "threshold", "seed"]
    others = guards[guards["arm"] != own["arm"].iloc[0]].drop_duplicates(key)
    fired = own.dropna(subset=["fire_step", "threshold"])
    return fired.merge(others.dropna(subset=["fire_step"]), on=key, suffixes=("", "_guard"))
