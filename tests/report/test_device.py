"""The report's section on the GPU."""

import json

from bench.test_device import results
from qkpipe.bench import device
from qkpipe.report import html
from qkpipe.store import database
from report.test_html import TEMPLATE, Page


def page(paths, study, found=None):
    source = None
    if found is not None:
        source = paths.root / "found.json"
        source.write_text(json.dumps(found))
    device.build(paths, source)
    return Page(html.build(paths, study, TEMPLATE).read_text()).text


def test_says_plainly_that_no_gpu_was_measured(copied):
    assert "No GPU was measured." in page(*copied)
    quick = results(quick=True, benchmarks=[], left_out=["benchmarks: not timed with tiny sizes"])
    quick["environment"] |= {"device": "x86_64", "cuda_device": False, "cuda": None}
    text = page(*copied, quick)
    assert "No GPU was measured." in text and "not timed with tiny sizes" in text


def test_shows_speeds_where_every_check_passed(copied):
    paths, _ = copied
    text = page(*copied, results())
    assert "No GPU was measured." not in text and "NVIDIA H100" in text and "2 of 2 checks passed" in text
    assert "0.800" in text and "1 below the least" in text
    found = database.query(
        database.build(paths), "SELECT 1 / ratio AS speed FROM device_benchmark WHERE ratio > 1"
    )
    assert found["speed"].to_pylist() == [0.8]


def test_shows_no_speed_where_a_check_failed(copied):
    text = page(*copied, results(passed=False))
    assert "1 of 2 checks passed" in text and "uniform D=64 dq" in text
    assert "No speed is shown, because a check failed." in text
    assert "sdpa flash" not in text and "0.800" not in text
