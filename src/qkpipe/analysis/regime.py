"""Which regime (learning rate, dose, tile, horizon) is fit for the study: the declared criterion, on tuning
seeds.

A candidate regime is a set of arms called ``<regime>.<arm>``, one for each arm that the criterion
(:class:`qkpipe.config.claims.RegimeCriterion`) names; arms without a dot are the study's own regime,
``study``. The outcome is a choice, not evidence: there is no p-value here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from qkpipe.analysis.outcomes import CHANNEL, log_channel
from qkpipe.config import Study
from qkpipe.config.claims import RegimeCriterion, load_claims
from qkpipe.paths import StudyPaths
from qkpipe.store.parquet import read_runs, read_table, write_table

ROLE = "tuning"
OWN = "study"

SETTINGS = {
    "lr": pa.float64(),
    "dose": pa.string(),
    "gain": pa.float64(),
    "tile": pa.int64(),
    "steps": pa.int64(),
}

REGIMES = pa.schema(
    [
        ("rank", pa.int64()),
        ("regime", pa.string()),
        ("scale", pa.string()),
        *SETTINGS.items(),
        ("n_seeds", pa.int64()),
        ("passes", pa.bool_()),
        ("collapse_passes", pa.bool_()),
        ("collapse_margin", pa.float64()),
        ("n_collapsed", pa.int64()),
        ("n_collapsed_paper", pa.int64()),
        ("n_collapse", pa.int64()),
        ("healthy_passes", pa.bool_()),
        ("healthy_margin", pa.float64()),
        ("healthy_peak_logit", pa.float64()),
        ("separate_passes", pa.bool_()),
        ("separate_margin", pa.float64()),
        ("separate_outcome", pa.string()),
        ("missing", pa.string()),
        ("seeds", pa.string()),
    ]
)
"""One row a regime, the best first. A margin above 0 passes, and is the worst over tuning seeds and arms:
``collapse_margin``, share of the horizon left between the later rule's collapse and the latest allowed
(-infinite if one did not collapse); ``healthy_margin``, log of the allowed logit over the largest (-infinite
if one collapsed or was censored); ``separate_margin``, log ratio of treated to control beyond the declared
one, in the outcome that separates better. ``missing`` lists the runs a regime lacks; it does not pass without
them.
"""


def regimes(
    criterion: RegimeCriterion,
    runs: pa.Table,
    layers: pa.Table,
    heads: pa.Table,
    *,
    settings: Mapping[str, Mapping[str, Any]] | None = None,
    seeds: Iterable[int] = (),
) -> pa.Table:
    """Judge and rank every regime found in ``runs`` (schema ``telemetry.schema.RUNS``; tuning seeds alone
    count).

    ``layers`` (run_id, step, sigma_q_1) and ``heads`` (run_id, step, max_logit) are the telemetry of at least
    the criterion's arms, ``settings`` maps a regime to its columns of ``SETTINGS``, ``seeds`` are those asked
    for.
    """
    seeds = set(seeds)
    found: dict[tuple[str, str], dict[tuple[str, int], dict[str, Any]]] = {}
    for row in runs.to_pylist():
        regime, arm = split_arm(row["arm"])
        if row["seed_role"] == ROLE and arm in criterion.arms:
            found.setdefault((row["scale"], regime), {})[arm, row["seed"]] = row
    channel = {
        outcome: log_channel({"layers": layers, "heads": heads}[table], column)
        for outcome, (table, column) in CHANNEL.items()
    }
    rows = []
    for (scale, regime), by_run in found.items():
        wanted = sorted({seed for _, seed in by_run} | seeds)
        row = {"regime": regime, "scale": scale, **(settings or {}).get(regime, {})}
        rows.append(row | judge(criterion, by_run, channel, wanted))
    rows.sort(key=lambda row: (not row["passes"], -_worst(row), row.get("steps") or 0, row["regime"]))
    return pa.Table.from_pylist([row | {"rank": rank} for rank, row in enumerate(rows, 1)], REGIMES)


def build(paths: StudyPaths, study: Study, seeds: Iterable[int] = ()) -> list[Path]:
    """Write ``tables/regime.parquet`` from the tuning runs that are there."""
    criterion = load_claims(study.folder).regime
    runs = read_table(paths.analysis("runs"))
    rows = zip(*(runs[name].to_pylist() for name in ("arm", "seed", "seed_role")))
    tuned = [(arm, seed) for arm, seed, role in rows if role == ROLE and split_arm(arm)[1] in criterion.arms]
    folders = [paths.run(arm, seed) for arm, seed in tuned]
    layers = read_runs(folders, "layers", ["run_id", "step", "sigma_q_1"])
    heads = read_runs(folders, "heads", ["run_id", "step", "max_logit"])
    settings = {
        split_arm(arm)[0]: setting_of(study, arm)
        for arm, _ in tuned
        if split_arm(arm)[1] == criterion.collapse[0]
    }
    written = paths.table("regime")
    write_table(written, regimes(criterion, runs, layers, heads, settings=settings, seeds=seeds), REGIMES)
    return [written]


def split_arm(arm: str) -> tuple[str, str]:
    """``<regime>.<arm>`` in two."""
    regime, _, name = arm.rpartition(".")
    return regime or OWN, name


def is_candidate(arm: str) -> bool:
    """Whether an arm belongs to a candidate regime: judged in ``tables/regime``, and in no figure of the study."""
    return split_arm(arm)[0] != OWN


def setting_of(study: Study, arm: str) -> dict[str, Any]:
    """What a regime varies, read from the resolved config of its first collapsing arm."""
    run = study.resolve(arm, seed=0)
    return {
        "lr": run.optimizer.lr,
        "dose": run.attention.precision.label(),
        "gain": run.attention.repair.delta_gain,
        "tile": run.attention.tile,
        "steps": run.train.steps,
    }


def judge(
    criterion: RegimeCriterion,
    by_run: Mapping[tuple[str, int], Mapping[str, Any]],
    channel: Mapping[str, Mapping[str, float]],
    seeds: list[int],
) -> dict[str, Any]:
    """Margins of one regime, from ``(arm, seed)`` -> row of ``runs`` and outcome -> ``run_id`` -> value."""
    missing = [f"{arm}/seed={seed}" for arm in criterion.arms for seed in seeds if (arm, seed) not in by_run]

    def select(arms: Iterable[str]) -> list[Mapping[str, Any]]:
        return [by_run[arm, seed] for arm in arms for seed in seeds if (arm, seed) in by_run]

    collapse, healthy = select(criterion.collapse), select(criterion.healthy)
    collapse_margin = min(
        (criterion.collapse_before - _collapse_share(row, criterion.rules) for row in collapse),
        default=-math.inf,
    )
    # A run without a single finite logit has an unknown peak, which is no peak below the limit.
    peaks = [math.inf if row["peak_logit"] is None else row["peak_logit"] for row in healthy]
    peak = max(peaks, default=math.inf)
    unhealthy = any(row["collapsed"] or row["collapsed_paper"] or row["censored"] for row in healthy)
    healthy_margin = (
        -math.inf if unhealthy or math.isinf(peak) else math.log(criterion.max_logit / max(peak, 1e-9))
    )
    separations = {
        outcome: min(
            (
                values.get(by_run[pair.treated, seed]["run_id"], -math.inf)
                - values.get(by_run[pair.control, seed]["run_id"], math.inf)
                for pair in criterion.separate
                for seed in seeds
                if (pair.treated, seed) in by_run and (pair.control, seed) in by_run
            ),
            default=-math.inf,
        )
        for outcome, values in channel.items()
    }
    outcome = max(separations, key=lambda name: separations[name])
    separate_margin = separations[outcome] - criterion.separation if criterion.separate else math.inf
    margins = {"collapse": collapse_margin, "healthy": healthy_margin, "separate": separate_margin}
    return {
        **{f"{name}_margin": margin for name, margin in margins.items()},
        **{f"{name}_passes": margin > 0 for name, margin in margins.items()},
        "passes": not missing
        and len(seeds) >= criterion.n_seeds
        and all(margin > 0 for margin in margins.values()),
        "n_seeds": len(seeds),
        "n_collapse": len(collapse),
        "n_collapsed": sum(bool(row["collapsed"]) for row in collapse),
        "n_collapsed_paper": sum(bool(row["collapsed_paper"]) for row in collapse),
        "healthy_peak_logit": None if math.isinf(peak) else peak,
        "separate_outcome": outcome if separations[outcome] > -math.inf else None,
        "missing": ", ".join(missing),
        "seeds": ",".join(map(str, seeds)),
    }


def _collapse_share(row: Mapping[str, Any], rules: Iterable[str]) -> float:
    """Share of the horizon at which the last of the rules sees the collapse; infinite if one does not."""
    steps = {"primary": row["collapse_step"], "paper": row["collapse_step_paper"]}
    collapsed = {"primary": row["collapsed"], "paper": row["collapsed_paper"]}
    if not all(collapsed[rule] for rule in rules):
        return math.inf
    return max(steps[rule] for rule in rules) / row["steps_planned"]


def _worst(row: Mapping[str, Any]) -> float:
    return min(row[f"{name}_margin"] for name in ("collapse", "healthy", "separate"))
