"""The report's sections beyond the arms: a question, what is known of it as tables, and a figure; all read from Parquet.

A section shows each of its tables as it is in the database, under the name by which it can be queried there. Where a table is
empty, its ``empty`` sentence says what is missing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from qkpipe.paths import StudyPaths
from qkpipe.report.formats import NONE, count, number, spans
from qkpipe.store.parquet import read_table


@dataclass(frozen=True)
class Column:
    """``key`` of the table under the heading ``head``; ``show`` makes text of a row."""

    key: str
    head: str
    show: Callable[[dict[str, Any]], tuple[str, str]]
    numeric: bool = True

    def cell(self, row: dict[str, Any]) -> tuple[str, str]:
        """What is shown, and what stands small below it."""
        return self.show(row)


def text(key: str, head: str | None = None) -> Column:
    return Column(key, head or key.replace("_", " "), lambda row: (str(_known(row[key])), ""), numeric=False)


def value(key: str, head: str | None = None, digits: int = 3) -> Column:
    return Column(key, head or key.replace("_", " "), lambda row: (number(row[key], digits), ""))


def whole(key: str, head: str | None = None) -> Column:
    return Column(key, head or key.replace("_", " "), lambda row: (count(row[key]), ""))


def between(key: str, low: str, high: str, head: str) -> Column:
    """A value with its interval below."""

    def show(row: dict[str, Any]) -> tuple[str, str]:
        known = row[low] is not None and row[high] is not None
        return number(row[key]), f"{number(row[low])} to {number(row[high])}" if known else ""

    return Column(key, head, show)


def median(name: str, head: str) -> Column:
    """The median over seeds with the smallest and largest below."""
    return between(f"{name}_median", f"{name}_min", f"{name}_max", head)


def share(k: str, n: str, low: str, high: str, head: str) -> Column:
    """k of n with the exact interval of the share below."""

    def show(row: dict[str, Any]) -> tuple[str, str]:
        if not row[n]:
            return NONE, ""
        interval = f"{number(row[low], 2)} to {number(row[high], 2)}" if row[low] is not None else ""
        return f"{row[k]}/{row[n]}", interval

    return Column(k, head, show)


def of(k: str, n: str, head: str) -> Column:
    """k of n, without an interval."""
    return Column(k, head, lambda row: (f"{row[k]}/{row[n]}" if row[n] else NONE, ""))


COLLAPSED = share("collapsed", "n", "collapsed_low", "collapsed_high", "collapsed")
SEEDS = Column(
    "seeds", "seeds", lambda row: (spans(row["seeds"]), row["seed_roles"].replace("_", " ")), numeric=False
)


@dataclass(frozen=True)
class Table:
    """Table ``name`` of the database, these columns of it, at most ``limit`` rows (all are in the database)."""

    name: str
    title: str
    columns: tuple[Column, ...]
    query: str
    empty: str
    keep: Callable[[dict[str, Any]], bool] = lambda row: True
    limit: int = 60


@dataclass(frozen=True)
class Section:
    id: str
    title: str
    note: str
    tables: tuple[Table, ...]
    figures: tuple[str, ...] = ()


def _known(value: Any) -> Any:
    return NONE if value is None or value == "" else value


def shown(section: Section, paths: StudyPaths) -> dict[str, Any]:
    """What the template needs of a section."""
    tables = []
    for table in section.tables:
        rows = [row for row in read_table(paths.analysis(table.name)).to_pylist() if table.keep(row)]
        cells = [
            [(column.cell(row), column.numeric) for column in table.columns] for row in rows[: table.limit]
        ]
        tables.append({"table": table, "rows": cells, "left": max(len(rows) - table.limit, 0)})
    return {
        "id": section.id,
        "title": section.title,
        "note": section.note,
        "tables": tables,
        "figures": section.figures,
    }


ISOLATION = Section(
    "isolation",
    "Isolation",
    "Which quantity of the streaming recurrence makes the collapse when it alone is rounded, which repairs it when it "
    "alone is exact, and what more or less of the same fault does. Attention is the only source; settings with a "
    "repair at the source are at the end.",
    (
        Table(
            "isolation",
            "Table 1",
            (
                text("question"),
                text("what"),
                whole("bits", "m"),
                whole("tile"),
                text("rounding"),
                value("attention_gain", "gain"),
                COLLAPSED,
                median("log_sigma", "log σ(W_Q)"),
                median("log_logit", "log max logit"),
                median("residual", "early r"),
                SEEDS,
            ),
            "SELECT question, what, bits, tile, n, collapsed, log_sigma_median, residual_median FROM isolation",
            "No run whose only fault lies in the streaming recurrence.",
        ),
    ),
    ("isolation",),
)

FACTORIAL = Section(
    "factorial",
    "Source x correction",
    "Every source of the fault against every correction, by architecture, optimizer and tokenizer. Cells in which the "
    "correction cannot change a bit are named as not applicable. The second table holds the sources that were run in "
    "more than one setting.",
    (
        Table(
            "factorial",
            "Table 2",
            (
                text("source"),
                text("correction"),
                text("model"),
                text("optimizer"),
                text("status"),
                COLLAPSED,
                median("log_sigma", "log σ(W_Q)"),
                median("log_logit", "log max logit"),
                median("final_val_loss", "validation loss"),
                SEEDS,
            ),
            "SELECT source, correction, model, collapsed, n, log_sigma_median, log_logit_median FROM factorial WHERE n > 0",
            "No run without a probe.",
            keep=lambda row: row["status"] == "run",
            limit=80,
        ),
        Table(
            "generality",
            "Table S1",
            (
                text("source"),
                text("correction"),
                text("model"),
                text("optimizer"),
                text("tokenizer"),
                COLLAPSED,
                median("log_sigma_twin", "log σ(W_Q) over twin"),
                whole("fired"),
                SEEDS,
            ),
            "SELECT source, correction, model, optimizer, tokenizer, collapsed, n, log_sigma_twin_median FROM generality",
            "No source has been run in a second architecture, with a second optimizer or a second tokenizer.",
            limit=80,
        ),
    ),
    ("generality",),
)

ENTRY = Section(
    "entry",
    "Entry",
    "Faults outside attention, uncorrected: does the error's coherence in time decide, at a given size, whether the "
    "channel is entered? A hold is the number of steps for which an error keeps its signs; Adam's memory is 1/(1-β1) "
    "steps. Predictors are compared on the same runs.",
    (
        Table(
            "entry",
            "Table 3",
            (
                text("arm"),
                text("route"),
                text("structure"),
                value("hold_in_memories", "hold, memories"),
                COLLAPSED,
                median("error_ratio", "error / gradient"),
                median("coherence", "coherence"),
                median("log_sigma_ratio", "log σ(W_Q) over twin"),
                median("log_logit_ratio", "log logit over twin"),
                SEEDS,
            ),
            "SELECT arm, hold_in_memories, coherence_median, error_ratio_median, log_sigma_ratio_median FROM entry",
            "No uncorrected run with a fault outside attention.",
        ),
        Table(
            "entry_predictors",
            "Predictors",
            (
                text("route"),
                text("outcome"),
                text("predictor"),
                between("rank_correlation", "low", "high", "rank correlation"),
                whole("n", "runs"),
                whole("arms"),
                text("seed_roles", "seeds"),
            ),
            "SELECT route, outcome, predictor, rank_correlation, low, high, n FROM entry_predictors",
            "Predictors are compared over three arms or more; there are fewer beside their twins.",
        ),
    ),
    ("entry",),
)

PROBE = Section(
    "probe",
    "Causal probe and its controls",
    "The same probe with other k, sides and directions, from a late start, shrinking the whole update, and on the "
    "healthy twin.",
    (
        Table(
            "probe_controls",
            "Controls",
            (
                text("arm"),
                text("control"),
                text("action"),
                whole("k"),
                text("side"),
                COLLAPSED,
                of("unprobed_collapsed", "unprobed_n", "unprobed"),
                median("log_sigma_ratio", "log σ(W_Q) over unprobed"),
                median("removed_fraction", "energy removed"),
                whole("infeasible"),
                SEEDS,
            ),
            "SELECT arm, control, k, side, n, collapsed, unprobed_collapsed, log_sigma_ratio_median FROM probe_controls",
            "No probed run.",
        ),
    ),
    ("probe_controls",),
)

LOCI = Section(
    "loci",
    "Where to act, and when",
    "Every correction against the fault it was run with: rescued are the seeds that collapse without it and do not "
    "with it. Controls at other loci act at the same live trigger, so their fire steps equal the guard's, seed by "
    "seed. Then every threshold the guard could have had, from unguarded runs: a guard is dormant until it fires, so "
    "these are exact. Transfer: the threshold of all architectures but one.",
    (
        Table(
            "loci",
            "Table 4",
            (
                text("arm"),
                text("correction"),
                text("unprotected", "against"),
                COLLAPSED,
                whole("at_stake", "at stake"),
                whole("rescued"),
                whole("fired"),
                whole("same_fire_step", "same step"),
                median("loss_over_twin", "loss over twin"),
                median("final_sigma_q", "σ(W_Q)"),
                median("lead", "lead, steps"),
                SEEDS,
            ),
            "SELECT arm, correction, at_stake, rescued, fired, same_fire_step, fire_pairs, loss_over_twin_median FROM loci",
            "No run in which something acts against a fault.",
        ),
        Table(
            "threshold_transfer",
            "Transfer",
            (
                text("model", "left out"),
                text("calibrated_on", "calibrated on"),
                value("threshold"),
                share("healthy_fired", "healthy_n", "healthy_low", "healthy_high", "false activations"),
                share("doomed_fired", "doomed_n", "doomed_low", "doomed_high", "fired in time"),
                between("lead_median", "lead_min", "lead_max", "lead, steps"),
            ),
            "SELECT model, threshold, healthy_fired, healthy_n, doomed_fired, doomed_n, lead_median FROM threshold_transfer",
            "Transfer needs healthy runs of two architectures.",
        ),
    ),
    ("loci", "sweep"),
)

CAPPING = Section(
    "capping",
    "What normalisation caps",
    "QK normalisation bounds the applied logit by sqrt(d_head); it does not hold σ(W_Q).",
    (
        Table(
            "capping",
            "Capping",
            (
                text("arm"),
                text("correction"),
                value("bound"),
                whole("within_bound", "within bound"),
                whole("n", "runs"),
                median("applied", "applied logit"),
                median("raw", "logit without"),
                median("sigma", "σ(W_Q)"),
                median("log_sigma_ratio", "log σ over uncorrected"),
                median("log_sigma_twin", "log σ over twin"),
                SEEDS,
            ),
            "SELECT arm, bound, within_bound, n, applied_median, raw_median, log_sigma_ratio_median FROM capping",
            "No run with QK normalisation on.",
        ),
    ),
    ("capping",),
)

ENTROPY = Section(
    "entropy",
    "Which moves first",
    "A signal has left health at the first look from which it stays, for three looks, outside all that healthy runs "
    "of the same setting show there. The table counts, over runs in which both left, how often one did before the "
    "other.",
    (
        Table(
            "onset_order",
            "Order of events",
            (
                text("first"),
                text("second", "before"),
                share("n_first", "n", "low", "high", "runs"),
                whole("n_together", "together"),
                value("median_lag", "median lag, steps"),
            ),
            "SELECT first, second, n_first, n, median_lag FROM onset_order ORDER BY share DESC",
            "No run collapsed in a setting with two healthy runs or more.",
            keep=lambda row: bool(row["n"]) and row["n_first"] * 2 > row["n"],
        ),
    ),
    ("entropy",),
)

RESIDUAL = Section(
    "residual",
    "The row-sum residual and its law",
    "r measures how badly the rows of dS miss zero, before anything else has moved. The law log T = a - b log r - c "
    "log lr is a censored log-normal model with an intercept a seed. If everything collapses onto r, no other setting "
    "adds anything to it: a small p or a positive gain of AIC speaks against that. No p-value is given where tuning "
    "seeds are among the runs. The prediction is what the law says of a run that nobody has made yet.",
    (
        Table(
            "law",
            "The law",
            (
                text("term"),
                between("estimate", "low", "high", "estimate"),
                value("p_value", "p"),
                value("sigma"),
                value("aic", "AIC"),
                whole("n", "runs"),
                whole("collapsed"),
                whole("seeds"),
                text("seed_roles", "roles"),
            ),
            "SELECT term, estimate, low, high, p_value, n, collapsed FROM law",
            "Too few collapses, or too few doses, to fit the law.",
        ),
        Table(
            "law_collapse",
            "Beside r",
            (
                text("beside_r", "setting"),
                text("levels"),
                value("statistic", "2 Δ log L"),
                whole("degrees"),
                value("p_value", "p"),
                value("aic_gain", "AIC gain"),
            ),
            "SELECT beside_r, levels, statistic, degrees, p_value, aic_gain FROM law_collapse",
            "Nothing beside r varies among these runs, or there is no law.",
        ),
        Table(
            "law_settings",
            "Settings instead of r",
            (
                text("term"),
                between("estimate", "low", "high", "estimate"),
                value("p_value", "p"),
                value("sigma"),
                value("aic", "AIC"),
                whole("n", "runs"),
                whole("collapsed"),
                text("seed_roles", "roles"),
            ),
            "SELECT term, estimate, low, high, p_value, aic, n FROM law_settings",
            "Too few collapses to fit the settings that vary.",
        ),
        Table(
            "same_mode",
            "Same mode across doses",
            (
                text("arm"),
                value("dose", "r"),
                whole("collapsed"),
                whole("n", "runs"),
                text("order_of_events", "order of events"),
                text("first_heads", "first head, by seed"),
                text("rescued_by", "rescued by"),
                text("not_by", "not by"),
            ),
            "SELECT arm, dose, order_of_events, first_heads, rescued_by, not_by FROM same_mode",
            "No uncorrected run of the law collapsed.",
        ),
        Table(
            "prediction",
            "Prediction",
            (
                text("target"),
                value("dose", "r"),
                value("lr", "learning rate"),
                between("median", "low", "high", "step of the collapse"),
                value("collapse_probability", "collapse within horizon"),
                whole("horizon"),
                text("measurement"),
                text("falsified_if"),
            ),
            "SELECT target, dose, median, low, high, collapse_probability, falsified_if FROM prediction",
            "No prediction: it needs a law with a learning-rate term, and a dose at seven mantissa bits.",
        ),
    ),
    ("residual",),
)

MONITORS = Section(
    "monitors",
    "Contest of monitors",
    "Who warns earliest at the same rate of false alarms? Thresholds come from healthy tuning and calibration runs "
    "alone, at a nominal 10%; false alarms are counted on other healthy runs. Stressed runs carry no numerical error: "
    "a monitor that does not fire there, or scores faults above them, can tell a numerical fault from a hot run. "
    "Drifting runs carry none either and do not collapse, though their logits pass those of every threshold run. "
    "Leads and areas carry bootstrap intervals over seeds.",
    (
        Table(
            "contest",
            "Monitors",
            (
                text("monitor"),
                text("model"),
                text("optimizer"),
                whole("rank"),
                value("threshold"),
                share(
                    "false_alarms_k",
                    "false_alarms_n",
                    "false_alarms_low",
                    "false_alarms_high",
                    "false alarms",
                ),
                share("detected_k", "detected_n", "detected_low", "detected_high", "detected"),
                between("lead_median", "lead_low", "lead_high", "lead, steps"),
                between("auc_value", "auc_low", "auc_high", "AUC"),
                between("auc_early_value", "auc_early_low", "auc_early_high", "early AUC"),
                share("stressed_k", "stressed_n", "stressed_low", "stressed_high", "fires under stress"),
                share("drifting_k", "drifting_n", "drifting_low", "drifting_high", "fires under drift"),
                between("auc_stressor_value", "auc_stressor_low", "auc_stressor_high", "AUC over stressors"),
            ),
            "SELECT monitor, rank, threshold, false_alarms_k, false_alarms_n, detected_k, detected_n, lead_median FROM contest",
            "The contest needs collapsed runs of a fault, and healthy runs that set no threshold, in one setting.",
        ),
    ),
    ("contest",),
)

ROBUSTNESS = Section(
    "robustness",
    "Time to collapse, and the constants of the rule",
    "How long each arm lasts, and how often each rule of a grid agrees with the primary one. The thresholds of the "
    "guard are swept above, k and the side of the probe in its controls.",
    (
        Table(
            "sensitivity",
            "Rules that disagree with the primary one",
            (
                text("rule"),
                text("arm"),
                whole("n", "runs"),
                whole("collapsed"),
                whole("agree"),
                value("median_collapse_step", "median collapse step"),
            ),
            "SELECT rule, sum(n) AS runs, sum(agree) AS agree FROM sensitivity GROUP BY rule ORDER BY agree",
            "Every rule of the grid says of every run what the primary one says.",
            keep=lambda row: row["agree"] < row["n"],
        ),
    ),
    ("survival", "sensitivity"),
)

REPAIRS = Section(
    "repairs",
    "Repairs by precision",
    "Every repair at the source against the same arm without it, seed by seed. Rescued are the seeds that collapse "
    "without it and do not with it, of those at stake, with the exact 95% interval of the share.",
    (
        Table(
            "repairs",
            "Table 4, by precision",
            (
                text("precision"),
                text("repair"),
                value("lr", "learning rate"),
                COLLAPSED,
                share("rescued", "at_stake", "rescued_low", "rescued_high", "rescued"),
                whole("harmed"),
                median("log_residual_ratio", "log r over unrepaired"),
                median("log_sigma_ratio", "log σ(W_Q) over unrepaired"),
                median("loss_over_twin", "loss over twin"),
                SEEDS,
            ),
            "SELECT precision, repair, rescued, at_stake, rescued_low, rescued_high FROM repairs",
            "No run with a repair at the source beside the same run without it.",
        ),
    ),
    ("repairs",),
)

REMEDIES = Section(
    "remedies",
    "Contest of remedies",
    "Every remedy against the fault that most were run with, and on the healthy twin: does it contain the collapse, how "
    "often does it act without cause, what does it cost in loss and in time?",
    (
        Table(
            "remedies",
            "Remedies",
            (
                text("remedy"),
                COLLAPSED,
                share("rescued", "at_stake", "rescued_low", "rescued_high", "rescued"),
                median("loss_over_twin", "loss over twin"),
                median("lead", "lead, steps"),
                share(
                    "healthy_fired",
                    "healthy_n",
                    "healthy_fired_low",
                    "healthy_fired_high",
                    "acts on healthy runs",
                ),
                median("healthy_loss_over_twin", "healthy loss over twin"),
                median("cost", "time of a step, ratio"),
                SEEDS,
            ),
            "SELECT remedy, rescued, at_stake, healthy_fired, healthy_n, cost_median FROM remedies",
            "No run in which a remedy acts against a fault.",
        ),
    ),
    ("remedies",),
)

HORIZON = Section(
    "horizon",
    "Long horizon",
    "Arms that are trained for more steps than the others. Late collapses are those that the study's own horizon would "
    "have missed. Always-on is the arm of the same source and horizon with QK normalisation from the first step.",
    (
        Table(
            "horizon",
            "Long horizon",
            (
                text("arm"),
                text("correction"),
                whole("steps_planned", "steps"),
                COLLAPSED,
                of("short_collapsed", "short_n", "within the study's horizon"),
                whole("late"),
                whole("fired"),
                median("loss_over_twin", "loss over twin"),
                between(
                    "loss_over_always_on_median",
                    "loss_over_always_on_low",
                    "loss_over_always_on_high",
                    "over always-on",
                ),
                median("final_sigma_q", "σ(W_Q)"),
                median("peak_logit", "max logit"),
                SEEDS,
            ),
            "SELECT arm, correction, collapsed, n, late, loss_over_twin_median FROM horizon",
            "No run longer than the study's own horizon.",
        ),
    ),
    ("horizon",),
)

PORTABILITY = Section(
    "portability",
    "Two devices",
    "The same runs, with the same initialisation, batches and draws, made once more elsewhere. A verdict is collapsed, "
    "censored or held. A loss parts at the first step that differs by 1e-3 nat; σ is compared before the first collapse "
    "of either side.",
    (
        Table(
            "portability_arms",
            "Agreement",
            (
                text("arm"),
                text("first_device", "first"),
                text("second_device", "second"),
                share("agree", "n", "agree_low", "agree_high", "same verdict"),
                of("first_collapsed", "n", "first collapsed"),
                of("second_collapsed", "n", "second collapsed"),
                of("fire_agree", "n", "fired alike"),
                of("identical", "n", "bit-identical"),
                median("collapse_step_difference", "collapse later by, steps"),
                median("sigma_gap", "|Δ log σ(W_Q)|"),
                median("val_loss_difference", "Δ validation loss"),
                SEEDS,
            ),
            "SELECT arm, agree, n, agree_low, agree_high, identical, first_collapsed, second_collapsed FROM portability_arms",
            "No run is there twice.",
        ),
        Table(
            "portability",
            "By run",
            (
                text("arm"),
                whole("seed"),
                text("first_verdict", "first"),
                text("second_verdict", "second"),
                whole("first_collapse_step", "first collapses"),
                whole("second_collapse_step", "second collapses"),
                whole("first_fire_step", "first fires"),
                whole("second_fire_step", "second fires"),
                whole("first_bit_step", "first bit"),
                whole("parted_step", "loss parts"),
                value("sigma_gap", "|Δ log σ(W_Q)|"),
                value("val_loss_difference", "Δ validation loss"),
                Column(
                    "same_environment",
                    "same machine",
                    lambda row: ("yes" if row["same_environment"] else "no", ""),
                    numeric=False,
                ),
            ),
            "SELECT arm, seed, first_environment, second_environment, first_verdict, second_verdict FROM portability",
            "No run is there twice.",
        ),
    ),
    ("portability",),
)
"""Shown where :func:`qkpipe.analysis.portability.is_current`."""

SECTIONS = (
    ISOLATION,
    FACTORIAL,
    ENTRY,
    PROBE,
    LOCI,
    REMEDIES,
    REPAIRS,
    HORIZON,
    CAPPING,
    ENTROPY,
    RESIDUAL,
    MONITORS,
    ROBUSTNESS,
)
