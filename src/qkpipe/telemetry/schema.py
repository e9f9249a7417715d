"""Arrow schemas of the run tables and of the aggregated ``runs`` table; the columns are a contract with every query.

Every table carries ``run_id`` as a real column, so that files can be read without their folder names. Schemas are explicit
because a NULL-typed column breaks reading many files by name.
"""

from __future__ import annotations

import pyarrow as pa

SCHEMA_VERSION = 1
"""Raised when a column goes or changes its meaning; a new nullable column is null in the files of older runs."""

_INT = pa.int64()
_F32 = pa.float32()
_F64 = pa.float64()
_STR = pa.string()
_BOOL = pa.bool_()


def _schema(**columns: pa.DataType) -> pa.Schema:
    return pa.schema(list(columns.items()), metadata={"qkpipe.schema_version": str(SCHEMA_VERSION)})


TABLES: dict[str, pa.Schema] = {
    # One row a step; val_loss is null between validations. max_logit: largest applied logit of any layer and head, where the
    # attention kernel reports it (the streaming one does; null for torch's own).
    "steps": _schema(
        run_id=_STR,
        step=_INT,
        loss=_F64,
        lr=_F64,
        grad_norm=_F64,
        clipped_norm=_F64,
        update_norm=_F64,
        guard_active=_BOOL,
        max_logit=_F64,
        val_loss=_F64,
    ),
    # One row a layer every `telemetry.every` steps. sigma_qk_max: largest singular value over heads of W_Q^h' W_K^h with
    # the normalisation gain. entropy in nat. residual_*: row sums of dS (study.md), null where no backward is observable.
    # update_coherence: EMA 0.9 of mean sign(D_t-1)*sign(D_t-2) of the updates of W_Q and W_K, null before the third step.
    # spectral_alignment: |mean over tokens of sign(v'x)|, v the leading right singular vector of W_Q and x its input: 1 where
    # every token lies on one side of it (loss of sign diversity: Qiu et al. 2025, arXiv 2510.04202).
    "layers": _schema(
        run_id=_STR,
        step=_INT,
        layer=_INT,
        **{f"sigma_{matrix}_{i}": _F64 for matrix in ("q", "k") for i in (1, 2, 3)},
        sigma_v=_F64,
        sigma_o=_F64,
        sigma_up=_F64,
        sigma_down=_F64,
        sigma_qk_max=_F64,
        entropy_mean=_F64,
        entropy_min=_F64,
        residual_r=_F64,
        residual_mean=_F64,
        update_coherence=_F64,
        spectral_alignment=_F64,
    ),
    # max_logit: as applied; max_logit_raw: without QK normalisation. Both after the scale, before any rounding.
    "heads": _schema(
        run_id=_STR, step=_INT, layer=_INT, head=_INT, max_logit=_F64, max_logit_raw=_F64, entropy=_F64
    ),
    "routes": _schema(
        run_id=_STR,
        step=_INT,
        layer=_INT,
        route=_STR,
        grad_norm=_F64,
        error_norm=_F64,
        error_mean=_F64,
        coherence=_F64,
    ),
    "probe": _schema(
        run_id=_STR,
        step=_INT,
        layer=_INT,
        matrix=_STR,
        energy_total=_F64,
        energy_on=_F64,
        energy_removed=_F64,
    ),
    # What happened and when: guard_fired, nonfinite_gradient, diverged, probe_infeasible, ...; detail is JSON.
    "events": _schema(run_id=_STR, step=_INT, kind=_STR, detail=_STR),
    # Everything a clock or a machine decides, so that the other files are equal bit for bit after a resume.
    "timing": _schema(run_id=_STR, step=_INT, tokens_per_s=_F64, wall_s=_F64, resumes=_INT),
}

RUNS: pa.Schema = _schema(
    run_id=_STR,
    scale=_STR,
    arm=_STR,
    group=_STR,
    source=_STR,
    route=_STR,
    intervention=_STR,
    probe=_STR,
    model=_STR,
    optimizer=_STR,
    twin=_STR,
    tokenizer=_STR,
    d_model=_INT,
    n_layers=_INT,
    d_head=_INT,
    context=_INT,
    optimizer_name=_STR,
    lr=_F64,
    beta1=_F64,
    warmup=_INT,
    accumulation=_INT,
    attention=_STR,
    tile=_INT,
    tiles=_INT,
    quantities=_STR,
    bits=_INT,
    rounding=_STR,
    repair=_STR,
    attention_gain=_F64,
    fault=_STR,
    structure=_STR,
    hold=_F64,
    placement=_STR,
    fault_gain=_F64,
    correction=_STR,
    threshold=_F64,
    probe_action=_STR,
    probe_k=_INT,
    probe_side=_STR,
    probe_directions=_STR,
    probe_start_step=_INT,
    seed=_INT,
    seed_role=_STR,
    steps_planned=_INT,
    steps_done=_INT,
    collapsed=_BOOL,
    collapse_step=_INT,
    censored=_BOOL,
    collapsed_paper=_BOOL,
    collapse_step_paper=_INT,
    fire_step=_INT,
    min_loss=_F64,
    final_loss=_F64,
    final_val_loss=_F64,
    peak_sigma_q=_F64,
    final_sigma_q=_F64,
    peak_logit=_F64,
    tokens=_INT,
    epochs=_F64,
    wall_s=_F64,
    device=_STR,
    config_hash=_STR,
    data_hash=_STR,
    code_version=_STR,
)
"""One row a run, in ``analysis/runs.parquet`` and in the database; losses are the EMA 0.95 of the training loss.

Columns from ``tokenizer`` to ``probe_start_step`` are the run's settings, to select by. ``beta1``: of AdamW, the momentum of
SGD. ``accumulation``: micro-batches a step. ``tile``, ``tiles``: keys a tile and tiles a row of a full context, null for
torch's own attention. ``quantities``: those of the recurrence that are rounded (``all``, ``none``, or names joined by +),
``bits`` the fewest explicit mantissa bits among them, ``rounding`` their modes; ``repair``: source-local repairs;
``attention_gain``: the largest amplification of the recurrence's error. ``fault``: kinds of the faults outside attention;
``hold``: steps for which an injected error keeps its signs (infinite: for the whole run). ``correction``: kinds of what acts
against a collapse (interventions that act, ``repair``, ``qk_norm``, ``soft_cap``, ``sigma_reparam``), ``threshold`` that of a
live trigger.
"""
