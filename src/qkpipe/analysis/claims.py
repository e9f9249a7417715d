"""Evaluates the declared claims on confirmatory seeds: the scoreboard.

Verdicts: ``supported`` if the adjusted p-value is below alpha in the declared direction; ``contradicted`` if
it is in reverse (adjusted the same way; in the fixed order only where the family has reached the claim);
else ``inconclusive``, which includes every claim after the first failure of the fixed order and every claim
with too few pairs. The two directions are two families: each errs with probability alpha.

No run is left out because it diverged: sigma, logit and validation loss keep their last finite value. A
censored run (an excursion too late to tell from a spike) counts against whatever is being tested. What is
left out, a seed whose twin is missing for one, is listed with its reason.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from qkpipe.analysis import statistics
from qkpipe.analysis.claim_query import claim_query
from qkpipe.analysis.outcomes import CHANNEL, log_channel
from qkpipe.analysis.statistics import Pairs, TestResult, clopper_pearson
from qkpipe.config.claims import ClaimsConfig, Part, check_arms, load_claims
from qkpipe.config.load import Study
from qkpipe.errors import BadInput
from qkpipe.paths import StudyPaths
from qkpipe.store.parquet import read_runs, read_table, write_table
from qkpipe.telemetry.schema import SCHEMA_VERSION

ROLE = "confirmatory"

_VERSION = {"qkpipe.schema_version": str(SCHEMA_VERSION)}
_INT, _F64, _STR = pa.int64(), pa.float64(), pa.string()

_TEST = {
    "contrast": _STR,
    "outcome": _STR,
    "statistic": _STR,
    "alternative": _STR,
    "margin": _F64,
    "alpha": _F64,
    "n_pairs": _INT,
    "k_treated": _INT,
    "n_treated": _INT,
    "k_control": _INT,
    "n_control": _INT,
    "effect": _F64,
    "ci_low": _F64,
    "ci_high": _F64,
    "p_value": _F64,
}

CLAIMS = pa.schema(
    {
        "claim_id": _STR,
        "rank": _INT,
        "statement": _STR,
        "source": _STR,
        **_TEST,
        "p_adjusted": _F64,
        "verdict": _STR,
        "seeds": _STR,
        "query": _STR,
        "scale": _STR,
    },
    metadata=_VERSION,
)
"""One row a claim. Of several parts, the numbers are those of the part with the largest p-value (the first of
them), which decides the claim; all are in ``PARTS``. ``effect``: mcnemar, difference of the collapsed shares;
rescue, rescued share; else mean of treated - control (log sigma and log logit in log units). The interval has
level 1 - 2*alpha and is infinite where too few pairs bound nothing. ``seeds``: of the pairs, comma-separated.
"""

PARTS = pa.schema(
    {
        "claim_id": _STR,
        "part": _INT,
        **_TEST,
        "p_reverse": _F64,
        **{f"{side}_{bound}": _F64 for side in ("treated", "control") for bound in ("low", "high")},
        "n_censored": _INT,
        "seeds": _STR,
        "scale": _STR,
    },
    metadata=_VERSION,
)
"""One row a part of a claim; ``treated_low`` etc. are Clopper-Pearson 95% bounds of the collapsed shares."""

EXCLUSIONS = pa.schema(
    {
        "claim_id": _STR,
        "part": _INT,
        "contrast": _STR,
        "seed": _INT,
        "arm": _STR,
        "reason": _STR,
        "scale": _STR,
    },
    metadata=_VERSION,
)
"""One row a seed left out of a part, and why."""


@dataclass(frozen=True)
class Evaluation:
    claims: pa.Table
    parts: pa.Table
    exclusions: pa.Table


def evaluate(
    config: ClaimsConfig,
    runs: pa.Table,
    layers: pa.Table,
    heads: pa.Table,
    *,
    scale: str,
    seeds: Iterable[int] = (),
) -> Evaluation:
    """Test every claim.

    ``runs`` has the schema ``telemetry.schema.RUNS``; ``layers`` (run_id, step, sigma_q_1) and ``heads``
    (run_id, step, max_logit) the telemetry of at least the claims' runs. ``seeds`` are those that were asked
    for; with those found, they are the pairs expected, and a missing one is listed. Raises :class:`BadInput`
    for two runs of one arm and seed.
    """
    seeds = tuple(seeds)
    outcomes = _Outcomes(runs, {"layers": layers, "heads": heads}, scale)
    part_rows: dict[str, list[dict[str, Any]]] = {}
    exclusions: list[dict[str, Any]] = []
    for claim_id, claim in config.claims.items():
        part_rows[claim_id] = []
        for number, part in enumerate(claim.parts, 1):
            place = {"claim_id": claim_id, "part": number, "scale": scale}
            pairs, excluded = outcomes.pairs(part, seeds, part.censored_count_as_collapsed)
            exclusions += [{**place, "contrast": part.contrast, **row} for row in excluded]
            # In reverse, a censored run counts the other way: always against what is being shown.
            swapped = outcomes.pairs(part, seeds, part.censored_count_as_collapsed[::-1])[0]
            result = replace(
                _test(part, pairs, config.alpha), p_reverse=_test(part, swapped, config.alpha).p_reverse
            )
            n_censored = outcomes.n_censored(part, pairs.seeds) if part.outcome == "collapse" else None
            row = {**place, **_part_row(part, pairs, result), "alpha": config.alpha, "n_censored": n_censored}
            part_rows[claim_id].append(row)
    return Evaluation(
        pa.Table.from_pylist(_claim_rows(config, part_rows), CLAIMS),
        pa.Table.from_pylist([row for rows in part_rows.values() for row in rows], PARTS),
        pa.Table.from_pylist(exclusions, EXCLUSIONS),
    )


def build(paths: StudyPaths, study: Study, seeds: Iterable[int] = ()) -> list[Path]:
    """Write ``analysis/claims``, ``claim_parts`` and ``claim_exclusions`` from the runs that are there."""
    config = load_claims(study.folder)
    check_arms(config, study)
    runs = read_table(paths.analysis("runs"))
    needed = set(config.arms)
    found = zip(runs["arm"].to_pylist(), runs["seed"].to_pylist(), runs["seed_role"].to_pylist())
    folders = [paths.run(arm, seed) for arm, seed, role in found if arm in needed and role == ROLE]
    layers = read_runs(folders, "layers", ["run_id", "step", "sigma_q_1"])
    heads = read_runs(folders, "heads", ["run_id", "step", "max_logit"])
    result = evaluate(config, runs, layers, heads, scale=study.scale, seeds=seeds)
    tables = {
        "claims": (result.claims, CLAIMS),
        "claim_parts": (result.parts, PARTS),
        "claim_exclusions": (result.exclusions, EXCLUSIONS),
    }
    for name, (table, schema) in tables.items():
        write_table(paths.analysis(name), table, schema)
    return [paths.analysis(name) for name in tables]


def _test(part: Part, pairs: Pairs, alpha: float) -> TestResult:
    match part.statistic:
        case "mcnemar":
            return statistics.mcnemar(pairs, part.alternative, alpha)
        case "rescue":
            return statistics.rescue(pairs, part.alternative, part.margin, alpha)
        case "sign_flip":
            return statistics.sign_flip(pairs, part.alternative, alpha)
        case "equivalence":
            return statistics.equivalence(pairs, part.margin, alpha)


def _part_row(part: Part, pairs: Pairs, result: TestResult) -> dict[str, Any]:
    row: dict[str, Any] = {
        "contrast": part.contrast,
        "outcome": part.outcome if part.at == "final" else f"{part.outcome} at step {part.at}",
        "statistic": part.statistic,
        "alternative": part.alternative,
        "margin": part.margin,
        "seeds": ",".join(map(str, pairs.seeds)),
        **asdict(result),
        "effect": None if math.isnan(result.effect) else result.effect,
    }
    if part.outcome == "collapse":
        for side, collapsed in (("treated", pairs.treated), ("control", pairs.control)):
            k, n = int(collapsed.sum()), len(pairs)
            low, high = clopper_pearson(k, n)
            row |= {f"k_{side}": k, f"n_{side}": n, f"{side}_low": low, f"{side}_high": high}
    return row


def _claim_rows(config: ClaimsConfig, part_rows: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Claims in their fixed order, then the others in file order."""
    ranked = sorted((c for c in config.claims if config.claims[c].rank), key=lambda c: config.claims[c].rank)
    others = [c for c in config.claims if not config.claims[c].rank]
    p = {
        claim_id: statistics.all_parts([row["p_value"] for row in rows], [row["p_reverse"] for row in rows])
        for claim_id, rows in part_rows.items()
    }
    adjusted: dict[str, tuple[float, float]] = {}
    forward, reverse = [p[c][0] for c in ranked], [p[c][1] for c in ranked]
    adjusted |= zip(
        ranked, zip(statistics.fixed_order(forward), statistics.fixed_order_reverse(forward, reverse))
    )
    adjusted |= zip(
        others, zip(statistics.holm([p[c][0] for c in others]), statistics.holm([p[c][1] for c in others]))
    )
    rows = []
    for claim_id in ranked + others:
        claim, (p_adjusted, p_reverse_adjusted) = config.claims[claim_id], adjusted[claim_id]
        deciding = max(part_rows[claim_id], key=lambda row: row["p_value"])
        rows.append(
            {
                **{name: deciding.get(name) for name in CLAIMS.names},
                "claim_id": claim_id,
                "rank": claim.rank,
                "statement": claim.statement,
                "source": claim.source,
                "p_adjusted": float(p_adjusted),
                "verdict": verdict(p_adjusted, p_reverse_adjusted, config.alpha),
                "query": claim_query(claim, deciding["scale"]),
            }
        )
    return rows


def verdict(p_adjusted: float, p_reverse_adjusted: float, alpha: float) -> str:
    """``supported``, ``contradicted`` or ``inconclusive``."""
    if p_adjusted < alpha:
        return "supported"
    return "contradicted" if p_reverse_adjusted < alpha else "inconclusive"


class _Outcomes:
    """Pairs of outcomes by arm and seed."""

    def __init__(self, runs: pa.Table, telemetry: dict[str, pa.Table], scale: str) -> None:
        self._telemetry = telemetry
        self._channel = cache(self._read_channel)
        self._rows: dict[tuple[str, int], dict[str, Any]] = {}
        for row in runs.to_pylist():
            if row["scale"] != scale:
                continue
            if (row["arm"], row["seed"]) in self._rows:
                raise BadInput(
                    f"runs: arm={row['arm']!r}, seed={row['seed']} is there twice; one run is allowed"
                )
            self._rows[row["arm"], row["seed"]] = row

    def pairs(
        self, part: Part, seeds: Iterable[int], censored_as_collapsed: tuple[bool, bool]
    ) -> tuple[Pairs, list[dict[str, Any]]]:
        """The pairs of a part, and its exclusions: (seed, arm, reason)."""
        arms = (part.treated, part.control)
        confirmatory = {
            seed for (arm, seed), row in self._rows.items() if arm in arms and row["seed_role"] == ROLE
        }
        kept, excluded = [], []
        for seed in sorted(confirmatory.union(seeds)):
            values = []
            for arm, censored in zip(arms, censored_as_collapsed):
                value, reason = self._value(part, arm, seed, censored)
                values.append(value)
                if reason:
                    excluded.append({"seed": seed, "arm": arm, "reason": reason})
            if None in values:
                continue
            if part.statistic == "rescue" and not any(values):
                reason = "neither arm collapses: nothing to rescue"
                excluded.append({"seed": seed, "arm": part.control, "reason": reason})
                continue
            kept.append((seed, *values))
        roles = tuple(self._rows[part.treated, seed]["seed_role"] for seed, *_ in kept)
        dtype = bool if part.outcome == "collapse" else float
        treated, control = (np.array([row[i] for row in kept], dtype=dtype) for i in (1, 2))
        return Pairs(tuple(seed for seed, *_ in kept), roles, treated, control), excluded

    def n_censored(self, part: Part, seeds: Iterable[int]) -> int:
        return sum(
            bool(self._rows[arm, seed]["censored"]) for arm in (part.treated, part.control) for seed in seeds
        )

    def _value(
        self, part: Part, arm: str, seed: int, censored: bool
    ) -> tuple[bool | float | None, str | None]:
        row = self._rows.get((arm, seed))
        if row is None:
            return None, "no run"
        if row["seed_role"] != ROLE:
            return None, f"seed role is {row['seed_role']}, not {ROLE}"
        if part.outcome == "collapse":
            if row["collapsed"] is None:
                return None, "no verdict"
            return row["collapsed"] or (censored and bool(row["censored"])), None
        channel = part.outcome in CHANNEL
        value = self._channel(part.outcome, part.at).get(row["run_id"]) if channel else row[part.outcome]
        if value is None or not math.isfinite(value):
            return None, f"no finite {part.outcome}"
        return value, None

    def _read_channel(self, outcome: str, at: int | str) -> dict[str, float]:
        table, column = CHANNEL[outcome]
        return log_channel(self._telemetry[table], column, None if at == "final" else int(at))
