"""The benchmark runs, keeps to its schema, and shows no speed of what is wrong."""

from dataclasses import replace

import pyarrow.parquet as pq
import pytest
import torch

from qkpipe.bench import benchmark, measure, operators, torchao_peer, training
from qkpipe.config.load import DEFAULT_CONFIG, load_study
from qkpipe.numerics import quantize_mx
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
    [ax] = benchmark.figure(paths).axes
    names = {label.get_text() for label in ax.get_yticklabels()}
    assert len(names) == len(ax.patches) == len(rows), "two peers of one operator are two bars"


def test_a_wrong_result_is_not_timed(tmp_path, run, monkeypatch):
    [*_, case] = operators.cases(quick=True)
    monkeypatch.setattr(operators, "cases", lambda quick: [replace(case, check=lambda: False)])
    times = {"ours": (1.0, 1.0, 1.0), "plain": (2.0, 2.0, 2.0)}
    monkeypatch.setattr(training, "compare", lambda *_, **__: (times, {"none": times["plain"]}))
    wrong, step = benchmark.build(run, StudyPaths("micro", tmp_path), quick=True)
    assert not wrong["gate"] and "p20_ms" not in wrong and "ratio" not in wrong
    assert step["ratio"] == 0.5


@pytest.mark.parametrize("fmt", torchao_peer.quantizers())
def test_torchao_has_the_same_bits(fmt):
    """Over twenty-four binades; at the ends of fp32's range torchao flushes what the specification keeps."""
    x = torch.randn(64, 256) * 2.0 ** torch.randint(-12, 12, (64, 8)).repeat_interleave(32, dim=1)
    assert torch.equal(torchao_peer.quantizers()[fmt](x), quantize_mx(x, fmt))


def test_functions_take_turns():
    calls = []
    measure.interleaved({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, 0.0)
    assert calls == ["a", "b"] * 4
