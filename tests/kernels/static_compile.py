"""Compile launches for GPUs that are not there, and read what the compiler made of them.

Runs in a process of its own without TRITON_INTERPRET (under the interpreter there is nothing to compile).
"""

from __future__ import annotations

import json
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
            found.append(
                quantize_launch(x, "mxfp4", -1, "floor", rounding, 0, 0, values=x, gain=2.0, error=x)
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
        "exact": {"precision": StreamPrecision.carries(7), "operands": "exact"},
        "fp32": {"precision": StreamPrecision(), "operands": "exact"},
    }
    return attention_launches(D, capability, **arguments[case])


if __name__ == "__main__":
    case, capability, *head_dims = sys.argv[1:]
    print(json.dumps([
        compile_for(launch, int(capability)) for D in head_dims for launch in launches(case, int(D), int(capability))
    ]))  # fmt: skip
