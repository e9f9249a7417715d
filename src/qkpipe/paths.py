"""Every path of a study, in one place (relative to the folder the study runs in, usually the repository root)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

RUN_TABLES = ("steps", "layers", "heads", "routes", "probe", "events", "timing")
"""Telemetry tables of one run; ``timing`` holds everything that a clock decides."""


@dataclass(frozen=True)
class RunPaths:
    """Files of one run (an arm with a seed)."""

    folder: Path

    @property
    def record(self) -> Path:
        """``run.json``: resolved config, hashes, environment, how the run ended. Written last: its presence means done."""
        return self.folder / "run.json"

    def table(self, name: str) -> Path:
        return self.folder / f"{name}.parquet"

    @property
    def outputs(self) -> list[Path]:
        return [self.record, *(self.table(name) for name in RUN_TABLES)]


@dataclass(frozen=True)
class ScratchPaths:
    """Unfinished work of one run: never a declared output, so a retry resumes from it."""

    folder: Path

    @property
    def lock(self) -> Path:
        return self.folder / "lock"

    @property
    def identity(self) -> Path:
        """Whose work it is: scale, arm and seed, which the folder's name does not tell."""
        return self.folder / "identity.json"

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint.pt"

    @property
    def parts(self) -> Path:
        return self.folder / "parts"


@dataclass(frozen=True)
class StudyPaths:
    """Files of one scale of a study."""

    scale: str
    root: Path = Path(".")

    @property
    def results(self) -> Path:
        return self.root / "results" / self.scale

    def data(self, corpus: str, tokenizer: str) -> Path:
        return self.results / "data" / f"{corpus}-{tokenizer}"

    @property
    def trained(self) -> Path:
        """Where runs are, and what is remembered of them."""
        return self.results

    @property
    def runs(self) -> Path:
        return self.trained / "runs"

    def run(self, arm: str, seed: int) -> RunPaths:
        return RunPaths(self.runs / arm / f"seed={seed}")

    @property
    def aside(self) -> Path:
        return self.trained / "superseded"

    def superseded(self, arm: str, seed: int, config_hash: str) -> Path:
        """Where a finished run of another config goes when the arm changes."""
        return self.aside / arm / f"seed={seed}-{config_hash}"

    def scratch(self, run_id: str) -> ScratchPaths:
        return ScratchPaths(self.root / "scratch" / run_id)

    def analysis(self, name: str) -> Path:
        return self.results / "analysis" / f"{name}.parquet"

    @property
    def measured(self) -> Path:
        """What aggregation remembers of every run; no output, and may be deleted."""
        return self.trained / "measured.parquet"

    def table(self, name: str, suffix: str = "parquet") -> Path:
        return self.results / "tables" / f"{name}.{suffix}"

    def figure(self, name: str, suffix: str = "svg") -> Path:
        return self.results / "figures" / f"{name}.{suffix}"

    @property
    def benchmark(self) -> Path:
        return self.results / "benchmark" / "operators.parquet"

    @property
    def report(self) -> Path:
        return self.results / "report" / "index.html"

    @property
    def database(self) -> Path:
        return self.results / "study.duckdb"

    @property
    def effective_config(self) -> Path:
        return self.results / "config.json"

    def second(self, device: str) -> SecondPaths:
        return SecondPaths(self.scale, self.root, device)


@dataclass(frozen=True)
class SecondPaths(StudyPaths):
    """The same runs, made once more on a second ``device``: other folders for what training writes, the same data."""

    device: str = "second"

    @property
    def trained(self) -> Path:
        return self.results / "portability" / self.device

    def scratch(self, run_id: str) -> ScratchPaths:
        """Both runs have one ``run_id``; their checkpoints and locks must not meet."""
        return ScratchPaths(self.root / "scratch" / "portability" / self.device / run_id)
