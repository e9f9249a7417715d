"""What the analyses share: which runs are which, counts and medians with their intervals, frames to Parquet and back."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from qkpipe.analysis.regime import is_candidate
from qkpipe.analysis.settings import NONE
from qkpipe.analysis.statistics import clopper_pearson
from qkpipe.paths import StudyPaths
from qkpipe.store.parquet import read_table, write_table

STRESSORS = frozenset({"learning_rate", "weight_noise", "frozen", "label_noise"})
"""Kinds of fault that stress training without any numerical error: the generic stressors, which are controls."""

SETTING = ("model", "optimizer", "tokenizer", "steps_planned")
"""Runs that share these may be compared without a pairing by seed."""

COUNTED = [
    *((name, pa.int64()) for name in ("n", "collapsed")),
    *((name, pa.float64()) for name in ("collapsed_low", "collapsed_high")),
    *((name, pa.string()) for name in ("seeds", "seed_roles")),
]
"""Columns of :func:`counted`; the interval is Clopper-Pearson's at 95%."""

DRAWS = 499
LEVEL = 0.95


def read_frame(paths: StudyPaths, name: str) -> pd.DataFrame:
    return read_table(paths.analysis(name)).to_pandas()


def study_runs(paths: StudyPaths) -> pd.DataFrame:
    """``runs`` without the arms of candidate regimes, which are other studies than this one."""
    runs = read_frame(paths, "runs")
    return runs[~runs["arm"].map(is_candidate).astype(bool)]


def write_frame(path: Path, frame: pd.DataFrame | Iterable[dict[str, Any]], schema: pa.Schema) -> Path:
    """Write a frame with exactly ``schema``: NaN is null, absent columns are null, others are left out; returns ``path``."""
    frame = frame if isinstance(frame, pd.DataFrame) else pd.DataFrame(list(frame))
    frame = frame.reindex(columns=schema.names)
    columns = []
    for field in schema:
        values = frame[field.name]
        if pa.types.is_integer(field.type):
            values = values.astype("Int64")
        elif pa.types.is_floating(field.type):
            values = values.astype(float)
        columns.append(pa.array(values, field.type, from_pandas=True))
    write_table(path, pa.Table.from_arrays(columns, schema=schema), schema)
    return path


def usual(runs: pd.DataFrame, *columns: str) -> pd.DataFrame:
    """Runs that have in these columns what most arms have: the study's own horizon, optimizer, ..."""
    arms = runs.drop_duplicates("arm")
    for column in columns:
        runs = runs[runs[column] == (arms[column].mode().iloc[0] if len(arms) else None)]
    return runs


def watched(runs: pd.DataFrame) -> pd.Series:
    """A guard that only logs, or a probe that only observes, is attached: the bits of the run that it watches over again, which
    would count one run as two.
    """
    return runs["intervention"].str.contains("guard-log", regex=False) | (runs["probe_action"] == "observe")


def uncorrected(runs: pd.DataFrame) -> pd.Series:
    """Nothing acts against a collapse, and nothing watches."""
    return (runs["correction"] == NONE) & runs["probe_action"].isna() & ~watched(runs)


def stressed(runs: pd.DataFrame) -> pd.Series:
    """Generic stressors and nothing else are the source."""
    return runs["fault"].map(lambda kinds: set(kinds.split("+")) <= STRESSORS).astype(bool) & (
        runs["quantities"] == NONE
    )


def faulty(runs: pd.DataFrame) -> pd.Series:
    """Some numerical error is the source."""
    return (runs["source"] != NONE) & ~stressed(runs)


def healthy(runs: pd.DataFrame) -> pd.Series:
    """No fault, no stressor, nothing that acts."""
    return (runs["source"] == NONE) & uncorrected(runs)


def doomed(runs: pd.DataFrame) -> pd.Series:
    """Uncorrected runs of a numerical fault that collapsed."""
    return faulty(runs) & uncorrected(runs) & runs["collapsed"].astype(bool)


def counted(runs: pd.DataFrame) -> dict[str, Any]:
    """How many of these runs collapsed, with the interval, and whose seeds they are."""
    n, k = len(runs), int(runs["collapsed"].sum())
    low, high = clopper_pearson(k, n, LEVEL)
    return {"n": n, "collapsed": k, "collapsed_low": low, "collapsed_high": high} | whose(runs)


def whose(runs: pd.DataFrame) -> dict[str, str]:
    """Seeds of these runs and the roles they have, as text."""
    return {
        "seeds": ", ".join(str(seed) for seed in sorted(set(runs["seed"]))),
        "seed_roles": ", ".join(sorted(set(runs["seed_role"]))),
    }


def of_run(runs: pd.DataFrame, column: str) -> dict[tuple[str, int], Any]:
    """A column of ``runs`` by arm and seed."""
    return dict(zip(zip(runs["arm"], runs["seed"]), runs[column]))


def median_known(values: pd.Series) -> float | None:
    """The median of the known values; None where there is none."""
    known = values.dropna().astype(float)
    return float(known.median()) if len(known) else None


def spread(values: pd.Series, name: str) -> dict[str, float | None]:
    """Median, smallest and largest of the known values, as ``name_median``, ``name_min``, ``name_max``."""
    known = values.dropna().astype(float)
    return {f"{name}_{part}": float(getattr(known, part)()) if len(known) else None for part in PARTS}


PARTS = ("median", "min", "max")


def spread_columns(*names: str) -> list[tuple[str, pa.DataType]]:
    """Columns of :func:`spread`."""
    return [(f"{name}_{part}", pa.float64()) for name in names for part in PARTS]


def bootstrap(
    clusters: pd.Series, statistic: Callable[[np.ndarray], float], draws: int = DRAWS
) -> tuple[float, float]:
    """Percentile interval (95%) of a statistic of rows, by resampling whole clusters (a seed's runs go together).

    ``clusters`` says which one each row is in; ``statistic`` is given the places of the drawn rows, not the rows: copying a frame
    for each draw would cost more than the statistic. NaN where there are fewer than three clusters, or where most draws have no
    value. Draws are seeded: equal data give equal intervals.
    """
    places = pd.Series(np.arange(len(clusters)))
    members = list(places.groupby(clusters.to_numpy(), sort=True).indices.values())
    if len(members) < 3:
        return np.nan, np.nan
    generator = np.random.default_rng(0)
    values = []
    for _ in range(draws):
        chosen = generator.integers(len(members), size=len(members))
        values.append(statistic(np.concatenate([members[i] for i in chosen])))
    known = np.asarray(values, dtype=float)
    known = known[np.isfinite(known)]
    if len(known) < draws / 2:
        return np.nan, np.nan
    low, high = np.quantile(known, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def paired_log_ratio(
    runs: pd.DataFrame, references: pd.DataFrame, column: str, reference_of: Callable[[str], str | None]
) -> pd.Series:
    """log of ``column`` over that of the reference arm's run of the same seed, by row of ``runs``; NaN where there is none."""
    by_key = of_run(references, column)
    other = [by_key.get((reference_of(arm), seed), np.nan) for arm, seed in zip(runs["arm"], runs["seed"])]
    with np.errstate(divide="ignore", invalid="ignore"):
        return pd.Series(np.log(runs[column].astype(float).to_numpy() / np.asarray(other, float)), runs.index)
