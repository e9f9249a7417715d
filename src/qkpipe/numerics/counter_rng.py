"""A stateless 32-bit random number for every (seed, stream, counter).

Stochastic rounding needs draws that a PyTorch reference, a compiled CPU loop and a Triton kernel reproduce
bit for bit, in any order and from any number of threads; a generator with a state cannot give that. So a draw
is a hash, built from 32-bit integer operations alone:

    k1 = mix(mix(seed + A) ^ stream)          one key a round, both depending on seed and stream
    k2 = mix(mix(seed ^ B) + stream)
    u  = mix(mix(counter ^ k1) + k2)          all arithmetic modulo 2^32

`mix` is "lowbias32", the xor-shift-multiply finalizer that C. Wellons found by search (hash-prospector,
public domain), of lower avalanche bias than murmur3's. One round of it on a counter would do for noise; the
second, with a key of its own, keeps two streams from being the same sequence with its counters permuted. For
a fixed (seed, stream) the map is a bijection of the counter: 2^32 counters give every value exactly once. Not
for cryptography.
"""

import numpy as np
import torch

from qkpipe.errors import BadInput
from qkpipe.numerics._numba import helper

_MASK = 0xFFFFFFFF
_A = 0x9E3779B9  # 2^32 / golden ratio
_B = 0x85EBCA6B
_M1 = 0x7FEB352D
_M2 = 0x846CA68B


def _mix(h):
    """lowbias32 on values in [0, 2^32): a Python int or an int64 tensor (whose products wrap modulo 2^64)."""
    h = h ^ (h >> 16)
    h = (h * _M1) & _MASK
    h = h ^ (h >> 15)
    h = (h * _M2) & _MASK
    return h ^ (h >> 16)


def stream_keys(seed: int, stream: int) -> tuple[int, int]:
    """The two round keys (k1, k2) of a stream, u32 values.

    Raises BadInput when seed or stream is outside [0, 2^32).
    """
    for name, value in (("seed", seed), ("stream", stream)):
        if not 0 <= value <= _MASK:
            raise BadInput(f"{name}={value}: a counter-based draw takes an integer in [0, 2^32)")
    seed, stream = int(seed), int(stream)
    k1 = _mix(_mix((seed + _A) & _MASK) ^ stream)
    k2 = _mix((_mix(seed ^ _B) + stream) & _MASK)
    return k1, k2


def fold_in(stream: int, *tags: int) -> int:
    """A stream number for a place in the study, such as (step, layer, quantity): u32, order matters.

    Distinct tags collide with probability 2^-32 a pair, as any 32-bit hash does.
    """
    for tag in tags:
        stream = stream_keys(stream, tag & _MASK)[0]
    return stream


def hash_u32(seed: int, stream: int, counter: torch.Tensor) -> torch.Tensor:
    """Draw one u32 value a counter: the reference.

    Args:
        seed, stream: integers in [0, 2^32).
        counter: int64 tensor of any shape, taken modulo 2^32.

    Returns:
        int64 tensor of counter's shape and device, values in [0, 2^32).
    """
    k1, k2 = stream_keys(seed, stream)
    h = _mix((counter & _MASK) ^ k1)
    return _mix((h + k2) & _MASK)


# The same on uint32 scalars for compiled loops. numba widens uint32 arithmetic to 64 bits, hence the casts;
# LLVM narrows it again and vectorises.


@helper
def mix_nb(h):
    """lowbias32: uint32 -> uint32."""
    h = np.uint32(h ^ (h >> np.uint32(16)))
    h = np.uint32(h * np.uint32(_M1))
    h = np.uint32(h ^ (h >> np.uint32(15)))
    h = np.uint32(h * np.uint32(_M2))
    return np.uint32(h ^ (h >> np.uint32(16)))


@helper
def stream_keys_nb(seed, stream):
    """(k1, k2) of `stream_keys`, uint32: call it outside the loop."""
    seed = np.uint32(seed)
    stream = np.uint32(stream)
    k1 = mix_nb(np.uint32(mix_nb(np.uint32(seed + np.uint32(_A))) ^ stream))
    k2 = mix_nb(np.uint32(mix_nb(np.uint32(seed ^ np.uint32(_B))) + stream))
    return k1, k2


@helper
def draw_nb(k1, k2, counter):
    """The draw at a uint32 counter under the keys (k1, k2): uint32."""
    h = mix_nb(np.uint32(np.uint32(counter) ^ k1))
    return mix_nb(np.uint32(h + k2))


@helper
def hash_u32_nb(seed, stream, counter):
    """`hash_u32` on uint32 scalars: the same bits."""
    k1, k2 = stream_keys_nb(seed, stream)
    return draw_nb(k1, k2, counter)
