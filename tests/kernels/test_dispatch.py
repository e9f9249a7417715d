"""The GPU path of `qkpipe.numerics.streaming_attention`, its kernels run by the interpreter."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip(
    "triton", reason="triton is not installed: make kernels-test runs these under 3.6 and 3.9"
)

from qkpipe.numerics import dispatch, streaming
from qkpipe.numerics.precision import StreamPrecision, StreamRepair


@pytest.mark.parametrize(
    "D, tile, repair, by_kernels",
    [
        (16, 16, StreamRepair(), True),
        (16, 1000, StreamRepair(delta="p"), True),
        (16, 8, StreamRepair(), True),
        (12, 16, StreamRepair(), False),
        (16, 16, StreamRepair(tied_max_beta=2.0), True),
    ],
)
def test_same_contract_as_the_reference(D, tile, repair, by_kernels):
    generator = torch.Generator().manual_seed(0)
    q, do = (torch.randint(-2, 3, (1, 2, 21, D), generator=generator).float() for _ in range(2))
    k, v = (torch.randint(-2, 3, (1, 1, 21, D), generator=generator).float() for _ in range(2))
    call = streaming.Call(True, 0.25, tile, StreamPrecision.uniform(2), repair, 3, True)
    assert dispatch.takes(q, call) == by_kernels
    ours, plain = streaming._empty_stats(q), streaming._empty_stats(q)
    out, o_delta, lse = dispatch.forward(q, k, v, call, ours)
    expected = streaming.forward_reference(q, k, v, call, plain)
    gradients = dispatch.backward(q, k, v, o_delta, lse, do, call, ours)
    expected_gradients = streaming.backward_reference(q, k, v, *expected[1:], do, call, plain)
    for a, b in zip((out, lse, *gradients), (expected[0], expected[2], *expected_gradients)):
        assert torch.equal(a, b)
    for name in ("max_logit", "entropy", "residual_r", "residual_mean"):
        torch.testing.assert_close(getattr(ours, name), getattr(plain, name), rtol=1e-6, atol=1e-6)
    assert torch.equal(ours.tied_fallbacks, plain.tied_fallbacks)


@pytest.mark.parametrize("beyond", ["gain", "block", "softcap"])
def test_what_the_kernels_lack_is_left_to_the_reference(beyond):
    precision = StreamPrecision.uniform(2)
    call = streaming.Call(True, 0.25, 16, precision, StreamRepair(), 0, True)
    q = torch.zeros(1, 1, 16, 16)
    assert dispatch.takes(q, call)
    changes = {
        "gain": {"precision": replace(precision, acc=replace(precision.acc, gain=4.0))},
        "block": {"block": 16},
        "softcap": {"softcap": 50.0},
    }
    assert not dispatch.takes(q, call._replace(**changes[beyond]))
