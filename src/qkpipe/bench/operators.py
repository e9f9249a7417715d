"""The cases of the operator benchmark: what is timed, the peer it is timed against, and the check it must pass first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from qkpipe.bench import torchao_peer
from qkpipe.numerics import StreamPrecision, minifloat, mx, quantize_mx, round_minifloat, streaming
from qkpipe.numerics.spectra import leading_triplets


@dataclass(frozen=True)
class Case:
    """One operator at one setting. ``check`` says whether its result is right; ``flops`` and ``bytes`` are what the
    definition needs (compulsory traffic), not what the code does.
    """

    operator: str
    setting: str
    peer: str
    run: Callable[[], object]
    run_peer: Callable[[], object]
    check: Callable[[], bool]
    flops: float
    bytes: float


def cases(quick: bool) -> Iterator[Case]:
    """Every case; ``quick`` takes small sizes."""
    torch.manual_seed(0)
    yield from _formats(64 if quick else 768)
    yield from _attention(quick)
    yield _spectra(128 if quick else 768)


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(((a.view(torch.int32) == b.view(torch.int32)) | (a.isnan() & b.isnan())).all())


def _formats(rows: int) -> Iterator[Case]:
    """Against the same definition in plain PyTorch operations, and where it is installed torchao's: the bits of both are ours."""
    x = torch.randn(rows, 4 * rows)
    traffic = 2.0 * x.numel() * 4

    def case(
        operator: str, setting: str, ours: Callable, theirs: Callable, peer: str = "plain PyTorch operations"
    ) -> Case:
        return Case(operator, f"{setting}, {rows}x{4 * rows}", peer, ours, theirs,
                    lambda: _same_bits(ours(), theirs()), 0.0, traffic)  # fmt: skip

    yield case(
        "round_minifloat",
        "7 bits",
        lambda: round_minifloat(x, 7),
        lambda: minifloat._round_plain(x, 7, "even", 0, 0),
    )
    torchao = torchao_peer.quantizers()
    for fmt in mx.FORMATS:
        block = 16 if fmt == "nvfp4" else 32

        def plain(fmt=fmt, block=block):
            return mx._quantize_plain(x, fmt, 1, block, "floor", "even", 0, 0)[0]

        def ours(fmt=fmt, block=block):
            return quantize_mx(x, fmt, block=block)

        yield case("quantize_mx", fmt, ours, plain)
        if fmt in torchao:
            yield case("quantize_mx", fmt, ours, lambda fmt=fmt: torchao[fmt](x), "torchao's emulation")


def _attention(quick: bool) -> Iterator[Case]:
    """Forward and backward, statistics on, against torch's SDPA; checked bit for bit against the reference."""
    settings = {
        "uniform(2)": StreamPrecision.uniform(2),
        "carries(2)": StreamPrecision.carries(2),
        "fp32": StreamPrecision(),
        "uniform(2), stochastic": StreamPrecision.uniform(2, mode="stochastic"),
    }
    for batch, tile in ((1, 8),) if quick else ((8, 16), (4, 8)):
        for name, precision in settings.items():
            yield _attention_case(batch, tile, name, precision)


def _attention_case(batch: int, tile: int, name: str, precision: StreamPrecision) -> Case:
    H, T, D = 2, 128, 32
    q, k, v = (torch.randn(batch, H, T, D, requires_grad=True) for _ in range(3))
    do = torch.randn(batch, H, T, D)

    def ours():
        out, _ = streaming.streaming_attention(q, k, v, tile=tile, precision=precision, return_stats=True)
        return out.detach(), *torch.autograd.grad(out, (q, k, v), do)

    def sdpa():
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return torch.autograd.grad(out, (q, k, v), do)

    def check() -> bool:
        call = streaming.Call(True, D**-0.5, tile, precision, streaming.StreamRepair(), 0, False)
        plain = [x.detach() for x in (q, k, v)]
        out, o_delta, lse = streaming.REFERENCE.forward(*plain, call, None)
        expected = (out, *streaming.REFERENCE.backward(*plain, o_delta, lse, do, call, None))
        return all(_same_bits(a, b) for a, b in zip(ours(), expected, strict=True))

    pairs = batch * H * T * (T + 1) / 2  # of a query and a key it sees: 2 products forward, 5 backward
    return Case("streaming_attention", f"{name}, ({batch}, {H}, {T}, {D}), tile {tile}",
                "scaled_dot_product_attention", ours, sdpa, check, 7 * 2 * D * pairs, 8 * 4.0 * q.numel())  # fmt: skip


def _spectra(n: int) -> Case:
    """Warm: a matrix that has moved by a training step's worth since the last look."""
    k = 3
    before = torch.randn(n, n)
    W = before + 1e-4 * torch.randn(n, n)
    _, _, _, state = leading_triplets(before, k)
    truth = torch.linalg.svdvals(W.double())[:k]

    def check() -> bool:
        found = leading_triplets(W, k, state)[1]
        return bool(((found - truth).abs() <= 1e-4 * truth).all())

    return Case("leading_triplets", f"k={k}, warm, {n}x{n}", "torch.linalg.svd", lambda: leading_triplets(W, k, state),
                lambda: torch.linalg.svd(W), check, 0.0, 4.0 * W.numel())  # fmt: skip
