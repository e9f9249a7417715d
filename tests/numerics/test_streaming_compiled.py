"""The compiled path has the bits of the plain reference: outputs, gradients and statistics."""

import subprocess
import sys

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qkpipe.numerics import streaming
from qkpipe.numerics.precision import MODES, QUANTITIES, Rounding, StreamPrecision, StreamRepair

pytest.importorskip("numba")
from qkpipe.numerics import streaming_compiled

compiled = streaming.Path(streaming_compiled.forward, streaming_compiled.backward)

gains = st.sampled_from([1.0, 1.0, 0.0, 0.7, 32.0, 1e38])
roundings = st.builds(Rounding, st.sampled_from([1, 2, 4, 7, 10, 22, 23, 23]), st.sampled_from(MODES), gains)
precisions = st.one_of(
    st.builds(
        StreamPrecision.uniform, st.integers(1, 23), st.sampled_from([3, 7, 23]), st.sampled_from(MODES)
    ),
    st.builds(StreamPrecision.carries, st.integers(1, 10), st.sampled_from([7, 23]), st.sampled_from(MODES)),
    st.builds(StreamPrecision, **dict.fromkeys(QUANTITIES, roundings)),
)
repairs = st.builds(
    StreamRepair,
    delta=st.sampled_from(["o", "o_fp32", "p"]),
    lse=st.sampled_from(["rounded", "exact"]),
    compensated=st.booleans(),
    tied_max_beta=st.sampled_from([None, 2, 3.7, 8.0]),
    delta_gain=st.sampled_from([1.0, 0.3, 32.0]),
    out_gain=st.sampled_from([1.0, 0.7, 10.0]),
)
odd_values = st.sampled_from([torch.nan, torch.inf, -torch.inf, 3e38, 1e-40, -0.0])


@st.composite
def calls(draw):
    """(q, k, v, dO, Call), sometimes with values that are not finite."""
    causal = draw(st.booleans())
    B, H_kv, group = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    Tq = draw(st.integers(1, 40))
    Tk = Tq if causal else draw(st.integers(1, 40))
    D = draw(st.sampled_from([1, 3, 8, 20]))
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    q, k, v, do = (
        torch.randn(B, H, T, D, generator=g)
        for H, T in ((H_kv * group, Tq), (H_kv, Tk), (H_kv, Tk), (H_kv * group, Tq))
    )
    q *= draw(st.sampled_from([1e-3, 1.0, 10.0, 100.0]))
    if draw(st.booleans()):
        k, v = (x.mul(2).round() for x in (k, v))  # ties
    if draw(st.integers(0, 3)) == 0:
        for x in (q, k, v, do):
            if draw(st.booleans()):
                x.view(-1)[draw(st.integers(0, x.numel() - 1))] = draw(odd_values)
    call = streaming.Call(
        causal=causal,
        scale=draw(st.sampled_from([D**-0.5, 1.7, -0.4])),
        tile=draw(st.sampled_from([1, 3, 8, 16, 17, 100])),
        precision=draw(precisions),
        repair=draw(repairs),
        seed=draw(st.integers(0, 2**32 - 1)),
        stats=draw(st.booleans()),
    )
    if draw(st.booleans()):
        call = call._replace(block=call.tile * draw(st.integers(1, 3)))
    if draw(st.booleans()):
        call = call._replace(softcap=draw(st.sampled_from([50.0, 0.3, 7.7])))
    return q, k, v, do, call


def run(path, q, k, v, do, call):
    stats = streaming._empty_stats(q) if call.stats else None
    out, o_delta, lse = path.forward(q, k, v, call, stats)
    dq, dk, dv = path.backward(q, k, v, o_delta, lse, do, call, stats)
    found = {"out": out, "o_delta": o_delta, "lse": lse, "dq": dq, "dk": dk, "dv": dv}
    return found | (vars(stats) if call.stats else {})


def differing(one, other):
    """Names whose bits differ (any NaN equals any NaN)."""

    def same(a, b):
        if a.dtype == torch.int64:
            return torch.equal(a, b)
        return ((a.view(torch.int32) == b.view(torch.int32)) | (a.isnan() & b.isnan())).all()

    return [name for name in one if not same(one[name], other[name])]


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(calls())
def test_bits_of_the_reference(case):
    assert differing(run(streaming.REFERENCE, *case), run(compiled, *case)) == []


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(max_examples=3000, deadline=None, suppress_health_check=list(HealthCheck))
@given(calls())
def test_bits_of_the_reference_at_length(case):
    assert differing(run(streaming.REFERENCE, *case), run(compiled, *case)) == []


@pytest.mark.parametrize("size", [1.0, 3.3e38])
@pytest.mark.parametrize(
    "rounding", [Rounding(1, "even", 1e38), Rounding(2, "even"), Rounding(7, "stochastic", 32.0)]
)
def test_bits_where_an_input_overflows_in_its_rounding(rounding, size):
    """An infinite row of q and dO reaches the keys it sees, and none beyond them."""
    g = torch.Generator().manual_seed(0)
    q, k, v, do = (torch.randn(1, 1, 5, 3, generator=g) for _ in range(4))
    for x in (q, do):
        x[0, 0, 1] = size
    call = streaming.Call(True, 1.0, 2, StreamPrecision(io=rounding), StreamRepair(), seed=1, stats=True)
    found = run(compiled, q, k, v, do, call)
    assert differing(run(streaming.REFERENCE, q, k, v, do, call), found) == []
    assert size == 1.0 or not found["dk"].isfinite().all()


GAINED = StreamPrecision(**dict.fromkeys(QUANTITIES, Rounding(7, "even", 32.0)))


@pytest.mark.parametrize(("block", "softcap"), [(None, None), (32, None), (None, 0.5)])
@pytest.mark.parametrize("precision", [*(StreamPrecision.uniform(2, mode=mode) for mode in MODES), GAINED])
def test_bits_at_the_micro_shape(precision, block, softcap):
    g = torch.Generator().manual_seed(0)
    q, k, v, do = (torch.randn(8, 2, 128, 32, generator=g) for _ in range(4))
    call = streaming.Call(True, 32**-0.5, 16, precision, StreamRepair(), seed=1, stats=True)
    call = call._replace(block=block, softcap=softcap)
    assert differing(run(streaming.REFERENCE, q, k, v, do, call), run(compiled, q, k, v, do, call)) == []


def test_public_call_takes_the_compiled_path_on_a_cpu(monkeypatch):
    called = []
    monkeypatch.setattr(
        streaming_compiled, "forward", lambda q, *rest: called.append(1) or compiled.forward(q, *rest)
    )
    streaming.streaming_attention(*torch.randn(3, 1, 1, 5, 4))
    assert called == [1]


@pytest.mark.slow
def test_cold_caches_under_concurrent_processes(tmp_path):
    """Two processes that compile at once into one empty cache both succeed, with equal results; then it is warm."""
    code = (
        "import torch; torch.manual_seed(0); torch.set_num_threads(1)\n"
        "from qkpipe.numerics import streaming_attention, streaming_compiled as c\n"
        "print(streaming_attention(*torch.randn(3, 1, 1, 5, 4)).double().sum().item(),"
        " sum(c._forward_kernel.stats.cache_hits.values()))"
    )

    def start():
        env = {"NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": ":".join(sys.path)}
        return subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True)

    cold = [start(), start()]
    results = [process.communicate()[0].split() for process in cold]
    assert [process.returncode for process in cold] == [0, 0]
    (warm, hits), *_ = [start().communicate()[0].split()]
    assert {value for value, _ in results} == {warm}
    assert hits == "1"
