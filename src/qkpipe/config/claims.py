"""``claims.yaml``: what the study claims and how each claim is tested, declared before a confirmatory run
exists.

It also holds the written criterion by which a regime is chosen on tuning seeds, which is declared in advance
for the same reason.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from qkpipe.config.base import Frozen
from qkpipe.config.load import DEFAULT_CONFIG, Study, _known, _read, _validated
from qkpipe.config.models import Name
from qkpipe.errors import BadInput

Outcome = Literal["collapse", "log_sigma", "log_max_logit", "final_val_loss"]
"""``collapse``: the primary rule's verdict. ``log_sigma``: log of the largest singular value of W_Q over
layers. ``log_max_logit``: log of the largest applied logit over layers and heads. ``final_val_loss``: in nat.
"""

Statistic = Literal["mcnemar", "rescue", "sign_flip", "equivalence"]


class Part(Frozen):
    """One paired contrast of a claim; pairs share the seed, and ``treated`` minus ``control`` is what is
    tested.

    ==============  ==============================================================  ========================
    ``statistic``   what it says                                                    ``alternative``; margin
    ==============  ==============================================================  ========================
    ``mcnemar``     treated collapses more (less) often than control                greater, less; none
    ``rescue``      of the seeds in which an arm of the pair collapses, the share   greater, less; a share
                    in which treated does not is above (below) the margin
    ``sign_flip``   treated's outcome is larger (smaller)                           greater, less; none
    ``equivalence`` the mean difference is inside +-margin                          equivalent; a difference
    ==============  ==============================================================  ========================

    ``at`` is the step at which sigma or the logit is taken: the last telemetry row up to it in which all
    values are finite.
    """

    treated: Name
    control: Name
    outcome: Outcome
    statistic: Statistic
    alternative: Literal["greater", "less", "equivalent"]
    margin: Annotated[float, Field(gt=0)] | None = None
    at: Annotated[int, Field(ge=0)] | Literal["final"] = "final"

    @model_validator(mode="after")
    def _consistent(self) -> Part:
        if self.treated == self.control:
            raise ValueError(f"treated and control are both {self.treated!r}; they must differ")
        counts = self.statistic in ("mcnemar", "rescue")
        if counts != (self.outcome == "collapse"):
            allowed = "mcnemar, rescue" if self.outcome == "collapse" else "sign_flip, equivalence"
            raise ValueError(
                f"statistic={self.statistic} does not fit outcome={self.outcome}; allowed: {allowed}"
            )
        if (self.statistic == "equivalence") != (self.alternative == "equivalent"):
            allowed = "equivalent" if self.statistic == "equivalence" else "greater, less"
            raise ValueError(
                f"alternative={self.alternative} does not fit statistic={self.statistic}; allowed: {allowed}"
            )
        if (self.statistic in ("rescue", "equivalence")) != (self.margin is not None):
            wanted = "no margin" if self.margin is not None else "a margin"
            raise ValueError(f"statistic={self.statistic} takes {wanted} (got {self.margin})")
        if self.statistic == "rescue" and not self.margin < 1:
            raise ValueError(f"the margin of a rescue is a share below 1 (got {self.margin})")
        if self.at != "final" and self.outcome not in ("log_sigma", "log_max_logit"):
            raise ValueError(f"at={self.at} needs outcome log_sigma or log_max_logit (got {self.outcome})")
        return self

    @property
    def contrast(self) -> str:
        return f"{self.treated} vs {self.control}"

    @property
    def censored_count_as_collapsed(self) -> tuple[bool, bool]:
        """Whether a censored run of (treated, control) counts as a collapse: whichever speaks against the
        part.
        """
        treated_better = (self.statistic, self.alternative) in (("mcnemar", "less"), ("rescue", "greater"))
        return treated_better, not treated_better


class Claim(Frozen):
    """A claim holds if every part holds. ``rank`` is its place in the fixed order; without one it is tested
    under Holm.
    """

    rank: Annotated[int, Field(ge=1)] | None = None
    statement: str
    source: str
    parts: Annotated[tuple[Part, ...], Field(min_length=1)]


class Separation(Frozen):
    """A pair whose treated arm must end above its twin in log sigma or in log max logit."""

    treated: Name
    control: Name


class RegimeCriterion(Frozen):
    """When a regime (learning rate, dose, tile, horizon) is fit for the study; judged on tuning seeds,
    without a p-value.

    In every tuning seed: the ``collapse`` arms collapse by each of ``rules`` before ``collapse_before`` of the
    horizon; the ``healthy`` arms neither collapse nor reach ``max_logit``; in one of log sigma and log max
    logit, every ``separate`` pair differs by more than ``separation`` at the end.
    A regime passes on no fewer than ``n_seeds`` seeds: a candidate that has failed on its first is run no further.
    """

    collapse: Annotated[tuple[Name, ...], Field(min_length=1)]
    healthy: Annotated[tuple[Name, ...], Field(min_length=1)]
    separate: tuple[Separation, ...]
    rules: Annotated[tuple[Literal["primary", "paper"], ...], Field(min_length=1)] = ("primary", "paper")
    collapse_before: Annotated[float, Field(gt=0, le=1)]
    max_logit: Annotated[float, Field(gt=0)]
    separation: Annotated[float, Field(ge=0)]
    n_seeds: Annotated[int, Field(ge=1)] = 1

    @property
    def arms(self) -> list[str]:
        pairs = (arm for pair in self.separate for arm in (pair.treated, pair.control))
        return list(dict.fromkeys((*self.collapse, *self.healthy, *pairs)))


class ClaimsConfig(Frozen):
    """The whole file; ``alpha`` is the level of the fixed-order family and of the Holm family, each on its
    own.
    """

    alpha: Annotated[float, Field(gt=0, lt=0.5)] = 0.05
    claims: dict[Name, Claim]
    regime: RegimeCriterion

    @field_validator("claims")
    @classmethod
    def _ranks(cls, claims: dict[str, Claim]) -> dict[str, Claim]:
        ranks = sorted(claim.rank for claim in claims.values() if claim.rank is not None)
        if ranks != list(range(1, len(ranks) + 1)):
            raise ValueError(f"ranks must be 1, 2, 3, ... without gap or repeat, got {ranks}")
        return claims

    @property
    def arms(self) -> list[str]:
        """Arms the claims need, in order of first use."""
        parts = (part for claim in self.claims.values() for part in claim.parts)
        return list(dict.fromkeys(arm for part in parts for arm in (part.treated, part.control)))


def load_claims(folder: Path | str = DEFAULT_CONFIG) -> ClaimsConfig:
    """Read and validate ``claims.yaml`` in ``folder``; raises :class:`BadInput`."""
    path = Path(folder) / "claims.yaml"
    return _validated(ClaimsConfig, path, _read(path))


def check_arms(config: ClaimsConfig, study: Study) -> None:
    """Raise :class:`BadInput` unless the study has every arm of the claims and the regime criterion.

    A logit is refused as an outcome where QK normalisation acts, because it bounds the logit by construction.
    """
    path = study.folder / "claims.yaml"
    for claim_id, claim in config.claims.items():
        for i, part in enumerate(claim.parts):
            for side in ("treated", "control"):
                arm = _known(getattr(part, side), study.defined, path, f"claims.{claim_id}.parts.{i}.{side}")
                if part.outcome == "log_max_logit" and _normalises_qk(study, arm):
                    raise BadInput(
                        f"{path}: claims.{claim_id}.parts.{i}.outcome: log_max_logit with arm {arm!r}, whose QK "
                        "normalisation bounds it by construction; allowed: collapse, log_sigma, final_val_loss"
                    )
    for arm in config.regime.arms:
        _known(arm, study.defined, path, "regime")


def _normalises_qk(study: Study, arm: str) -> bool:
    run = study.resolve(arm, seed=0)
    acting_guard = any(act.kind == "guard" and act.mode == "act" for act in run.interventions)
    return run.model.qk_norm != "none" or acting_guard
