"""Compile launches for GPUs that are not there, and read what the compiler made of them.

Runs in a process of its own without TRITON_INTERPRET (under the interpreter there is nothing to compile).
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
SHARED_LIMIT = {
    80: 166912,
    90: 232448,
    100: 232448,
}  # bytes a block may ask for (CUDA programming guide, 16.2)
TENSOR_CORE = ("mma.sync", "wgmma.mma_async", "tcgen05.mma")
_TYPES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.int32: "*i32",
    torch.uint8: "*u8",
}


def source_of(launch) -> ASTSource:
    """What triton.jit would compile for this launch, with its specialisation of sizes divisible by 16."""
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        if parameter.is_constexpr or value is None or (value == 1 if type(value) is int else False):
            fixed = parameter.is_constexpr or not parameter.do_not_specialize
            if fixed:
                signature[parameter.name] = "constexpr"
                constants[(index,)] = value
                continue
        if isinstance(value, torch.Tensor):
            signature[parameter.name] = _TYPES[value.dtype]
            aligned = True
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
            aligned = False
        else:
            signature[parameter.name] = "i32"
            aligned = value % 16 == 0 and not parameter.do_not_specialize
        if aligned:
            attributes[(index,)] = [["tt.divisibility", 16]]
    return ASTSource(launch.kernel, signature, constants, attributes)


def compile_for(launch, capability: int) -> dict:
    """Registers a thread, bytes of stack (spills) a thread and of shared memory a block, tensor-core instructions."""
    target = GPUTarget("cuda", capability, 32)
    compiled = triton.compile(source_of(launch), target=target, options=launch.options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        usage = subprocess.run(
            [CUOBJDUMP, "-res-usage", cubin.name], capture_output=True, text=True, check=True
        )
    numbers = dict(re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", usage.stdout))
    return {
        "kernel": launch.kernel.__name__,
        "capability": capability,
        "registers": int(numbers["REG"]),
        "stack": int(numbers["STACK"]) + int(numbers["LOCAL"]),
        "shared": compiled.metadata.shared,
        "shared_limit": SHARED_LIMIT[capability],
        "tensor_core": sum(compiled.asm["ptx"].count(name) for name in TENSOR_CORE),
        "wgmma": compiled.asm["ptx"].count("wgmma.mma_async"),
        "mxf4": compiled.asm["ptx"].count("kind::mxf4"),
    }


def attention_launches(D: int, capability: int, precision, operands="bf16", tile=64, repair=None, norm=False):
    """The launches of a forward and a backward with every statistic, T = 1024."""
    from qkpipe_kernels.attention import Inputs, Options, backward_launches, forward_launch

    from qkpipe.numerics.precision import StreamRepair

    T = 1024
    options = Options(
        scale=D**-0.5,
        tile=tile,
        precision=precision,
        repair=repair or StreamRepair(),
        operands=operands,
        sense=True,
        entropy=True,
        residual=True,
    )
    dtype = torch.bfloat16 if precision.io.bits <= 7 else torch.float32
    x, rows = torch.empty(1, 2, T, D, dtype=dtype), torch.empty(1, 2, T)
    inputs = Inputs(x, x, x, rows if norm else None, rows if norm else None)
    forward = forward_launch(inputs, options, dtype, capability)
    return [forward, *backward_launches(inputs, x, rows, x, options, dtype, capability)]


def launches(case: str, D: int, capability: int) -> list:
    from qkpipe_kernels.mx import quantize_launch
    from qkpipe_kernels.mxfp4_gemm import gemm_launch

    from qkpipe.numerics.precision import StreamPrecision, StreamRepair

    if case == "mx":
        x, codes, scales = torch.empty(64, 1024), torch.empty(64, 512).byte(), torch.empty(64, 32).byte()
        found = [gemm_launch(codes, scales, codes, scales, capability)]
        for rounding in ("even", "stochastic"):
            for fmt in ("mxfp4", "nvfp4"):
                found.append(
                    quantize_launch(x, fmt, -1, "floor", rounding, 0, 0, values=x, gain=2.0, error=x)
                )
        found.append(quantize_launch(x.mT.contiguous(), "mxfp4", 0, "rceil", "even", 0, 0, codes=codes, scales=scales,
                                     pack=True))  # fmt: skip
        return found
    healthy, uniform = StreamPrecision(io=7), StreamPrecision.uniform
    arguments = {
        "healthy": {"precision": healthy},
        "healthy-norm": {"precision": healthy, "norm": True},
        "carries": {"precision": StreamPrecision.carries(7)},
        "uniform": {"precision": uniform(7)},
        "uniform-tile512": {"precision": uniform(7), "tile": 512},
        "stochastic": {"precision": uniform(7, mode="stochastic")},
        "repairs": {"precision": uniform(7), "repair": StreamRepair("p", "exact", True)},
        "tile24-tied": {"precision": uniform(7), "tile": 24, "repair": StreamRepair(tied_max_beta=4.0)},
        "out-gain": {"precision": uniform(7), "repair": StreamRepair(out_gain=4.0)},
        "exact": {"precision": StreamPrecision.carries(7), "operands": "exact"},
        "fp32": {"precision": StreamPrecision(), "operands": "exact"},
    }
    return attention_launches(D, capability, **arguments[case])


def launches_of_the_device_check(work: str) -> list:
    """What a part of the device check would launch on a GPU of capability 9.0, each program once.

    Nothing runs: launches are written down instead, and references, which only the results need, are zeros.
    """
    from qkpipe_kernels import device_parts as parts
    from qkpipe_kernels.launch import Launch

    from qkpipe.numerics import dispatch, streaming

    found = {}

    def write_down(launch):
        source = source_of(launch)
        found.setdefault((launch.kernel.__name__, source.hash(), str(launch.options)), launch)

    def zeros(q, k, v, *_, **__):
        return tuple(torch.zeros_like(x, dtype=torch.float32) for x in (q, q, k, v))

    Launch.run = write_down
    parts._plain = zeros
    parts._float64 = lambda q, k, v, *_: (zeros(q, k, v), torch.zeros(q.shape[:2]), torch.zeros(q.shape[:2]))
    cpu, clock = torch.device("cpu"), parts.Clock(math.inf)
    if work == "gpt2":
        settings = [o for o in parts.RESIDUAL.values() if "sdpa" not in o]
        settings = [parts.Attention(**options) for options in settings]
        settings.append(parts.Attention(torch.zeros(1, dtype=torch.int32), **parts.ACCELERATED))
        for attend in settings:
            qkv = torch.empty(8, 1024, 3, 12, 64, dtype=torch.bfloat16, requires_grad=True)
            out = attend(*(qkv[:, :, i].transpose(1, 2) for i in range(3)))
            out.transpose(1, 2).reshape(8, 1024, -1).backward(torch.empty(8, 1024, 768, dtype=torch.bfloat16))
        # The statistics of SDPA, as `attention_stats` calls for them.
        q = torch.empty(8, 12, 1024, 64)
        call = streaming.Call(
            True, 0.125, 1024, parts.StreamPrecision(), parts.StreamRepair(lse="exact"), 0, True, True
        )
        _, _, lse = dispatch.forward(q, q, q, call, None)
        dispatch.backward(q, q, q, q, lse, q, call, None)
    elif work == "quantizers":
        parts.QUANTIZED = (256, 8192)
        parts._timed = lambda work: {"p50": [1.0, work()][0]}
        for dtype in (torch.float32, torch.bfloat16):
            for _ in parts._time_quantizers(dtype, cpu, clock):
                pass
    else:
        for _ in parts.WORKS[work](cpu, False, clock):
            pass
    return list(found.values())


if __name__ == "__main__":
    if sys.argv[1] == "device":
        found = launches_of_the_device_check(sys.argv[2])
        print(json.dumps([compile_for(launch, 90) for launch in found]))
        sys.exit()
    case, capability, *head_dims = sys.argv[1:]
    print(json.dumps([
        compile_for(launch, int(capability)) for D in head_dims for launch in launches(case, int(D), int(capability))
    ]))  # fmt: skip
