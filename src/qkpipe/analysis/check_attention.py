"""Is an attention function fit to train with? Its errors and its row-sum residual against float64, as a
verdict with reasons.

The function is opaque: it is called as ``fn(q, k, v)`` (causal, default scale, (B, H, T, D)) and
differentiated. Everything is compared with float64 attention on the same inputs, and every limit comes from
the data: twice what a *stock kernel* does in the inputs' format. That stock kernel is defined here, op by op,
and is what tensor-core kernels do: fp32 inside, the operands of every matrix product (P and dS too) in the
inputs' format, delta = rowsum(dO * O) with O as returned, results rounded once.

The row-sum residual. Softmax is shift-invariant, so each row of dS = P * (dP - delta) sums to zero in exact
arithmetic; a function whose rows do not pushes its queries along the mean key, step after step. dS is
internal, but dQ = scale * dS K lets it out: give every key the same value 1 in one feature, and that feature
of dQ is scale * sum_j dS_ij, with dS as it entered the product and rounded only relative to itself. The
queries are 0 in that feature, so no logit changes and the forward is undisturbed. The feature is the one with
the least weight in the logits. Measured on it:

    residual r       mean |sum_j dS_ij| / mean sum_j |dS_ij|, the denominator in float64
    residual mean    the same with its sign: a mean that is not zero is a drift, not noise
    sign repetition  mean of sign * previous batch's sign at the same row: 0 for noise, 1 for an error frozen
                     in place (with one batch: not measured)
    implied by O     r if delta were rowsum(dO * O) with the O it returned, reported only. Far above r: delta
                     was taken from something better
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from qkpipe.errors import BadInput

AttentionFn = Callable[[Tensor, Tensor, Tensor], Tensor]
Inputs = tuple[Tensor, Tensor, Tensor, Tensor]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_MANTISSA = {torch.float32: 23, torch.bfloat16: 7, torch.float16: 10}
# Differences of summation order in fp32, which no reference fixes; far below what any format here can hurt.
_FP32_FLOOR = 2.0**-22
# Standard errors granted to a mean that should be zero: about one false alarm in 15,000 normal means.
_SIGMAS = 4.0


@dataclass(frozen=True)
class Check:
    """One measurement: ``value`` of the function, ``stock`` of the stock kernel; passed if |value| <=
    ``limit``.
    """

    name: str
    value: float
    stock: float
    limit: float | None
    """None: reported, not judged."""
    meaning: str

    @property
    def passed(self) -> bool:
        return self.limit is None or abs(self.value) <= self.limit  # NaN does not pass


@dataclass(frozen=True)
class Report:
    """What :func:`check_attention` found; ``qualified`` if every judged check passed."""

    target: str
    dtype: str
    shape: tuple[int, ...]
    batches: int
    source: str
    device: str
    torch_version: str
    checks: tuple[Check, ...]

    @property
    def qualified(self) -> bool:
        return all(check.passed for check in self.checks)

    @property
    def reasons(self) -> list[str]:
        failed = [check for check in self.checks if not check.passed]
        return [f"{c.name} is {c.value:.3g}, allowed {c.limit:.3g}: {c.meaning}" for c in failed] or [
            "every error is within twice that of a stock kernel in the same format"
        ]

    def to_dict(self) -> dict:
        """For JSON: numbers that are not finite become null."""
        checks = [{**asdict(check), "passed": check.passed} for check in self.checks]
        for check in checks:
            for key in ("value", "stock", "limit"):
                if check[key] is not None and not math.isfinite(check[key]):
                    check[key] = None
        fields = {key: value for key, value in asdict(self).items() if key != "checks"}
        return {**fields, "qualified": self.qualified, "reasons": self.reasons, "checks": checks}

    def table(self) -> str:
        """Fixed-width text, one line a check, then the verdict and its reasons."""
        shape = " x ".join(map(str, self.shape))
        lines = [
            f"{self.target}: {self.batches} batches of {shape} (B x H x T x D), {self.dtype}, {self.source}, {self.device}",
            f"{'':24}{'value':>12}{'stock':>12}{'limit':>12}",
        ]
        for check in self.checks:
            limit = "-" if check.limit is None else f"{check.limit:.3e}"
            verdict = "" if check.limit is None else ("ok" if check.passed else "FAILED")
            lines.append(
                f"{check.name:24}{check.value:12.3e}{check.stock:12.3e}{limit:>12}  {verdict}".rstrip()
            )
        lines.append("qualified" if self.qualified else "NOT qualified")
        return "\n".join(lines + [f"  - {reason}" for reason in self.reasons])


def check_attention(
    fn: AttentionFn,
    *,
    inputs: str | Path | None = None,
    batches: int = 8,
    shape: tuple[int, int, int, int] = (2, 4, 256, 64),
    dtype: str = "float32",
    seed: int = 0,
    device: str = "cpu",
    name: str | None = None,
) -> Report:
    """Qualify ``fn(q, k, v) -> out`` (causal, default scale, differentiable) against float64.

    Args:
        fn: called with leaf tensors (B, H, T, D) of ``dtype``; captured k and v may have fewer heads.
        inputs: captured tensors instead of random ones: a ``.pt`` (a dict) or ``.npz`` with q, k, v and,
            optionally, do, each (B, H, T, D) or (batches, B, H, T, D); they keep their dtype. Without do, dO
            is normal.
        batches, shape, dtype, seed: of random inputs, standard normal.
        name: in the report; the function's own by default.

    Raises:
        BadInput: nothing could be measured: the file or device cannot be used, or the function raises,
            returns another shape, or is not differentiable. A function that returns NaN was measured, and
            does not qualify.
    """
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # torch without CUDA asserts
        raise BadInput(f"device: {device!r} cannot be used: {_first_line(error)}") from error
    generator = torch.Generator().manual_seed(seed)
    if inputs is None:
        _check_random(batches, shape, dtype)
        data: Iterable[Inputs] = _random_batches(batches, shape, DTYPES[dtype], generator)
    else:
        data = _captured_batches(Path(inputs), generator)
    total = _Totals()
    for q, k, v, do in data:
        batch = tuple(x.to(device) for x in (q, k, v, do))
        total.add(fn, batch)
    return Report(
        target=name or getattr(fn, "__name__", type(fn).__name__),
        dtype=str(q.dtype).removeprefix("torch."),
        shape=tuple(q.shape),
        batches=total.batches,
        source="random" if inputs is None else Path(inputs).name,
        device=device,
        torch_version=torch.__version__,
        checks=tuple(total.checks()),
    )


def attend(q: Tensor, k: Tensor, v: Tensor, do: Tensor, operand: torch.dtype) -> Inputs:
    """Causal softmax attention and its gradients written out, ``(O, dQ, dK, dV)``, in the dtype of q.

    ``operand`` is the format of every matrix product's operands and of what is returned: the dtype of the
    inputs itself makes this the exact reference (float64), a narrower one the stock kernel of the module
    docstring. q, dO (B, H, T, D); k, v (B, G, T, D) with H a multiple of G.
    """

    def narrow(x: Tensor) -> Tensor:
        return x.to(operand).to(x.dtype)

    T, D = q.shape[-2:]
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scale = D**-0.5
    future = torch.ones(T, T, dtype=torch.bool, device=q.device).triu(1)
    P = ((q @ k.mT) * scale).masked_fill(future, -math.inf).softmax(-1)
    O = narrow(narrow(P) @ v)
    delta = (do * O).sum(-1, keepdim=True)
    dS = narrow(P * (do @ v.mT - delta))
    dQ, dK, dV = (dS @ k) * scale, (dS.mT @ q) * scale, narrow(P).mT @ do
    dK, dV = (x.unflatten(1, (-1, groups)).sum(2) for x in (dK, dV))
    return O, narrow(dQ), narrow(dK), narrow(dV)


def _exact(batch: Inputs) -> Inputs:
    return attend(*(x.double() for x in batch), operand=torch.float64)


def _stock(batch: Inputs) -> Inputs:
    return attend(*(x.float() for x in batch), operand=batch[0].dtype)


def _differentiate(fn: AttentionFn, batch: Inputs) -> Inputs:
    """O, dQ, dK, dV of the function under test; BadInput where it cannot act as an attention function."""
    leaves = [x.detach().clone().requires_grad_() for x in batch[:3]]
    try:
        out = fn(*leaves)
    except Exception as error:
        raise BadInput(f"the function raised {type(error).__name__}: {_first_line(error)}") from error
    if not isinstance(out, Tensor) or out.shape != batch[0].shape:
        got = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
        raise BadInput(f"the function returned {got}; allowed: a tensor of shape {tuple(batch[0].shape)}")
    try:
        gradients = torch.autograd.grad(out, leaves, batch[3].to(out.dtype))
    except Exception as error:
        raise BadInput(f"the backward raised {type(error).__name__}: {_first_line(error)}") from error
    return (out.detach(), *gradients)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0]


def _with_constant_key_feature(batch: Inputs) -> tuple[Inputs, int]:
    """The same batch with one feature 1 in every key and 0 in every query, and which one."""
    q, k, v, do = batch
    weight = q.double().square().mean((0, 1, 2)) * k.double().square().mean((0, 1, 2))
    feature = int(weight.argmin())
    q, k = q.clone(), k.clone()
    q[..., feature], k[..., feature] = 0.0, 1.0
    return (q, k, v, do), feature


class _Totals:
    """Sums over batches, of the function under test ("value") and of the stock kernel ("stock")."""

    def __init__(self) -> None:
        self.batches = 0
        self._squared = {who: torch.zeros(4, dtype=torch.float64) for who in ("value", "stock")}
        self._reference = torch.zeros(4, dtype=torch.float64)
        self._residual: dict[str, list[Tensor]] = {"value": [], "stock": []}
        self._implied = {"value": 0.0, "stock": 0.0}
        self._size = 0.0

    def add(self, fn: AttentionFn, batch: Inputs) -> None:
        self.batches += 1
        measured = {"value": _differentiate(fn, batch), "stock": _stock(batch)}
        exact = _exact(batch)
        self._reference += torch.stack([x.square().sum() for x in exact]).cpu()
        for who, results in measured.items():
            errors = [(x.double() - y).square().sum() for x, y in zip(results, exact)]
            self._squared[who] += torch.stack(errors).cpu()
        self._add_residual(fn, batch)

    def _add_residual(self, fn: AttentionFn, batch: Inputs) -> None:
        batch, feature = _with_constant_key_feature(batch)
        do, scale = batch[3].double(), batch[0].shape[-1] ** -0.5
        exact_delta = (do * _exact(batch)[0]).sum(-1)
        size = _row_sizes(batch).mean().item()
        self._size += size
        for who, results in {"value": _differentiate(fn, batch), "stock": _stock(batch)}.items():
            self._residual[who].append((results[1][..., feature].double() / scale).cpu())
            self._implied[who] += (exact_delta - (do * results[0].double()).sum(-1)).abs().mean().item()

    def checks(self) -> Iterator[Check]:
        for i, name in enumerate(("output", "dQ", "dK", "dV")):
            value, stock = (
                (self._squared[who][i] / self._reference[i]).sqrt().item() for who in ("value", "stock")
            )
            limit = 2 * stock + _FP32_FLOOR
            yield Check(f"{name} error", value, stock, limit, "relative error (Frobenius) against float64")
        size = self._size / self.batches
        r, mean, error, repeat = {}, {}, {}, {}
        for who, batches in self._residual.items():
            rows = torch.stack(batches) / size
            r[who] = rows.abs().mean().item()
            # Heads are the independent units: the rows of one share their keys and values.
            heads = rows.mean(-1).flatten()
            mean[who] = heads.mean().item()
            error[who] = (heads.std() / math.sqrt(heads.numel())).item() if heads.numel() > 1 else math.inf
            repeat[who] = _sign_repetition(rows)
        yield Check(
            "residual r",
            r["value"],
            r["stock"],
            2 * r["stock"] + _FP32_FLOOR,
            "rows of dS do not sum to zero: delta does not match P and dP",
        )
        yield Check(
            "residual mean",
            mean["value"],
            mean["stock"],
            2 * abs(mean["stock"]) + _SIGMAS * error["value"] + _FP32_FLOOR,
            "the residual has a sign of its own, so it adds up over steps",
        )
        if self.batches > 1:
            value, count = repeat["value"]
            stock, _ = repeat["stock"]
            limit = 2 * abs(stock) + _SIGMAS / math.sqrt(max(count, 1))
            yield Check(
                "sign repetition", value, stock, limit, "the residual keeps its sign from batch to batch"
            )
        implied = {who: value / self._size for who, value in self._implied.items()}
        yield Check("implied by O", implied["value"], implied["stock"], None, "r of delta = rowsum(dO * O)")


def _row_sizes(batch: Inputs) -> Tensor:
    """sum_j |dS_ij| in float64, (B, H, T)."""
    q, k, v, do = (x.double() for x in batch)
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    future = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).triu(1)
    P = ((q @ k.mT) * q.shape[-1] ** -0.5).masked_fill(future, -math.inf).softmax(-1)
    dP = do @ v.mT
    return (P * (dP - (P * dP).sum(-1, keepdim=True))).abs().sum(-1)


def _sign_repetition(rows: Tensor) -> tuple[float, int]:
    """Mean of sign_t * sign_(t-1) over (batches, B, H, T), rows without a residual left out; and their
    number.
    """
    products = rows[1:].sign() * rows[:-1].sign()
    count = int((products != 0).sum())
    return (products.nansum() / max(count, 1)).item(), count


def _check_random(batches: int, shape: tuple[int, ...], dtype: str) -> None:
    if batches < 1:
        raise BadInput(f"batches: {batches} is not allowed: 1 or more")
    if len(shape) != 4 or min(shape) < 1 or shape[2] < 2 or shape[3] < 2:
        raise BadInput(f"shape: {tuple(shape)} is not allowed: B H T D, B and H 1 or more, T and D 2 or more")
    if dtype not in DTYPES:
        raise BadInput(f"dtype: {dtype!r} is not allowed: {', '.join(DTYPES)}")


def _random_batches(
    batches: int, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator
) -> Iterator[Inputs]:
    for _ in range(batches):
        yield tuple(torch.randn(shape, generator=generator).to(dtype) for _ in range(4))


def _captured_batches(path: Path, generator: torch.Generator) -> list[Inputs]:
    """The batches of a file, checked before any is used."""
    try:
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as archive:
                tensors = {key: torch.from_numpy(archive[key]) for key in archive.files}
        elif path.suffix == ".pt":
            tensors = torch.load(path, map_location="cpu", weights_only=True)
        else:
            raise BadInput(f"inputs: {path} is not allowed: a .pt or .npz file")
    except BadInput:
        raise
    except Exception as error:
        raise BadInput(f"inputs: {path} cannot be read: {_first_line(error)}") from error
    if not isinstance(tensors, dict) or not {"q", "k", "v"} <= tensors.keys():
        raise BadInput(f"inputs: {path} must hold a dict with q, k, v and, if captured, do")
    q = tensors["q"]
    do = tensors.get("do")
    if do is None and isinstance(q, Tensor) and q.is_floating_point():
        do = torch.randn(q.shape, generator=generator).to(q.dtype)
    given = {"q": q, "k": tensors["k"], "v": tensors["v"], "do": do}
    for key, x in given.items():
        if not isinstance(x, Tensor) or x.dtype not in _MANTISSA or x.dtype != q.dtype:
            raise BadInput(
                f"inputs: {path}: {key} must be a tensor of one of {', '.join(DTYPES)}, all the same"
            )
        like = q if key in ("q", "do") else given["k"]
        if x.ndim not in (4, 5) or x.shape != like.shape or x.shape[-2:] != q.shape[-2:] or x.ndim != q.ndim:
            raise BadInput(
                f"inputs: {path}: {key} has shape {tuple(x.shape)}; allowed: (B, H, T, D) or (batches, B, H, T, D), "
                f"k and v alike, in T and D like q"
            )
        if not x.isfinite().all():
            raise BadInput(f"inputs: {path}: {key} holds NaN or infinity; allowed: finite numbers")
    if q.shape[-3] % given["k"].shape[-3] or q.shape[:-3] != given["k"].shape[:-3] or min(q.shape[-2:]) < 2:
        raise BadInput(
            f"inputs: {path}: q {tuple(q.shape)} and k {tuple(given['k'].shape)} do not fit: "
            f"the same batches, query heads a multiple of key heads, T and D 2 or more"
        )
    stacked = [x if x.ndim == 5 else x[None] for x in given.values()]
    return list(zip(*(x.unbind(0) for x in stacked)))


def _sdpa(backend: SDPBackend | None) -> AttentionFn:
    def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with nullcontext() if backend is None else sdpa_kernel(backend):
            return F.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
            )

    return sdpa


def _streaming(base: str, bits: int) -> AttentionFn:
    """The study's recurrence; q, k, v and what it returns in the format of the inputs."""

    def streaming(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from qkpipe.numerics import StreamPrecision, streaming_attention

        precision = getattr(StreamPrecision, base)(bits, io=_MANTISSA[q.dtype])
        return streaming_attention(q.float(), k.float(), v.float(), precision=precision).to(q.dtype)

    return streaming


BUILT_IN: dict[str, Callable[[], AttentionFn]] = {
    "sdpa": lambda: _sdpa(None),
    "sdpa-flash": lambda: _sdpa(SDPBackend.FLASH_ATTENTION),
    "sdpa-math": lambda: _sdpa(SDPBackend.MATH),
    "streaming-fp32": lambda: _streaming("uniform", 23),
    "streaming-bf16": lambda: _streaming("uniform", 7),
    "streaming-bf16-carries": lambda: _streaming("carries", 7),
    **{f"streaming-m{m}": lambda m=m: _streaming("uniform", m) for m in range(1, 7)},
}


def resolve(target: str) -> AttentionFn:
    """A built-in name, or ``module:function`` (the working directory is searched too). Raises BadInput."""
    if target in BUILT_IN:
        return BUILT_IN[target]()
    module, _, attribute = target.partition(":")
    if not module or not attribute:
        raise BadInput(
            f"function: {target!r} is not allowed: module:function, or one of {', '.join(BUILT_IN)}"
        )
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        found = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except Exception as error:
        raise BadInput(f"function: {target!r} cannot be imported: {_first_line(error)}") from error
    if not callable(found):
        raise BadInput(f"function: {target!r} is not callable")
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``qkpipe check-attention``."""
    parser.add_argument("function", help=f"module:function, or one of {', '.join(BUILT_IN)}")
    parser.add_argument(
        "--inputs", metavar="FILE", help="captured q, k, v and do (.pt or .npz) instead of random ones"
    )
    parser.add_argument("--batches", type=int, default=8, help="random batches (8)")
    parser.add_argument(
        "--shape",
        type=int,
        nargs=4,
        metavar=("B", "H", "T", "D"),
        default=(2, 4, 256, 64),
        help="(2 4 256 64)",
    )
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of random inputs (float32)")
    parser.add_argument("--seed", type=int, default=0, help="of random inputs (0)")
    parser.add_argument("--device", default="cpu", help="(cpu)")
    parser.add_argument("--json", action="store_true", help="only JSON on standard output")


def run(args: argparse.Namespace) -> int:
    """``qkpipe check-attention``: 0 qualified, 1 not qualified, 2 could not run (one line on standard error)."""
    try:
        report = check_attention(
            resolve(args.function),
            inputs=args.inputs,
            batches=args.batches,
            shape=tuple(args.shape),
            dtype=args.dtype,
            seed=args.seed,
            device=args.device,
            name=args.function,
        )
    except BadInput as error:
        print(f"qkpipe: error: {error}", file=sys.stderr)
        if args.json:
            print(json.dumps({"target": args.function, "qualified": None, "error": str(error)}))
        return 2
    print(json.dumps(report.to_dict(), indent=2, allow_nan=False) if args.json else report.table())
    return 0 if report.qualified else 1
