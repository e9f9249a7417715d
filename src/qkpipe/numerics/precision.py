"""Which precision each quantity of streaming attention has, and which repairs are on.

Plain data, free of torch, so that the configuration can hold it. The arithmetic these names refer to is
listed, in order, in `qkpipe.numerics.streaming`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from qkpipe.errors import BadInput

FP32_BITS = 23
"""Explicit mantissa bits of fp32; 7 is bf16. The exponent range is fp32's at every width."""

MODES = ("even", "stochastic", "toward_zero")


def _check_bits(bits: Any, quantity: str) -> None:
    if isinstance(bits, bool) or not isinstance(bits, int) or not 1 <= bits <= FP32_BITS:
        raise BadInput(f"{quantity}: mantissa bits = {bits!r}; allowed: an integer from 1 to {FP32_BITS}")


def _check_mode(mode: Any, quantity: str) -> None:
    if mode not in MODES:
        raise BadInput(f"{quantity}: rounding mode = {mode!r}; allowed: {', '.join(MODES)}")


def _check_gain(gain: Any, owner: str, key: str = "gain") -> None:
    if not (_is_number(gain) and math.isfinite(gain) and gain >= 0):
        raise BadInput(f"{owner}: {key} = {gain!r}; allowed: a finite number, 0 or more")


def _reject_unknown(kind: str, given: Mapping[str, Any], allowed: tuple[str, ...]) -> None:
    for key in given:
        if key not in allowed:
            raise BadInput(f"{kind}: unknown key {key!r}; allowed: {', '.join(allowed)}")


@dataclass(frozen=True)
class Rounding:
    """Rounding of one quantity to `bits` explicit mantissa bits (1 to 23; 23 leaves fp32 as it is).

    `mode`: "even" (to nearest, ties to even), "stochastic" (up with the probability of the discarded
    fraction) or "toward_zero". `gain` amplifies the error without changing the format: x becomes
    x + gain * (rounded - x), three fp32 operations, where rounded is finite.
    """

    bits: int = FP32_BITS
    mode: str = "even"
    gain: float = 1.0

    def __post_init__(self) -> None:
        _check_bits(self.bits, "Rounding")
        _check_mode(self.mode, "Rounding")
        _check_gain(self.gain, "Rounding")

    @classmethod
    def parse(cls, value: Rounding | int | Mapping[str, Any], quantity: str) -> Rounding:
        """A `Rounding` from itself, a bare bit count or {bits, mode, gain}; errors name `quantity`."""
        if isinstance(value, Rounding):
            return value
        if isinstance(value, Mapping):
            _reject_unknown(quantity, value, ("bits", "mode", "gain"))
            bits, mode = value.get("bits", FP32_BITS), value.get("mode", "even")
            gain = value.get("gain", 1.0)
        else:
            bits, mode, gain = value, "even", 1.0
        _check_bits(bits, quantity)
        _check_mode(mode, quantity)
        _check_gain(gain, quantity)
        return cls(bits, mode, gain)

    def plain(self) -> int | dict[str, Any]:
        """The shortest form `parse` reads back: the bit count alone for round-to-even."""
        if self.gain != 1:
            return {"bits": self.bits, "mode": self.mode, "gain": self.gain}
        return self.bits if self.mode == "even" else {"bits": self.bits, "mode": self.mode}


@dataclass(frozen=True)
class StreamPrecision:
    """One `Rounding` for each quantity of streaming attention; a bare int means that many bits, to even.

    Forward: `qk` scores before the scale; `s` scores after it; `s_minus_m` the exponents' arguments (S - m,
    and the difference of two running maxima in the rescale factor); `p` the exponentials; `p_operand` P as
    operand of P V; `block_sum` a tile's row sum; `rescale` the factor exp(m_old - m_new); the carries `acc`,
    `l`, `m`; `pv` a tile's P V; `o` the normalised output; `lse` the stored log-sum-exp. Where block outputs are
    merged, `o` is a block's output, `acc` the merged one, `lse` both log-sum-exps, `rescale` their weights.
    Backward: `bwd_s`
    the recomputed scores (before and after the scale); `bwd_p` the recomputed exp(S - LSE); `dp` dO V';
    `delta_prod` and `delta_sum` the products and the sum of delta = rowsum(dO * O); `ds` dS (before and after
    the soft-cap's slope). `io`: q, k, v
    and dO coming in; the output, dQ, dK and dV going out.
    """

    qk: Rounding = field(default_factory=Rounding)
    s: Rounding = field(default_factory=Rounding)
    s_minus_m: Rounding = field(default_factory=Rounding)
    p: Rounding = field(default_factory=Rounding)
    p_operand: Rounding = field(default_factory=Rounding)
    block_sum: Rounding = field(default_factory=Rounding)
    rescale: Rounding = field(default_factory=Rounding)
    acc: Rounding = field(default_factory=Rounding)
    l: Rounding = field(default_factory=Rounding)
    m: Rounding = field(default_factory=Rounding)
    pv: Rounding = field(default_factory=Rounding)
    o: Rounding = field(default_factory=Rounding)
    lse: Rounding = field(default_factory=Rounding)
    bwd_s: Rounding = field(default_factory=Rounding)
    bwd_p: Rounding = field(default_factory=Rounding)
    dp: Rounding = field(default_factory=Rounding)
    delta_prod: Rounding = field(default_factory=Rounding)
    delta_sum: Rounding = field(default_factory=Rounding)
    ds: Rounding = field(default_factory=Rounding)
    io: Rounding = field(default_factory=Rounding)

    def __post_init__(self) -> None:
        for quantity in QUANTITIES:
            object.__setattr__(self, quantity, Rounding.parse(getattr(self, quantity), quantity))

    @classmethod
    def exact(cls) -> StreamPrecision:
        """Everything in fp32: streaming attention without the fault."""
        return cls()

    @classmethod
    def uniform(cls, m: int, io: int = 7, mode: str = "even") -> StreamPrecision:
        """Every quantity, forward and backward, at `m` bits; tensors in and out at `io`, to even."""
        return cls._at(m, io, mode, tuple(q for q in QUANTITIES if q != "io"))

    @classmethod
    def carries(cls, m: int, io: int = 7, mode: str = "even") -> StreamPrecision:
        """Only what is kept between key tiles (acc, l, m) at `m` bits; the rest fp32; in and out at `io`."""
        return cls._at(m, io, mode, CARRIES)

    @classmethod
    def _at(cls, m: int, io: int, mode: str, quantities: tuple[str, ...]) -> StreamPrecision:
        at_m = Rounding.parse({"bits": m, "mode": mode}, "m")
        return cls(io=Rounding.parse(io, "io"), **dict.fromkeys(quantities, at_m))

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> StreamPrecision:
        """From {quantity: bits} or {quantity: {bits, mode}}; quantities left out are fp32."""
        _reject_unknown("precision", given, QUANTITIES)
        return cls(**given)

    def to_dict(self) -> dict[str, Any]:
        """Every quantity in the form `from_dict` reads back (ready for YAML and JSON)."""
        return {quantity: getattr(self, quantity).plain() for quantity in QUANTITIES}


QUANTITIES = tuple(f.name for f in fields(StreamPrecision))
CARRIES = ("acc", "l", "m")

ROUNDING_POINTS = {
    "in_q": "io",
    "in_k": "io",
    "in_v": "io",
    "in_do": "io",
    "out": "io",
    "out_dq": "io",
    "out_dk": "io",
    "out_dv": "io",
    "qk": "qk",
    "s": "s",
    "m": "m",
    "m_step": "s_minus_m",
    "rescale": "rescale",
    "s_minus_m": "s_minus_m",
    "p": "p",
    "block_sum": "block_sum",
    "l": "l",
    "l_low": "l",
    "p_operand": "p_operand",
    "pv": "pv",
    "acc": "acc",
    "acc_low": "acc",
    "o": "o",
    "lse": "lse",
    "bwd_qk": "bwd_s",
    "bwd_s": "bwd_s",
    "bwd_p": "bwd_p",
    "dp": "dp",
    "delta_prod": "delta_prod",
    "delta_sum": "delta_sum",
    "ds": "ds",
    "merge_lse": "lse",
    "merge_keep": "rescale",
    "merge_add": "rescale",
    "merge_o": "acc",
    "dx": "ds",
}
"""Every rounding point and the quantity whose precision it has; its place here numbers its random stream."""


@dataclass(frozen=True)
class StreamRepair:
    """Source-local repairs of streaming attention, and gains of its error; the defaults change nothing.

    delta: what the backward subtracts from dP. "o": rowsum(dO * O) with the output as returned (what stock
        kernels do). "o_fp32": the same with the output before it was rounded. "p": sum(P * dP) / sum(P) in
        fp32, from the P and dP that make dS, so that rows of dS sum to zero.
    lse: "rounded": m + log(l) of the recurrence. "exact": log-sum-exp of the scores before any rounding.
    compensated: acc and l are each carried as a pair of numbers at the carry's precision, the second holding
        the rounding error of the first; it is rescaled with it and added back at the next tile and at the
        end.
    tied_max_beta: the tied-maximum shift of arXiv 2510.04212, beta in [2, 8], or None. Where a row's maximum
        r is attained more than once within a tile, the tile's maximum is replaced by beta * r (r > 0) or 0 (r
        < 0), so that no exponential is exactly 1. Where (beta - 1) * r >= 80 or r <= -80 the exponentials
        would underflow: the tile keeps r, and is counted in the statistics as `tied_fallbacks`.
    delta_gain: delta becomes exact + gain * (delta - exact) in fp32, exact being the "p" value above.
    out_gain: the output becomes exact + gain * (output - exact) in fp32 before it is rounded to `io`, exact
        being softmax attention on the same inputs without the rounded recurrence.
    """

    delta: str = "o"
    lse: str = "rounded"
    compensated: bool = False
    tied_max_beta: float | None = None
    delta_gain: float = 1.0
    out_gain: float = 1.0

    def __post_init__(self) -> None:
        for key, allowed in (("delta", ("o", "o_fp32", "p")), ("lse", ("rounded", "exact"))):
            if getattr(self, key) not in allowed:
                raise BadInput(f"repair: {key} = {getattr(self, key)!r}; allowed: {', '.join(allowed)}")
        if not isinstance(self.compensated, bool):
            raise BadInput(f"repair: compensated = {self.compensated!r}; allowed: true, false")
        beta = self.tied_max_beta
        if beta is not None and not (_is_number(beta) and 2 <= beta <= 8):
            raise BadInput(f"repair: tied_max_beta = {beta!r}; allowed: none, or a number from 2 to 8")
        for key in ("delta_gain", "out_gain"):
            _check_gain(getattr(self, key), "repair", key)

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> StreamRepair:
        """From any of the fields by name; those left out keep their defaults."""
        _reject_unknown("repair", given, tuple(f.name for f in fields(cls)))
        return cls(**given)

    def to_dict(self) -> dict[str, Any]:
        """Every field by name (ready for YAML and JSON)."""
        return asdict(self)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
