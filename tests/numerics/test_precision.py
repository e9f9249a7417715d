import json
import subprocess
import sys

import pytest

from qkpipe.errors import BadInput
from qkpipe.numerics.precision import (
    MODES,
    QUANTITIES,
    ROUNDING_POINTS,
    Rounding,
    StreamPrecision,
    StreamRepair,
)


def test_importing_it_does_not_import_torch():
    code = "import sys, qkpipe.numerics.precision; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_exact_is_fp32_everywhere():
    assert all(getattr(StreamPrecision.exact(), q) == Rounding(23, "even") for q in QUANTITIES)


def test_uniform_sets_every_quantity_but_io():
    precision = StreamPrecision.uniform(2, io=10, mode="toward_zero")
    assert {getattr(precision, q) for q in QUANTITIES if q != "io"} == {Rounding(2, "toward_zero")}
    assert precision.io == Rounding(10, "even")
    assert StreamPrecision.uniform(2).io == Rounding(7)


def test_carries_sets_acc_l_m_only():
    precision = StreamPrecision.carries(3, io=23)
    low = {q for q in QUANTITIES if getattr(precision, q) != Rounding()}
    assert low == {"acc", "l", "m"}


def test_bare_ints_mean_bits_to_even():
    assert StreamPrecision(acc=5).acc == Rounding(5, "even")


@pytest.mark.parametrize("mode", MODES)
def test_round_trip_through_json(mode):
    precision = StreamPrecision(acc=Rounding(2, mode), l=3, io=7)
    assert StreamPrecision.from_dict(json.loads(json.dumps(precision.to_dict()))) == precision
    repair = StreamRepair(delta="p", tied_max_beta=4.0, out_gain=32)
    assert StreamRepair.from_dict(json.loads(json.dumps(repair.to_dict()))) == repair


def test_every_quantity_has_a_rounding_point():
    assert set(ROUNDING_POINTS.values()) == set(QUANTITIES)


@pytest.mark.parametrize("bits", [0, 24, -1, 2.0, "7", True, None])
def test_bits_out_of_range_name_the_quantity(bits):
    with pytest.raises(BadInput, match=r"acc: mantissa bits = .*1 to 23"):
        StreamPrecision(acc=bits)
    with pytest.raises(BadInput, match="1 to 23"):
        StreamPrecision.uniform(bits)


def test_bad_modes_and_unknown_keys():
    with pytest.raises(BadInput, match=r"rounding mode = 'up'; allowed: even, stochastic, toward_zero"):
        Rounding(2, "up")
    with pytest.raises(BadInput, match="unknown key 'accu'"):
        StreamPrecision.from_dict({"accu": 2})
    with pytest.raises(BadInput, match="pv: unknown key 'bit'"):
        StreamPrecision.from_dict({"pv": {"bit": 2}})
    with pytest.raises(BadInput, match="unknown key 'dleta'"):
        StreamRepair.from_dict({"dleta": "p"})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("delta", "q"),
        ("lse", "fp32"),
        ("compensated", 1),
        ("tied_max_beta", 1.5),
        ("tied_max_beta", 9),
        ("tied_max_beta", float("nan")),
        ("delta_gain", -1.0),
        ("out_gain", float("inf")),
    ],
)
def test_bad_repairs_name_the_key(key, value):
    with pytest.raises(BadInput, match=f"repair: {key} = .*allowed"):
        StreamRepair(**{key: value})
