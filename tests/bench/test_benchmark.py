"""The benchmark runs, keeps to its schema, and shows no speed of what is wrong."""

from dataclasses import replace

import pyarrow.parquet as pq
import pytest

from qkpipe.bench import benchmark, measure, operators, training
from qkpipe.config.load import DEFAULT_CONFIG, load_study
from qkpipe.paths import StudyPaths


@pytest.fixture
def run():
    return load_study(DEFAULT_CONFIG, "micro").resolve("fp32", 0)


def test_quick_benchmark(tmp_path, run):
    paths = StudyPaths("micro", tmp_path)
    rows = benchmark.build(run, paths, quick=True)
    table = pq.read_table(paths.benchmark)
    assert table.schema.equals(benchmark.SCHEMA, check_metadata=True)
    assert table.num_rows == len(rows)
    assert all(table["gate"].to_pylist())
    assert min(table["ratio"].to_pylist()) > 0
    times = zip(*(table[name].to_pylist() for name in ("p20_ms", "p50_ms", "p80_ms")), strict=True)
    assert all(list(row) == sorted(row) for row in times)
    settings = set(table["setting"].to_pylist())
    assert {f"guard dormant, {name}" for name in training.GUARDS} <= settings
    assert paths.figure("benchmark", "png").stat().st_size > 1000


def test_a_wrong_result_is_not_timed(tmp_path, run, monkeypatch):
    [*_, case] = operators.cases(quick=True)
    monkeypatch.setattr(operators, "cases", lambda quick: [replace(case, check=lambda: False)])
    times = {"ours": (1.0, 1.0, 1.0), "plain": (2.0, 2.0, 2.0)}
    monkeypatch.setattr(training, "compare", lambda *_, **__: (times, {"none": times["plain"]}))
    wrong, step = benchmark.build(run, StudyPaths("micro", tmp_path), quick=True)
    assert not wrong["gate"] and "p20_ms" not in wrong and "ratio" not in wrong
    assert step["ratio"] == 0.5


def test_functions_take_turns():
    calls = []
    measure.interleaved({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, 0.0)
    assert calls == ["a", "b"] * 4
