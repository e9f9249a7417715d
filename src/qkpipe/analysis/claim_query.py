"""SQL against ``study.duckdb`` that gives a reader the numbers of a claim: one row a part.

It uses the tables ``runs``, ``layers`` and ``heads`` alone, and counts what :mod:`qkpipe.analysis.claims`
counts.
"""

from __future__ import annotations

from qkpipe.analysis.outcomes import CHANNEL
from qkpipe.config.claims import Claim, Part


def claim_query(claim: Claim, scale: str) -> str:
    """Columns: part, n_pairs, k_treated, k_control (null for a continuous outcome), effect."""
    return (
        " UNION ALL ".join(_part_query(part, i, scale) for i, part in enumerate(claim.parts, 1))
        + " ORDER BY part"
    )


def _part_query(part: Part, number: int, scale: str) -> str:
    if part.outcome == "collapse":
        sides = (
            _collapse(side, counted) for side, counted in zip(("x", "y"), part.censored_count_as_collapsed)
        )
        kept, effect = "true", "avg(t::INT - c::INT)"
        if part.statistic == "rescue":
            kept, effect = "t OR c", "avg(1 - t::INT)"
        counts = "count(*) FILTER (WHERE t) AS k_treated, count(*) FILTER (WHERE c) AS k_control"
    else:
        sides = (_continuous(side, part) for side in ("x", "y"))
        kept, effect, counts = (
            "isfinite(t) AND isfinite(c)",
            "avg(t - c)",
            "NULL AS k_treated, NULL AS k_control",
        )
    treated, control = sides
    return (
        f"SELECT {number} AS part, count(*) AS n_pairs, {counts}, {effect} AS effect FROM ("
        f"SELECT {treated} AS t, {control} AS c FROM runs x JOIN runs y USING (scale, seed) "
        f"WHERE scale = '{scale}' AND x.arm = '{part.treated}' AND y.arm = '{part.control}' "
        f"AND x.seed_role = 'confirmatory' AND y.seed_role = 'confirmatory') WHERE {kept}"
    )


def _collapse(side: str, censored_too: bool) -> str:
    return f"({side}.collapsed OR {side}.censored)" if censored_too else f"{side}.collapsed"


def _continuous(side: str, part: Part) -> str:
    if part.outcome not in CHANNEL:
        return f"{side}.{part.outcome}"
    table, column = CHANNEL[part.outcome]
    until = "" if part.at == "final" else f" AND step <= {part.at}"
    return (
        f"(SELECT ln(arg_max(v, step)) FROM (SELECT step, max({column}) AS v FROM {table} "
        f"WHERE run_id = {side}.run_id{until} GROUP BY step HAVING bool_and(coalesce(isfinite({column}), false))))"
    )
