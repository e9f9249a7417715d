"""The report: one HTML file that needs nothing else, made from tables, events, run records and figures."""

from __future__ import annotations

import base64
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import jinja2
import pandas as pd

from qkpipe.analysis.portability import is_current
from qkpipe.config import Study
from qkpipe.errors import BadInput
from qkpipe.paths import StudyPaths
from qkpipe.report import device, style
from qkpipe.report.figures import ASKED, FIGURES
from qkpipe.report.formats import FILTERS
from qkpipe.report.sections import PORTABILITY, SECTIONS, shown
from qkpipe.report.sparkline import Scale, sparkline
from qkpipe.store.parquet import read_runs, read_table

TEMPLATE = Path("workflow/report/report.html.j2")
MEASURES = ("loss", "sigma_q", "max_logit")


def build(paths: StudyPaths, study: Study, template: Path = TEMPLATE) -> Path:
    """Write ``report/index.html`` from the analysis tables and the figures; returns its path.

    ``claims``, ``threshold`` and ``regime`` are shown where they exist; every other table and every figure has to be there
    (:class:`BadInput` names it).
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(template.parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= FILTERS
    page = environment.get_template(template.name).render(context(paths, study))
    paths.report.parent.mkdir(parents=True, exist_ok=True)
    temporary = paths.report.with_suffix(".tmp")
    temporary.write_text(page, encoding="utf-8")
    temporary.replace(paths.report)
    return paths.report


def context(paths: StudyPaths, study: Study) -> dict[str, Any]:
    """Everything the template shows."""
    runs = _rows(paths.analysis("runs"))
    curves = read_table(paths.analysis("curves")).to_pandas()
    summary = _rows(paths.analysis("dissociation"))
    records = {
        run["run_id"]: json.loads(paths.run(run["arm"], run["seed"]).record.read_text()) for run in runs
    }
    events = read_runs((paths.run(run["arm"], run["seed"]) for run in runs), "events").to_pandas()
    sections, figures = SECTIONS, FIGURES
    if is_current(paths, study):
        sections, figures = (*SECTIONS, PORTABILITY), FIGURES | ASKED
    scales = {measure: Scale.over(curves, measure, log=measure in style.LOG_SCALED) for measure in MEASURES}
    return {
        "scale": study.scale,
        "n_runs": len(runs),
        "n_collapsed": sum(run["collapsed"] for run in runs),
        "n_censored": sum(run["censored"] for run in runs),
        "n_fired": sum(run["fire_step"] is not None for run in runs),
        "hours": sum(run["wall_s"] or 0.0 for run in runs) / 3600,
        "tokens": sum(run["tokens"] or 0 for run in runs),
        "roles": sorted(Counter(run["seed_role"] for run in runs).items()),
        "claims": _rows_if_there(paths.analysis("claims")),
        "claim_exclusions": _rows_if_there(paths.analysis("claim_exclusions")),
        "contrasts": _rows(paths.table("contrasts")),
        "firings": _rows(paths.analysis("guard_firing")),
        "thresholds": _rows_if_there(paths.table("threshold")),
        "regimes": _rows_if_there(paths.table("regime")),
        "gpu": device.section(paths),
        "exclusions": _rows(paths.analysis("exclusions")),
        "figures": {name: _figure(name, module, paths) for name, module in figures.items()},
        "sections": [shown(section, paths) for section in sections],
        "arms": [arm | _arm(arm["arm"], runs, curves, events, records, scales, paths) for arm in summary],
        "colours": style.group_colours(arm["group"] for arm in summary),
        "environments": _environments(records),
        "sources": _sources(runs),
        "database": paths.database.name,
        "results": f"results/{paths.scale}",
    }


def _rows(path: Path) -> list[dict[str, Any]]:
    return read_table(path).to_pylist()


def _rows_if_there(path: Path) -> list[dict[str, Any]]:
    return _rows(path) if path.exists() else []


def _figure(name: str, module: ModuleType, paths: StudyPaths) -> dict[str, Any]:
    path = paths.figure(name)
    if not path.exists():
        raise BadInput(f"{path}: no such file; draw figure {name!r} first")
    image = base64.b64encode(path.read_bytes()).decode()
    return {
        "name": name,
        "label": module.LABEL,
        "uri": f"data:image/svg+xml;base64,{image}",
        "caption": module.CAPTION,
        "tables": module.TABLES,
        "query": module.QUERY,
    }


def _arm(
    arm: str,
    runs: Sequence[dict[str, Any]],
    curves: pd.DataFrame,
    events: pd.DataFrame,
    records: dict[str, dict[str, Any]],
    scales: dict[str, Scale],
    paths: StudyPaths,
) -> dict[str, Any]:
    """An arm's runs with their small curves and events, and its resolved config (which its seeds share)."""
    own = [run for run in runs if run["arm"] == arm]
    shown = []
    for run in own:
        lines = curves[curves["run_id"] == run["run_id"]]
        marks = [("collapse", run["collapse_step"]), ("fire", run["fire_step"])]
        small = [
            (style.LABELS[measure], sparkline(lines["step"], lines[measure], scale, marks))
            for measure, scale in scales.items()
        ]
        shown.append(
            run
            | {
                "sparklines": small,
                "events": group_events(events[events["run_id"] == run["run_id"]]),
                "stop_reason": records[run["run_id"]]["stop_reason"],
                "folder": paths.run(arm, run["seed"]).folder.relative_to(paths.results).as_posix(),
            }
        )
    config = {key: value for key, value in records[own[0]["run_id"]]["config"].items() if key != "seed"}
    return {"runs": shown, "config": json.dumps(config, indent=2), "config_hash": own[0]["config_hash"]}


def group_events(events: pd.DataFrame) -> list[dict[str, Any]]:
    """Events of one run by kind: how many, first and last step, the first one's detail; in order of first appearance."""
    groups = []
    for kind, rows in events.sort_values("step", kind="stable").groupby("kind", sort=False):
        steps = rows["step"].tolist()
        groups.append(
            {
                "kind": kind,
                "n": len(rows),
                "first": steps[0],
                "last": steps[-1],
                "detail": rows["detail"].iloc[0],
            }
        )
    return groups


def _environments(records: dict[str, dict[str, Any]]) -> list[tuple[dict[str, Any], int]]:
    """The distinct environments runs were made in, with the number of runs, most frequent first."""
    counts = Counter(json.dumps(record["environment"], sort_keys=True) for record in records.values())
    return [(json.loads(text), n) for text, n in counts.most_common()]


def _sources(runs: Sequence[dict[str, Any]]) -> list[tuple[str, list[tuple[str, int]]]]:
    """What the runs were made from: distinct code versions, data hashes and devices, with the number of runs."""
    names = {"code_version": "code version", "data_hash": "data hash", "device": "device"}
    return [(label, Counter(str(run[key]) for run in runs).most_common()) for key, label in names.items()]
