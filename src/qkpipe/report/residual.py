"""The row-sum residual: as dose (what sets it, what follows from it) and the law of the time to collapse."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from qkpipe.analysis.settings import NONE
from qkpipe.paths import StudyPaths
from qkpipe.report import style
from qkpipe.report.forest import empty
from qkpipe.store.parquet import read_table

LABEL = "Residual"
TABLES = ("residual", "law_runs", "law", "law_collapse", "law_settings")
QUERY = (
    "SELECT arm, seed, bits, tile, attention_gain, dose, collapse_step, log_sigma FROM residual ORDER BY dose"
)
CAPTION = (
    "The row-sum residual r = mean|Σ dS| / mean Σ|dS| before anything else has moved (from the end of the warm-up to "
    "twice its length). Top left: r by mantissa bits, uncorrected faults of the recurrence. Top right: the final σ(W_Q) "
    "against r, every run whose backward is seen, by where its "
    "error enters. Bottom left: time to collapse against r, open triangles are runs that "
    "had not collapsed when they ended (censored); the line is the fitted law at the learning rate most runs have, with "
    "its 95% spread. Bottom right: does r stand for the settings? By how much the law's AIC falls when a setting is put "
    "beside r, or all of them instead of r: right of 0 they tell something that r does not."
)
PLACES = ("no fault", "attention", "attention and outside it", "outside attention")


def figure(paths: StudyPaths) -> Figure:
    """Drawn from ``residual``, ``law_runs`` and ``law``."""
    runs, law_runs, law, *beside = (read_table(paths.analysis(name)).to_pandas() for name in TABLES)
    if runs.empty:
        return empty("No run whose row-sum residual was seen.")
    fig, grid = plt.subplots(2, 2, figsize=(8.6, 6.2), gridspec_kw={"wspace": 0.48, "hspace": 0.32})
    axes = grid.ravel()
    places = runs["source"].map(place)
    colours = style.group_colours(PLACES)
    faulty = runs[runs["bits"].notna() & (runs["correction"] == "none")]
    shift = np.random.default_rng(0).uniform(-0.15, 0.15, len(faulty))
    axes[0].scatter(
        faulty["bits"] + shift, faulty["dose"], 12, color=style.PALETTE[1], alpha=0.6, linewidths=0
    )
    axes[0].set_xlabel("explicit mantissa bits")
    axes[0].set_ylabel("r")
    for name in PLACES:
        own = runs[places == name]
        if own.empty:
            continue
        axes[1].scatter(
            own["dose"],
            np.exp(own["log_sigma"]),
            12,
            color=colours[name],
            alpha=0.6,
            linewidths=0,
            label=name,
        )
    axes[1].set_xlabel("r")
    axes[1].set_ylabel("final σ(W_Q)")
    _law(axes[2], law_runs, law)
    _beside(axes[3], law, *beside)
    for ax, sides in zip(axes[:3], ("y", "xy", "xy"), strict=True):
        style.logarithmic(ax, *sides)
    axes[0].xaxis.set_major_locator(plt.MaxNLocator(integer=True))
    style.legend_below(fig, axes[1])
    fig.subplots_adjust(bottom=0.14)
    return fig


def place(source: str) -> str:
    """Where a source's error enters, one of ``PLACES``, by the label that the run has."""
    if source == NONE:
        return PLACES[0]
    if not source.startswith("streaming-"):
        return PLACES[3]
    return PLACES[2 if ")+" in source else 1]


def _law(ax: Axes, runs: pd.DataFrame, law: pd.DataFrame) -> None:
    ax.set_xlabel("r")
    ax.set_ylabel("step of the collapse")
    if runs.empty:
        return
    fell = runs["collapsed"].astype(bool)
    ax.scatter(
        runs.loc[fell, "dose"], runs.loc[fell, "duration"], 16, color=style.COLLAPSE, alpha=0.75, linewidths=0
    )
    ax.scatter(
        runs.loc[~fell, "dose"],
        runs.loc[~fell, "duration"],
        20,
        marker="^",
        facecolor="none",
        edgecolor=style.MUTED,
        linewidths=0.8,
    )
    if law.empty:
        return
    terms = law.set_index("term")["estimate"]
    r = np.geomspace(runs["dose"].min(), runs["dose"].max(), 50)
    log_t = terms["intercept"] + terms["log_r"] * np.log(r)
    log_t += terms.get("log_lr", 0.0) * np.log(runs["lr"].mode().iloc[0])
    spread = 1.96 * law["sigma"].iloc[0]
    ax.fill_between(
        r, np.exp(log_t - spread), np.exp(log_t + spread), color=style.PALETTE[0], alpha=0.13, linewidth=0
    )
    ax.plot(r, np.exp(log_t), color=style.PALETTE[0], linewidth=1.4)
    ax.set_ylim(runs["duration"].min() / 2, runs["duration"].max() * 3)


def _beside(ax: Axes, law: pd.DataFrame, collapse: pd.DataFrame, settings: pd.DataFrame) -> None:
    ax.set_xlabel("fall of AIC against the law on r")
    gains = collapse.set_index("beside_r")["aic_gain"].dropna().astype(float)
    gains.index = [f"r and {name.replace('_', ' ')}" for name in gains.index]
    if len(law) and len(settings):
        gains["settings, without r"] = law["aic"].iloc[0] - settings["aic"].iloc[0]
    if gains.empty:
        ax.text(0.5, 0.5, "no law, or nothing beside r varies", ha="center", va="center", color=style.MUTED)
        ax.set_axis_off()
        return
    rows = range(len(gains))
    ax.axvline(0.0, color=style.MUTED, linewidth=0.8, zorder=0)
    ax.hlines(rows, 0.0, gains, color=style.PALETTE[0], linewidth=1.0)
    ax.scatter(gains, rows, 22, color=style.PALETTE[0])
    ax.set_yticks(rows, gains.index)
    ax.set_ylim(len(gains) - 0.5, -0.5)
