import math

import pytest

from qkpipe.report.formats import count, factor, number, signed, spans


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (math.nan, "–"),
        (math.inf, "∞"),
        (-math.inf, "−∞"),
        (0.0, "0"),
        (2.3456, "2.35"),
        (-0.04567, "−0.0457"),
        (12.34, "12.3"),
        (5865.4, "5865"),
        (123456.7, "123457"),
        (1.23e9, "1.23e+09"),
        (1.23e-7, "1.23e−07"),
    ],
)
def test_number(value, text):
    assert number(value) == text


def test_signed_factor_and_count():
    assert [signed(1.5), signed(-1.5), signed(0.0), signed(None)] == ["+1.50", "−1.50", "0", "–"]
    assert [factor(0.0), factor(math.log(5)), factor(None), factor(math.nan)] == ["×1.00", "×5.00", "–", "–"]
    assert [count(793856), count(12), count(None)] == ["793\u202f856", "12", "–"]


@pytest.mark.parametrize(
    ("seeds", "text"),
    [
        ("", "–"),
        ("7", "7"),
        ("20, 21", "20, 21"),
        ("22,20,21", "20–22"),
        ("0,1,2,5,100,101,102,103", "0–2, 5, 100–103"),
    ],
)
def test_neighbouring_seeds_are_a_span(seeds, text):
    assert spans(seeds) == text
