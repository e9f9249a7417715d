"""The parts of the device check; see `device_check`. Each yields (kind of row, row of plain data)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
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
ALL_STATISTICS = {"sense": True, "entropy": True, "residual": True}
GRADIENTS = ("out", "dq", "dk", "dv")
TAU = 30.0
GAIN = 64.0  # of delta's error, in the accelerated runs
QUANTIZED = (16384, 8192)  # shape of what the timed quantizers take

# setting: (options, peer, least and wanted speed over the peer's); "norm_switch" is made on the device.
TIMED = {
    "healthy": ({}, "sdpa flash", 0.8, 1.0),
    "healthy, sensing": ({"sense": True}, "healthy", 1 / 1.02, 1 / 1.02),
    "healthy, all statistics": (ALL_STATISTICS, "healthy", None, None),
    "healthy, normalised": ({"norm_switch": 1}, "healthy", None, None),
    "carries": ({"precision": CARRIES}, "sdpa flash", 0.7, 0.7),
    "uniform": ({"precision": UNIFORM}, "sdpa flash", 0.5, 0.5),
}

Rows = Iterator[tuple[str, dict]]


class Clock:
    """A part's time: `up(what)` says whether it is over, and remembers what was cut."""

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds
        self.cut: str | None = None

    def up(self, what: str | None = None) -> bool:
        over = time.monotonic() > self.end
        if over and what and self.cut is None:
            self.cut = f"from {what} on"
        return over


# --- 1: checks -----------------------------------------------------------------------------------------------


def checks_of_head_dim(D: int, device: torch.device, quick: bool, clock: Clock) -> Rows:
    """Odd lengths, grouped queries: each setting against float64, small integers bit for bit, the normalisation."""
    T = 21 if quick else 67
    # The operands that a stock kernel has, and those of the reference.
    for name, precision in SETTINGS.items():
        for operands in ("bf16", "exact"):
            if clock.up(f"{name} D={D}"):
                return
            given = _inputs(D, T, device)
            options = {"precision": precision, "operands": operands, "tile": 16}
            yield from _against_float64(f"{name} D={D} operands {operands}", given, options)
    for mode in ("even", "stochastic", "toward_zero"):
        if clock.up(f"integers D={D} {mode}"):
            return
        yield from _bit_for_bit(f"integers D={D} {mode}", D, T, StreamPrecision.uniform(2, mode=mode), device)
    if not clock.up(f"normalised D={D}"):
        yield from _normalisation(D, T, device)


def checks_of_timed(device: torch.device, quick: bool, clock: Clock) -> Rows:
    """The very programs that are timed: bfloat16 tensors, T a multiple of every block."""
    for name, (options, *_) in TIMED.items():
        if clock.up(name):
            return
        given = [x.bfloat16() for x in _inputs(64, 1024, device, H_kv=4)]
        yield from _against_float64(f"timed {name}", given, options | _switch(options, device))


def _switch(options: dict, device) -> dict:
    return (
        {"norm_switch": torch.ones(1, dtype=torch.int32, device=device)} if "norm_switch" in options else {}
    )


def _row(name: str, error, allowed, **more) -> tuple[str, dict]:
    error, allowed = float(error), float(allowed)
    return "checks", {"name": name, "passed": error <= allowed, "error": error, "allowed": allowed, **more}


def _inputs(D: int, T: int, device, integers: bool = False, H_kv: int = 2) -> list[torch.Tensor]:
    """q, k, v, do, float32 with values exact in bfloat16; by default with two query heads a key head."""
    generator = torch.Generator().manual_seed(D)
    shapes = ((1, 4, T, D), (1, H_kv, T, D), (1, H_kv, T, D), (1, 4, T, D))
    if integers:
        return [torch.randint(-2, 3, shape, generator=generator).float().to(device) for shape in shapes]
    return [torch.randn(shape, generator=generator).bfloat16().float().to(device) for shape in shapes]


def _kernels(q, k, v, do, **options):
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    out, statistics = attention(q, k, v, **options)
    out.backward(do)
    return tuple(x.float() for x in (out.detach(), q.grad, k.grad, v.grad)), statistics


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
    q, k, v, do = (x.float() for x in (q, k, v, do))
    call = reference.Call(True, scale or q.shape[-1] ** -0.5, tile, precision, StreamRepair(), seed, False)
    out, o_delta, lse = reference.forward_reference(q, k, v, call, None)
    return (out, *reference.backward_reference(q, k, v, o_delta, lse, do, call, None))


def _against_float64(name: str, given: list[torch.Tensor], options: dict) -> Rows:
    """At most twice the plain reference's error, and the rate at which the two differ."""
    q, k, v, do = given
    normalised = "norm_switch" in options
    ours, statistics = _kernels(q, k, v, do, **options)
    if normalised:
        q_n, k_n = (F.rms_norm(x.float(), x.shape[-1:]) for x in (q, k))
        plain = _plain(q_n, k_n, v, do, HEALTHY, 64)[:1]
    else:
        plain = _plain(q, k, v, do, options.get("precision", HEALTHY), options.get("tile", 64))
    exact, max_logit, entropy = _float64(q, k, v, do, normalised)
    # P and dS rounded as operands: sqrt(T) more roundings of 2^-9.
    ulps = 2**-8 + (2**-7 if options.get("operands", "bf16") == "bf16" else 0.0)
    for index, (quantity, a, c) in enumerate(zip(GRADIENTS, ours, exact)):
        if index < len(plain):
            allowed = 2 * (plain[index] - c).abs().max() + ulps * c.abs().max()
            differs = (a != plain[index]).double().mean().item()
            yield _row(f"{name} {quantity}", (a - c).abs().max(), allowed, differs=differs)
        else:
            yield _row(f"{name} {quantity}", (a - c).abs().max(), 2**-6 * c.abs().max())
    if statistics.max_logit is not None:
        error = ((statistics.max_logit - max_logit) / max_logit).abs().max()
        yield _row(f"{name} max_logit", error, 1e-5)
    if statistics.entropy is not None:
        yield _row(f"{name} entropy", (statistics.entropy - entropy).abs().max(), 1e-4)


def _bit_for_bit(name: str, D: int, T: int, precision: StreamPrecision, device) -> Rows:
    """Small integers and m=2: fp32 sums are exact, so every bit is defined."""
    given = _inputs(D, T, device, integers=True)
    options = {"precision": precision, "tile": 16, "scale": 4 / D, "seed": 5}
    ours, _ = _kernels(*given, operands="exact", shared_exp=True, **ALL_STATISTICS, **options)
    for quantity, a, b in zip(GRADIENTS, ours, _plain(*given, **options)):
        yield _row(f"{name} {quantity}: values that differ", (a != b).sum(), 0)


def _normalisation(D: int, T: int, device) -> Rows:
    q, k, v, do = _inputs(D, T, device)
    switch = torch.zeros(1, dtype=torch.int32, device=device)
    without, _ = _kernels(q, k, v, do)
    dormant, _ = _kernels(q, k, v, do, norm_switch=switch)
    active, statistics = _kernels(q, k, v, do, norm_switch=switch.fill_(1), sense=True)
    exact, _, _ = _float64(q, k, v, do, normalised=True)
    for quantity, a, b in zip(GRADIENTS, dormant, without):
        yield _row(f"dormant switch D={D} {quantity}: values that differ", (a != b).sum(), 0)
    for quantity, a, c in zip(GRADIENTS, active, exact):
        yield _row(f"normalised D={D} {quantity}", (a - c).abs().max(), 2**-6 * c.abs().max())
    yield _row(f"normalised D={D} max_logit", statistics.max_logit.max(), math.sqrt(D) * (1 + 2**-8) ** 2)


def checks_of_formats(device: torch.device, quick: bool, clock: Clock) -> Rows:
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(65, 100, generator=generator) * torch.logspace(-30, 30, 65)[:, None]).to(device)
    for fmt in ("mxfp4", "nvfp4") if quick else mx_reference.FORMATS:
        for rule in mx_reference.SCALE_RULES if fmt != "nvfp4" else ("floor",):
            for rounding in mx_reference.ROUNDINGS:
                name = f"{fmt} {rule} {rounding}"
                if clock.up(name):
                    return
                a = quantize_mx(x, fmt, scale_rule=rule, rounding=rounding, seed=5)
                b = mx_reference.quantize_plain(x, fmt, scale_rule=rule, rounding=rounding, seed=5)[0]
                yield _row(f"{name}: values that differ", (a != b).sum(), 0)
    gradient = x.clone()
    quantize_into_gradient(gradient, gain=3.0)
    expected = x + (mx_reference.quantize_plain(x)[0] - x) * 3.0
    yield _row("into gradient: values that differ", (gradient != expected).sum(), 0)
    dy, x = (torch.randn(150, n, generator=generator).to(device) for n in (72, 40))
    a, b = (mx_reference.quantize_plain(t, axis=0)[0].double() for t in (dy, x))
    product = a.mT @ b
    yield _row("mxfp4 product", (weight_gradient(dy, x) - product).abs().max(), 1e-5 * product.abs().max())


# --- 2: benchmarks -------------------------------------------------------------------------------------------


def benchmarks(device: torch.device, quick: bool, clock: Clock) -> Rows:
    """Forward + backward, causal, bfloat16, D = 64, 12 heads; and quantizers against a copy. Times in ms."""
    for T, B in ((1024, 16), (8192, 2)):
        yield from _with_ratios(_time_attention(B, T, device, clock))
    for dtype in (torch.float32, torch.bfloat16):
        yield from _with_ratios(_time_quantizers(dtype, device, clock))


def _with_ratios(rows: Iterator[dict]) -> Rows:
    """The rows, and speeds over peers that were timed with them."""
    timed = {}
    for row in rows:
        yield "benchmarks", row
        timed[row["setting"]] = row
    for row in timed.values():
        peer = timed.get(row["peer"])
        if peer is None or "p50" not in row or "p50" not in peer:
            continue
        names = ("operator", "setting", "shape", "peer", "floor", "goal")
        value = peer["p50"] / row["p50"]
        passed = None if row["floor"] is None else value >= row["floor"]
        yield "ratios", {name: row[name] for name in names} | {"value": value, "passed": passed}


def _timed(work: Callable[[], object]) -> dict:
    """p20, p50, p80 on the device, replayed from a CUDA graph, so that the host's launches do not count, with the second-level
    cache emptied before each run; and the median as launched by the host.
    """
    from triton.testing import do_bench

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = work()  # what it returns lies in the graph's memory
    p20, p50, p80 = do_bench(graph.replay, warmup=25, rep=200, quantiles=[0.2, 0.5, 0.8])
    eager = do_bench(work, warmup=25, rep=100, quantiles=[0.5])
    del held, graph
    return {"p20": p20, "p50": p50, "p80": p80, "eager_p50": eager if isinstance(eager, float) else eager[0]}


def _time_attention(B: int, T: int, device, clock: Clock) -> Iterator[dict]:
    q, k, v, do = (torch.randn(B, 12, T, 64, device=device, dtype=torch.bfloat16) for _ in range(4))
    for x in (q, k, v):
        x.requires_grad_()

    def sdpa(backend):
        def attend():
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, is_causal=True)

        return attend

    def ours(options):
        options = options | _switch(options, device)
        return lambda: attention(q, k, v, **options)[0]

    cases = [
        ("sdpa flash", sdpa(SDPBackend.FLASH_ATTENTION), None, None, None),
        ("sdpa cudnn", sdpa(SDPBackend.CUDNN_ATTENTION), "sdpa flash", None, None),
        *((name, ours(options), peer, floor, goal) for name, (options, peer, floor, goal) in TIMED.items()),
    ]
    for setting, attend, peer, floor, goal in cases:
        if clock.up(f"{setting}, T={T}"):
            return
        row = {
            "operator": "attention",
            "setting": setting,
            "shape": f"B={B} H=12 T={T} D=64",
            "peer": peer,
            "floor": floor,
            "goal": goal,
            "flops": 7
            * 2
            * 64
            * B
            * 12
            * T
            * (T + 1)
            / 2,  # 2 products forward, 5 backward, half of them masked
        }
        try:
            row |= _timed(lambda attend=attend: torch.autograd.grad(attend(), (q, k, v), do))
        except RuntimeError as error:
            if setting != "sdpa cudnn":  # which a build may lack
                raise
            row["error"] = str(error)[:200]
        yield row


def _time_quantizers(dtype: torch.dtype, device, clock: Clock) -> Iterator[dict]:
    x = torch.randn(QUANTIZED, device=device, dtype=dtype)
    y = torch.empty_like(x)
    shape = f"{QUANTIZED[0]} x {QUANTIZED[1]} {str(dtype).removeprefix('torch.')}"
    cases = [
        ("copy", partial(y.copy_, x), None, None),
        ("mxfp4", partial(quantize_mx, x), 0.7, 0.85),
        ("mxfp4, stochastic", partial(quantize_mx, x, rounding="stochastic"), 0.7, 0.85),
        ("nvfp4", partial(quantize_mx, x, "nvfp4"), None, None),
        ("mxfp4 into gradient", partial(quantize_into_gradient, x, gain=2.0), None, None),
    ]
    for setting, work, floor, goal in cases:
        if clock.up(f"{setting}, {shape}"):
            return
        row = {
            "operator": "quantize_mx",
            "setting": setting,
            "shape": shape,
            "peer": None if setting == "copy" else "copy",
            "floor": floor,
            "goal": goal,
            "bytes": 2 * x.numel() * x.element_size(),
        }
        yield row | _timed(work)


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


RESIDUAL = {
    "sdpa": {"sdpa": True},
    "healthy": {"residual": True},
    "faulty": {"residual": True, "precision": UNIFORM},
}
ACCELERATED = {"precision": CARRIES, "repair": StreamRepair(delta_gain=GAIN)}


def residual(device: torch.device, quick: bool, clock: Clock) -> Rows:
    """Rows of setting, step, loss (nat), residual_r (mean over layers and heads), max_logit."""
    size, steps, every = (TINY, 2, 1) if quick else (SMALL, 100, 10)
    for setting, options in RESIDUAL.items():
        trainer, attend = Trainer(size, device, lr=1e-3, warmup=100), Attention(**options)
        for step in range(steps):
            if clock.up(f"{setting}, step {step}"):
                return
            attend.clear()
            attend.keep = step % every == every - 1
            loss = trainer.train(attend)
            if attend.keep:
                layers = attend.statistics()
                yield (
                    "residual",
                    {
                        "setting": setting,
                        "step": step,
                        "loss": loss.item(),
                        "residual_r": torch.stack([s.residual_r for s in layers]).mean().item(),
                        "max_logit": torch.stack([s.max_logit for s in layers]).max().item(),
                    },
                )


def training(device: torch.device, quick: bool, clock: Clock) -> Rows:
    """Rows of run, step, loss (nat), max_logit, sigma_q, guard_active; the two runs in turn, until time is up."""
    size, steps, every = (TINY, 2, 1) if quick else (SMALL, 20_000, 25)
    runs = {}
    for name in ("faulty", "guarded"):
        switch = torch.zeros(1, dtype=torch.int32, device=device)
        attend = Attention(switch, **ACCELERATED)
        runs[name] = (Trainer(size, device, lr=1e-3, warmup=100), attend)
    for step in range(steps):
        if clock.up():
            return
        for name, (trainer, attend) in runs.items():
            attend.clear()
            loss = trainer.train(attend)
            if step % every == every - 1:
                yield (
                    "training",
                    {
                        "run": name,
                        "step": step,
                        "loss": loss.item(),
                        "max_logit": torch.stack([s.max_logit for s in attend.sensed]).max().item(),
                        "sigma_q": trainer.sigma_q(),
                        "guard_active": bool(attend.switch.item()),
                    },
                )
            if name == "guarded":
                attend.guard()


WORKS: dict[str, Callable[[torch.device, bool, Clock], Rows]] = {
    **{f"checks D={D}": partial(checks_of_head_dim, D) for D in (16, 32, 64, 128)},
    "checks timed": checks_of_timed,
    "checks formats": checks_of_formats,
    "benchmarks": benchmarks,
    "residual": residual,
    "training": training,
}
