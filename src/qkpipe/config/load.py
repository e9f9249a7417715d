"""Reads a study's YAML, resolves arms into run configs, and turns every mistake into one line."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from qkpipe.config.models import (
    PAPER_TAU,
    ArmConfig,
    PortabilityConfig,
    RunConfig,
    ScaleConfig,
    StudyConfig,
    TargetConfig,
    run_id,
)
from qkpipe.errors import BadInput

DEFAULT_CONFIG = Path("workflow/config")


@dataclass(frozen=True)
class RunKey:
    """A requested run."""

    arm: str
    seed: int


class Study:
    """A study: its config, its arms, and the runs they resolve to.

    ``folder`` holds ``study.yaml`` and ``arms.yaml``; ``scale`` overrides the default scale.
    """

    def __init__(self, folder: Path = DEFAULT_CONFIG, scale: str | None = None) -> None:
        self.folder = Path(folder)
        self.config = _validated(StudyConfig, self.folder / "study.yaml", _read(self.folder / "study.yaml"))
        self.arms: dict[str, ArmConfig] = {}
        arms_file = self.folder / "arms.yaml"
        for name, body in _read(arms_file).items():
            self.arms[str(name)] = _validated(ArmConfig, arms_file, body or {}, prefix=str(name))
        self.scale = _known(
            scale or self.config.scale, self.config.scales, self.folder / "study.yaml", "scale"
        )
        self._hashes: dict[str, str] = {}
        self._check_names()

    @property
    def scale_config(self) -> ScaleConfig:
        return self.config.scales[self.scale]

    @cached_property
    def defined(self) -> list[str]:
        """Arms that can be run at some scale, in file order."""
        return [name for name, arm in self.arms.items() if not arm.abstract and arm.same_as is None]

    @cached_property
    def runnable(self) -> list[str]:
        """Arms that can be run at this scale, in file order."""
        return [name for name in self.defined if name not in self.excluded]

    @cached_property
    def excluded(self) -> dict[str, str]:
        """Arms that this scale cannot have, and why."""
        return {
            arm: why
            for pattern, why in self.scale_config.excludes.items()
            for arm in _matching([pattern], self.defined)
        }

    @cached_property
    def not_applicable(self) -> dict[str, str]:
        """Cells of a factorial that are named and not run, and the arm that each would equal in every bit."""
        return {name: arm.same_as for name, arm in self.arms.items() if arm.same_as is not None}

    def resolve(self, arm: str, seed: int) -> RunConfig:
        """The full config of one run; every mistake is one :class:`BadInput` line, before any work."""
        arms_file = self.folder / "arms.yaml"
        if arm in self.excluded:
            raise BadInput(
                f"{self.folder / 'study.yaml'}: scales.{self.scale}.excludes: {arm}: {self.excluded[arm]}"
            )
        _known(arm, [*self.runnable, *self.not_applicable], arms_file, "arm")
        scale = self.scale_config
        merged: dict[str, Any] = {
            key: getattr(scale, key).model_dump(exclude_unset=True)
            for key in ("model", "attention", "optimizer", "train")
        }
        for ancestor in self._lineage(arm):
            _merge(
                merged, ancestor.model_dump(exclude_unset=True, exclude={"extends", "abstract", "same_as"})
            )
        own = self.arms[arm]
        corpus_name = merged.get("corpus") or scale.corpus
        tokenizer_name = merged.get("tokenizer") or scale.tokenizer
        merged["interventions"] = [self._calibrated(item) for item in merged.get("interventions") or ()]
        merged |= {
            "scale": self.scale,
            "arm": arm,
            "seed": seed,
            "description": own.description,
            "group": own.group,
            "twin": own.twin,
            "corpus_name": corpus_name,
            "corpus": self.config.corpora[corpus_name].model_dump(),
            "tokenizer_name": tokenizer_name,
            "tokenizer": self.config.tokenizers[tokenizer_name].model_dump(),
            "parallel": scale.parallel.model_dump(),
        }
        run = _validated(RunConfig, arms_file, {k: v for k, v in merged.items() if v is not None}, prefix=arm)
        for mechanism in run.mechanisms:
            try:
                mechanism.check(run)
            except BadInput as error:
                raise BadInput(f"{arms_file}: {arm}.{error}") from None
        return run

    def dataset(self, name: str | None) -> tuple[str, str]:
        """Corpus and tokenizer of ``<corpus>-<tokenizer>``, by default the scale's; :class:`BadInput` if unknown."""
        pairs = {f"{c}-{t}": (c, t) for c in self.config.corpora for t in self.config.tokenizers}
        own = f"{self.scale_config.corpus}-{self.scale_config.tokenizer}"
        return pairs[_known(name or own, pairs, self.folder / "study.yaml", "dataset")]

    def config_hash(self, arm: str) -> str:
        """The config hash of an arm's runs, which share it; resolved once."""
        if arm not in self._hashes:
            self._hashes[arm] = self.resolve(arm, 0).config_hash
        return self._hashes[arm]

    def run_id(self, key: RunKey) -> str:
        """The ``run_id`` of a run, without resolving it."""
        return run_id(self.scale, key.arm, key.seed, self.config_hash(key.arm))

    def role(self, arm: str, seed: int) -> str:
        """Declared role of a seed where that role covers the arm, else ``extra``."""
        for name, role in self.config.roles.items():
            if seed in role.seeds and (role.arms is None or arm in role.arms):
                return name
        return "extra"

    def requested(self, target: str, seeds: Iterable[int] | None = None) -> list[RunKey]:
        """Runs of a target, arm by arm; ``seeds`` replaces the declared seeds, those of its headline arms included."""
        known = _known(target, self.config.targets, self.folder / "study.yaml", "targets")
        return self._requested(self.config.targets[known], seeds)

    @property
    def headline(self) -> set[str]:
        """Arms that some target runs on every seed of its role: those the study leads with; empty where none is named."""
        return {
            arm
            for target in self.config.targets.values()
            for arm in _matching(target.headline, self.runnable)
        }

    @property
    def portability(self) -> PortabilityConfig:
        """The section of that name; :class:`BadInput` where there is none."""
        if self.config.portability is None:
            raise BadInput(
                f"{self.folder / 'study.yaml'}: portability: missing; it says which arms to compare on two devices, such as "
                "portability: { arms: [faulty], role: confirmatory, n_seeds: 3 }"
            )
        return self.config.portability

    def compared(self, seeds: Iterable[int] | None = None) -> list[RunKey]:
        """Runs that are made on a second device too; ``seeds`` as in :meth:`requested`."""
        return self._requested(self.portability, seeds)

    def _requested(self, target_config: TargetConfig, seeds: Iterable[int] | None) -> list[RunKey]:
        arms = _matching(target_config.arms, self.runnable)
        headline = set(_matching(target_config.headline, self.runnable))
        declared = self.config.roles[target_config.role].seeds
        first = declared[: target_config.n_seeds]
        given = None if seeds is None else list(seeds)
        return [
            RunKey(arm, seed)
            for arm in arms
            for seed in dict.fromkeys((declared if arm in headline else first) if given is None else given)
        ]

    @property
    def tau(self) -> float:
        """The scale's calibrated guard threshold, else the paper's."""
        calibrated = self.config.thresholds.get(self.scale)
        return calibrated.tau if calibrated else PAPER_TAU

    def _calibrated(self, mechanism: dict[str, Any]) -> dict[str, Any]:
        return (
            mechanism | {"threshold": self.tau} if mechanism.get("threshold") == "calibrated" else mechanism
        )

    def _lineage(self, arm: str) -> list[ArmConfig]:
        chain: list[ArmConfig] = []
        seen: list[str] = []
        name: str | None = arm
        while name is not None:
            if name in seen:
                raise BadInput(
                    f"{self.folder / 'arms.yaml'}: {arm}.extends: circle {' -> '.join([*seen, name])}"
                )
            seen.append(name)
            chain.append(self.arms[name])
            name = self.arms[name].extends
        return chain[::-1]

    def _check_names(self) -> None:
        study, arms = self.folder / "study.yaml", self.folder / "arms.yaml"
        for name, scale in self.config.scales.items():
            _known(scale.corpus, self.config.corpora, study, f"scales.{name}.corpus")
            _known(scale.tokenizer, self.config.tokenizers, study, f"scales.{name}.tokenizer")
            for pattern in scale.excludes:
                if not _matching([pattern], self.defined):
                    _known(pattern, self.defined, study, f"scales.{name}.excludes")
        for name, threshold in self.config.thresholds.items():
            _known(name, self.config.scales, study, "thresholds")
            _known(threshold.arm, self.defined, study, f"thresholds.{name}.arm")
        for name, arm in self.arms.items():
            if arm.extends is not None:
                _known(arm.extends, self.arms, arms, f"{name}.extends")
            if arm.corpus is not None:
                _known(arm.corpus, self.config.corpora, arms, f"{name}.corpus")
            if arm.tokenizer is not None:
                _known(arm.tokenizer, self.config.tokenizers, arms, f"{name}.tokenizer")
            if arm.twin is not None:
                _known(arm.twin, self.defined, arms, f"{name}.twin")
            if arm.same_as is not None:
                _known(arm.same_as, self.defined, arms, f"{name}.same_as")
        asked = {f"targets.{name}": target for name, target in self.config.targets.items()}
        if self.config.portability is not None:
            asked["portability"] = self.config.portability
        for name, target in asked.items():
            _known(target.role, self.config.roles, study, f"{name}.role")
            for key in ("arms", "headline"):
                for pattern in getattr(target, key):
                    if not _matching([pattern], self.defined):
                        _known(pattern, self.defined, study, f"{name}.{key}")
        for name, role in self.config.roles.items():
            for arm_name in role.arms or ():
                _known(arm_name, self.defined, study, f"roles.{name}.arms")


def load_study(folder: Path | str = DEFAULT_CONFIG, scale: str | None = None) -> Study:
    """Load and validate a study (:class:`Study`); raises :class:`BadInput`."""
    return Study(Path(folder), scale)


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise BadInput(f"{path}: no such file; a study folder holds study.yaml and arms.yaml") from None
    except UnicodeDecodeError as error:
        raise BadInput(f"{path}: not UTF-8 (byte {error.start})") from None
    try:
        data = yaml.load(text, Loader=_UniqueKeyLoader)
    except yaml.YAMLError as error:
        raise BadInput(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(data, dict):
        raise BadInput(f"{path}: must be a mapping of keys to values, got {type(data).__name__}")
    return data


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML in which a key given twice is an error instead of a silent overwrite, and reading is safe."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        given: list[Any] = []
        for key_node, _ in node.value:
            if (
                key_node.tag == "tag:yaml.org,2002:merge"
            ):  # `<<: *anchor`, whose keys are there to be overridden
                continue
            key = self.construct_object(key_node, deep=True)
            if key in given:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key!r} is given twice", key_node.start_mark
                )
            given.append(key)
        return super().construct_mapping(node, deep)


def _validated(model: type[BaseModel], path: Path, data: Any, prefix: str = "") -> Any:
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise BadInput(f"{path}: {one_line(error, model, prefix)}") from None


def one_line(error: ValidationError, model: type[BaseModel], prefix: str = "") -> str:
    """The first mistake of a pydantic error as ``key: what is wrong (got value); what is allowed``."""
    first = error.errors(include_url=False)[0]
    location = [str(part) for part in first["loc"]]
    if location[:1] in (["corpora"], ["tokenizers"]):
        del location[2:3]  # the member of the union, which is written under `kind` if at all
    key = ".".join(([prefix] if prefix else []) + location)
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        allowed = _fields_at(model, first["loc"][:-1])
        close = difflib.get_close_matches(location[-1], allowed, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        return f"{key}: unknown key; {hint}allowed: {', '.join(allowed)}"
    value = first.get("input")
    shown = "" if isinstance(value, Mapping | list) or first["type"] == "missing" else f" (got {value!r})"
    more = f"; and {error.error_count() - 1} more" if error.error_count() > 1 else ""
    return f"{key}: {message}{shown}{more}"


def _fields_at(model: Any, location: tuple[Any, ...]) -> list[str]:
    """Names of the fields of the model that a validation error's location points into."""
    from qkpipe.config.mechanisms import mechanisms

    families = {"faults": "qkpipe.faults", "interventions": "qkpipe.interventions", "probe": "qkpipe.probes"}
    if location and location[0] in families:
        known = mechanisms(families[str(location[0])])
        kind = next((part for part in location if part in known), None)
        members = [known[kind]] if kind else list(known.values())
        return sorted({name for member in members for name in member.model_fields})
    for part in location:
        if isinstance(model, type) and issubclass(model, BaseModel) and part in model.model_fields:
            model = _inner_model(model.model_fields[str(part)].annotation)
    return list(model.model_fields) if isinstance(model, type) and issubclass(model, BaseModel) else []


def _inner_model(annotation: Any) -> Any:
    """The config model inside ``list[X]``, ``dict[str, X]`` or ``X | None``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in getattr(annotation, "__args__", ()):
        inner = _inner_model(argument)
        if inner is not None:
            return inner
    return None


def _matching(patterns: Iterable[str], arms: Iterable[str]) -> list[str]:
    """Of ``arms`` those that match any pattern, in order; ``*`` stands for a name without a dot."""
    split = [pattern.split(".") for pattern in patterns]
    return [
        arm
        for arm in arms
        if any(len(p) == arm.count(".") + 1 and all(map(fnmatchcase, arm.split("."), p)) for p in split)
    ]


def _known(value: str, allowed: Iterable[str], path: Path, key: str) -> str:
    names = list(allowed)
    if value not in names:
        close = difflib.get_close_matches(value, names, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise BadInput(f"{path}: {key}: unknown name {value!r}; {hint}allowed: {', '.join(names)}")
    return value


def _merge(base: dict[str, Any], over: Mapping[str, Any]) -> None:
    """Merge ``over`` into ``base``: mappings by key, everything else replaces. A changed ``kind`` starts afresh."""
    for key, value in over.items():
        current = base.get(key)
        if isinstance(value, Mapping) and isinstance(current, dict):
            _merge(current, value)
        else:
            base[key] = value
