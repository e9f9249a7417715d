"""Compile launches for GPUs that are not there, and read what the compiler made of them.

Runs in a process of its own without TRITON_INTERPRET (under the interpreter there is nothing to compile).
"""

from __future__ import annotations

import re
import subprocess
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
TENSOR_CORE = {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}
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
        "tensor_core": compiled.asm["ptx"].count(TENSOR_CORE[capability]),
    }
