"""The benchmark table, of this machine's operators and of a GPU's."""

import pyarrow as pa

_F, _S = pa.float64(), pa.string()
SCHEMA = pa.schema(
    {
        "operator": _S, "setting": _S, "peer": _S, "gate": pa.bool_(),
        "p20_ms": _F, "p50_ms": _F, "p80_ms": _F, "peer_p20_ms": _F, "peer_p50_ms": _F, "peer_p80_ms": _F,
        "ratio": _F, "floor": _F, "goal": _F,
        "flops": _F, "bytes": _F, "flop_fraction": _F, "byte_fraction": _F,
        "ceiling_gflops": _F, "ceiling_gbytes": _F,
        "device": _S, "threads": pa.int64(), "torch": _S, "triton": _S, "numba": _S, "python": _S,
    }.items(),
    metadata={"qkpipe.schema_version": "2"},
)  # fmt: skip
"""One row a case. ratio: time over the peer's (below 1: faster), from p20 on a CPU, where other work only ever adds time, and
from medians on a GPU. floor, goal: of the peer's speed, that the kernels must and should reach. *_fraction: of the measured
ceiling, where the definition's flops or bytes are known. ceiling_*: measured in the same process. gate: the result was
right; where it is false, times are null.
"""
