"""The device check: what only a GPU can show, in one script of under eight minutes.

    python -m qkpipe_kernels.device_check --out results.json
    python -m qkpipe_kernels.device_check --out results.json --device cpu --quick

1. checks: every kernel against float64, and bit for bit where sums are exact.
2. benchmarks, only if every check passed: rows with p20, p50 and p80 in ms, and ratios with the floor and the goal.
3. residual: r of a GPT-2-small over 100 steps in bfloat16 under SDPA, the healthy and the faulty kernel.
4. training: a gain-accelerated faulty GPT-2-small, and the same under a guard, for as many steps as fit.

The result file is written anew after every part, so that an interrupted check keeps what it has. Needs torch, triton
and numpy alone. On a CPU the kernels run under Triton's interpreter, sizes are tiny, and nothing is timed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from pathlib import Path

BUDGET_S = 450  # of the whole check
SCHEMA = 1


def main() -> int:
    parser = argparse.ArgumentParser(description="Check and time the kernels on this machine's GPU.")
    parser.add_argument("--out", type=Path, required=True, help="JSON file of results")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, nothing timed (always so on a CPU)")
    arguments = parser.parse_args()
    if arguments.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are imported
    import torch

    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("device_check: no CUDA device here; allowed: --device cpu --quick", file=sys.stderr)
        return 2
    results = run(torch.device(arguments.device), arguments.quick or arguments.device == "cpu", arguments.out)
    failed = [row["name"] for row in results["checks"] if not row["passed"]]
    missed = [row["name"] for row in results["ratios"] if not row["passed"]]
    print(
        f"device_check: {len(results['checks'])} checks, {len(failed)} failed; {len(missed)} ratios below their floor"
    )
    for name in failed + missed:
        print(f"  {name}")
    return 1 if failed else 0


def run(device, quick: bool, out: Path) -> dict:
    from qkpipe_kernels import device_parts as parts

    start = time.monotonic()
    results = {
        "schema": SCHEMA,
        "quick": quick,
        "environment": environment(device),
        "checks": [],
        "benchmarks": [],
        "ratios": [],
        "residual": [],
        "training": [],
        "left_out": [],
        "seconds": {},
    }

    def part(name: str, work) -> None:
        began = time.monotonic()
        work()
        results["seconds"][name] = round(time.monotonic() - began, 1)
        write(results, out)

    part("checks", lambda: results["checks"].extend(parts.checks(device, quick)))
    if quick:
        results["left_out"].append("benchmarks: not timed with tiny sizes")
    elif not all(row["passed"] for row in results["checks"]):
        results["left_out"].append("benchmarks: a check failed, and no speed is shown of a wrong kernel")
    else:
        part("benchmarks", lambda: parts.benchmarks(device, results["benchmarks"], results["ratios"]))
    part("residual", lambda: results["residual"].extend(parts.residual(device, quick)))
    left = BUDGET_S - (time.monotonic() - start)
    part("training", lambda: results["training"].extend(parts.training(device, quick, left)))
    return results


def environment(device) -> dict:
    import torch
    import triton

    found = {
        "device": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
    }
    if device.type == "cuda":
        found["device"] = torch.cuda.get_device_name(device)
        found["capability"] = ".".join(map(str, torch.cuda.get_device_capability(device)))
    return found


def write(results: dict, out: Path) -> None:
    """All or nothing: a reader never sees half a file."""
    partial = out.with_name(out.name + ".partial")
    partial.write_text(json.dumps(results, indent=1))
    partial.replace(out)


if __name__ == "__main__":
    sys.exit(main())
