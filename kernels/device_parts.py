"""The parts of the device check; see `device_check`. Each returns rows of plain data."""

from __future__ import annotations

import math
import time
from functools import partial

import torch
import torch.nn.functional as F
from qkpipe_kernels.attention import attention
from qkpipe_kernels.device_gpt2 import SMALL, TINY, Trainer
from qkpipe_kernels.mx import quantize_into_gradient, quantize_mx
from qkpipe_kernels.mxfp4_gemm import weight_gradient
from torch.nn.attention import SDPBackend, sdpa_kernel

from qkpipe.numerics import mx as mx_reference
from qkpipe.numerics import streaming as reference
from qkpipe.numerics.precision import StreamPrecision, StreamRepair

HEALTHY = StreamPrecision(io=7)
CARRIES = StreamPrecision.carries(7)
UNIFORM = StreamPrecision.uniform(7)
SETTINGS = {"healthy": HEALTHY, "carries": CARRIES, "uniform": UNIFORM}
GRADIENTS = ("out", "dq", "dk", "dv")
TAU = 30.0
GAIN = 64.0  # of delta's error, in the accelerated run


# --- 1: checks -----------------------------------------------------------------------------------------------


def checks(device: torch.device, quick: bool) -> list[dict]:
    """Rows of name, passed, error, allowed; errors are largest absolute errors."""
    rows = []
    head_dims, T = ((16,), 21) if quick else ((16, 32, 64, 128), 67)
    for D in head_dims:
        for name, precision in SETTINGS.items():
            rows += _against_float64(f"{name} D={D}", precision, D, T, device)
        rows += _bit_for_bit(f"integers D={D}", D, T, device)
    rows += _normalisation(16 if quick else 64, T, device)
    rows += _quantizers(device, quick)
    return rows


def _row(name: str, error: float, allowed: float, **more) -> dict:
    return {
        "name": name,
        "passed": bool(error <= allowed),
        "error": float(error),
        "allowed": float(allowed),
        **more,
    }


def _inputs(D: int, T: int, device, integers: bool = False) -> list[torch.Tensor]:
    """q, k, v, do with two query heads a key head, exact in bfloat16."""
    generator = torch.Generator().manual_seed(D)
    shapes = ((1, 4, T, D), (1, 2, T, D), (1, 2, T, D), (1, 4, T, D))
    if integers:
        return [torch.randint(-2, 3, shape, generator=generator).float().to(device) for shape in shapes]
    return [torch.randn(shape, generator=generator).bfloat16().float().to(device) for shape in shapes]


def _kernels(q, k, v, do, **options):
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    out, statistics = attention(q, k, v, sense=True, entropy=True, residual=True, **options)
    out.backward(do)
    return (out.detach(), q.grad, k.grad, v.grad), statistics


def _float64(q, k, v, do, normalised: bool = False):
    """((out, dq, dk, dv), largest logit, entropy) of exact causal attention."""
    q, k, v = (x.double().requires_grad_() for x in (q, k, v))
    q_n, k_n = (F.rms_norm(x, x.shape[-1:]) if normalised else x for x in (q, k))
    group = q.shape[1] // k.shape[1]
    logits = q_n @ k_n.repeat_interleave(group, 1).mT * q.shape[-1] ** -0.5
    logits = logits.masked_fill(torch.ones_like(logits, dtype=torch.bool).triu(1), -math.inf)
    p = logits.softmax(-1)
    out = p @ v.repeat_interleave(group, 1)
    out.backward(do.double())
    entropy = -torch.special.xlogy(p, p).sum(-1).mean(-1).detach()
    return (out.detach(), q.grad, k.grad, v.grad), logits.amax((-1, -2)).detach(), entropy


def _plain(q, k, v, do, precision: StreamPrecision, tile: int, scale: float | None = None, seed: int = 0):
    """The plain reference, on its own device."""
    call = reference.Call(True, scale or q.shape[-1] ** -0.5, tile, precision, StreamRepair(), seed, True)
    stats = reference._empty_stats(q)
    out, o_delta, lse = reference.forward_reference(q, k, v, call, stats)
    return (out, *reference.backward_reference(q, k, v, o_delta, lse, do, call, stats)), stats


def _against_float64(name: str, precision: StreamPrecision, D: int, T: int, device) -> list[dict]:
    """At most twice the plain reference's error, and the rate at which the two differ."""
    q, k, v, do = _inputs(D, T, device)
    ours, statistics = _kernels(q, k, v, do, precision=precision, tile=16, operands="exact")
    stock, _ = _kernels(q, k, v, do, precision=precision, tile=16, operands="bf16")
    plain, _ = _plain(q, k, v, do, precision, 16)
    exact, max_logit, entropy = _float64(q, k, v, do)
    rows = []
    for quantity, a, s, b, c in zip(GRADIENTS, ours, stock, plain, exact):
        allowed = 2 * (b - c).abs().max() + 2**-8 * c.abs().max()
        rows.append(
            _row(f"{name} {quantity}", (a - c).abs().max(), allowed, differs=(a != b).double().mean().item())
        )
        # P and dS rounded as operands: sqrt(T) more roundings of 2^-9.
        rows.append(
            _row(f"{name} {quantity}, operands bf16", (s - c).abs().max(), allowed + 2**-7 * c.abs().max())
        )
    logit_error = ((statistics.max_logit - max_logit) / max_logit).abs().max()
    rows.append(_row(f"{name} max_logit", logit_error, 1e-5))
    rows.append(_row(f"{name} entropy", (statistics.entropy - entropy).abs().max(), 1e-4))
    return rows


def _bit_for_bit(name: str, D: int, T: int, device) -> list[dict]:
    """Small integers and m=2: fp32 sums are exact, so every bit is defined; all three rounding modes."""
    q, k, v, do = _inputs(D, T, device, integers=True)
    rows = []
    for mode in ("even", "stochastic", "toward_zero"):
        precision = StreamPrecision.uniform(2, mode=mode)
        ours, _ = _kernels(
            q, k, v, do, precision=precision, tile=16, operands="exact", shared_exp=True, scale=4 / D, seed=5
        )
        plain, _ = _plain(q, k, v, do, precision, 16, scale=4 / D, seed=5)
        for quantity, a, b in zip(GRADIENTS, ours, plain):
            rows.append(_row(f"{name} {mode} {quantity}: values that differ", (a != b).sum().item(), 0))
    return rows


def _normalisation(D: int, T: int, device) -> list[dict]:
    q, k, v, do = _inputs(D, T, device)
    switch = torch.zeros(1, dtype=torch.int32, device=device)
    without, _ = _kernels(q, k, v, do)
    dormant, _ = _kernels(q, k, v, do, norm_switch=switch)
    active, statistics = _kernels(q, k, v, do, norm_switch=switch.fill_(1))
    exact, _, _ = _float64(q, k, v, do, normalised=True)
    rows = [
        _row(f"dormant switch {quantity}: values that differ", (a != b).sum().item(), 0)
        for quantity, a, b in zip(GRADIENTS, dormant, without)
    ]
    for quantity, a, c in zip(GRADIENTS, active, exact):
        rows.append(_row(f"normalised {quantity}", (a - c).abs().max(), 2**-6 * c.abs().max()))
    rows.append(_row("normalised max_logit", statistics.max_logit.max(), math.sqrt(D) * (1 + 2**-8) ** 2))
    return rows


def _quantizers(device, quick: bool) -> list[dict]:
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(65, 100, generator=generator) * torch.logspace(-30, 30, 65)[:, None]).to(device)
    rows = []
    formats = ("mxfp4",) if quick else [name for name in mx_reference.FORMATS if name != "nvfp4"]
    for fmt in formats:
        for rule in mx_reference.SCALE_RULES:
            for rounding in mx_reference.ROUNDINGS:
                options = {"scale_rule": rule, "rounding": rounding, "seed": 5}
                a, b = quantize_mx(x, fmt, **options), mx_reference.quantize_mx(x, fmt, **options)
                rows.append(_row(f"{fmt} {rule} {rounding}: values that differ", (a != b).sum().item(), 0))
    gradient = x.clone()
    quantize_into_gradient(gradient, gain=3.0)
    expected = x + (mx_reference.quantize_mx(x) - x) * 3.0
    rows.append(_row("into gradient: values that differ", (gradient != expected).sum().item(), 0))
    dy, x = (torch.randn(150, n, generator=generator).to(device) for n in (72, 40))
    product = mx_reference.quantize_mx(dy, axis=0).double().mT @ mx_reference.quantize_mx(x, axis=0).double()
    rows.append(
        _row("mxfp4 product", (weight_gradient(dy, x) - product).abs().max(), 1e-5 * product.abs().max())
    )
    return rows


# --- 2: benchmarks -------------------------------------------------------------------------------------------


def benchmarks(device: torch.device, rows: list[dict], ratios: list[dict]) -> None:
    """Forward + backward, causal, bfloat16, D = 64, 12 heads; and quantizers against a copy. Times in ms."""
    for T, B in ((1024, 16), (8192, 2)):
        times = _time_attention(B, T, device, rows)
        best = times["sdpa flash"]
        for setting, floor, goal in (("healthy", 0.8, 1.0), ("carries", 0.7, 0.7), ("uniform", 0.5, 0.5)):
            ratios.append(_ratio(f"{setting} over sdpa flash, T={T}", best / times[setting], floor, goal))
        sensing = times["healthy"] / times["healthy, sensing"]
        ratios.append(_ratio(f"healthy over healthy with sensing, T={T}", sensing, 1 / 1.02, 1 / 1.02))
    _time_quantizers(device, rows, ratios)


def _ratio(name: str, value: float, floor: float, goal: float) -> dict:
    return {"name": name, "value": value, "floor": floor, "goal": goal, "passed": value >= floor}


def _timed(operator: str, setting: str, shape: str, work, rows: list[dict], grad_to_none=None) -> float:
    """Adds a row; the median, ms."""
    from triton.testing import do_bench

    p20, p50, p80 = do_bench(work, warmup=50, rep=300, quantiles=[0.2, 0.5, 0.8], grad_to_none=grad_to_none)
    rows.append(
        {"operator": operator, "setting": setting, "shape": shape, "p20": p20, "p50": p50, "p80": p80}
    )
    return p50


def _time_attention(B: int, T: int, device, rows: list[dict]) -> dict[str, float]:
    q, k, v, do = (torch.randn(B, 12, T, 64, device=device, dtype=torch.bfloat16) for _ in range(4))
    for x in (q, k, v):
        x.requires_grad_()
    switch = torch.ones(1, dtype=torch.int32, device=device)

    def sdpa(backend):
        def attend():
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, is_causal=True)

        return attend

    def ours(**options):
        return lambda: attention(q, k, v, **options)[0]

    settings = {
        "sdpa flash": sdpa(SDPBackend.FLASH_ATTENTION),
        "sdpa cudnn": sdpa(SDPBackend.CUDNN_ATTENTION),
        "healthy": ours(),
        "healthy, sensing": ours(sense=True),
        "healthy, all statistics": ours(sense=True, entropy=True, residual=True),
        "healthy, normalised": ours(norm_switch=switch),
        "carries": ours(precision=CARRIES),
        "uniform": ours(precision=UNIFORM),
    }
    times = {}
    for setting, attend in settings.items():
        shape = f"B={B} H=12 T={T} D=64"
        try:
            times[setting] = _timed(
                "attention", setting, shape, lambda attend=attend: attend().backward(do), rows, [q, k, v]
            )
        except RuntimeError as error:  # a backend this build does not have
            if not setting.startswith("sdpa cudnn"):
                raise
            rows.append(
                {"operator": "attention", "setting": setting, "shape": shape, "error": str(error)[:200]}
            )
    return times


def _time_quantizers(device, rows: list[dict], ratios: list[dict]) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(16384, 8192, device=device, dtype=dtype)
        y = torch.empty_like(x)
        shape = f"16384 x 8192 {str(dtype).removeprefix('torch.')}"
        copy = _timed("copy", "copy", shape, partial(y.copy_, x), rows)
        for rounding in ("even", "stochastic"):
            ms = _timed(
                "quantize_mx", f"mxfp4 {rounding}", shape, partial(quantize_mx, x, rounding=rounding), rows
            )
            ratios.append(_ratio(f"mxfp4 {rounding} over copy, {shape}", copy / ms, 0.7, 0.85))
        _timed("quantize_into_gradient", "mxfp4", shape, partial(quantize_into_gradient, x), rows)


# --- 3 and 4: a GPT-2-small ----------------------------------------------------------------------------------


class Attention:
    """What the model attends with; keeps what the layers' statistics need."""

    def __init__(self, switch: torch.Tensor | None = None, sdpa: bool = False, **options) -> None:
        self.switch, self.sdpa, self.options = switch, sdpa, options
        self.sensed, self.kept = [], []
        self.keep = False

    def __call__(self, q, k, v):
        if self.sdpa:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            if self.keep:
                kept = {"q": q, "k": k, "v": v, "o": out}
                out.register_hook(lambda gradient: kept.update(do=gradient))
                self.kept.append(kept)
            return out
        out, statistics = attention(q, k, v, norm_switch=self.switch, sense=True, **self.options)
        self.sensed.append(statistics)
        return out

    def guard(self) -> None:
        """Latch the switch where a logit passed tau, or is NaN, without the host knowing."""
        peak = torch.stack([statistics.max_logit.max() for statistics in self.sensed]).max()
        self.switch.copy_(torch.maximum(self.switch, (~(peak <= TAU)).int()))

    def statistics(self) -> list:
        """One per layer, of the latest step."""
        if not self.sdpa:
            return self.sensed
        return [
            reference.attention_stats(**{name: x.detach().float().contiguous() for name, x in kept.items()})
            for kept in self.kept
        ]

    def clear(self) -> None:
        self.sensed, self.kept = [], []


def residual(device: torch.device, quick: bool) -> list[dict]:
    """Rows of setting, step, loss (nat), residual_r (mean over layers and heads), max_logit."""
    size, steps, every = (TINY, 2, 1) if quick else (SMALL, 100, 10)
    attentions = {
        "sdpa": lambda: Attention(sdpa=True),
        "healthy": lambda: Attention(residual=True),
        "faulty": lambda: Attention(residual=True, precision=UNIFORM),
    }
    rows = []
    for setting, make in attentions.items():
        trainer, attend = Trainer(size, device, lr=1e-3, warmup=100), make()
        for step in range(steps):
            attend.clear()
            attend.keep = step % every == every - 1
            loss = trainer.train(attend)
            if attend.keep:
                layers = attend.statistics()
                rows.append(
                    {
                        "setting": setting,
                        "step": step,
                        "loss": loss.item(),
                        "residual_r": torch.stack([s.residual_r for s in layers]).mean().item(),
                        "max_logit": torch.stack([s.max_logit for s in layers]).max().item(),
                    }
                )
    return rows


def training(device: torch.device, quick: bool, seconds: float) -> list[dict]:
    """Rows of run, step, loss (nat), max_logit, sigma_q, guard_active; the two runs in turn, step by step."""
    size, steps, every = (TINY, 2, 1) if quick else (SMALL, 20_000, 25)
    end = time.monotonic() + seconds
    repair = StreamRepair(delta_gain=GAIN)
    runs = {}
    for name in ("faulty", "guarded"):
        switch = torch.zeros(1, dtype=torch.int32, device=device)
        attend = Attention(switch, precision=CARRIES, repair=repair)
        runs[name] = (Trainer(size, device, lr=1e-3, warmup=100), attend)
    rows = []
    for step in range(steps):
        if not quick and time.monotonic() > end:
            break
        for name, (trainer, attend) in runs.items():
            attend.clear()
            loss = trainer.train(attend)
            if step % every == every - 1:
                rows.append(
                    {
                        "run": name,
                        "step": step,
                        "loss": loss.item(),
                        "max_logit": torch.stack([s.max_logit for s in attend.sensed]).max().item(),
                        "sigma_q": trainer.sigma_q(),
                        "guard_active": bool(attend.switch.item()),
                    }
                )
            if name == "guarded":
                attend.guard()
    return rows
