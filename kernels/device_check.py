"""The device check: what only a GPU can show, in one script of under eight minutes.

    python -m qkpipe_kernels.device_check --out results.json
    python -m qkpipe_kernels.device_check --out results.json --device cpu --quick

1. checks: every kernel against float64, and bit for bit where sums are exact; the timed settings at their own sizes.
2. benchmarks, only if every check ran and passed: p20, p50 and p80 in ms, and ratios with the floor and the goal.
3. residual: r of a GPT-2-small over 100 steps in bfloat16 under SDPA, the healthy and the faulty kernel.
4. training: a gain-accelerated faulty GPT-2-small, and the same under a guard, for as many steps as fit.

Every part runs in a process of its own (the checks in several at once, since compiling is most of their time) and is
ended at its deadline; what it had shown by then is kept, and the result file is written anew after every part. So
neither a hanging kernel nor a broken CUDA context takes the other parts along. Needs torch, triton and numpy alone. On
a CPU the kernels run under Triton's interpreter, sizes are tiny, and nothing is timed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

SCHEMA = 2
BUDGET_S = 450  # of the whole check
LIMITS_S = {"checks": 150, "benchmarks": 100, "residual": 60, "training": BUDGET_S}
PARTS = tuple(LIMITS_S)
GRACE_S = 10  # between a part's deadline, which it watches itself, and its end
ROWS = ("checks", "benchmarks", "ratios", "residual", "training", "left_out")


def main() -> int:
    """0: every check passed and every part ran; 1: not so; 2: no such device."""
    parser = argparse.ArgumentParser(description="Check and time the kernels on this machine's GPU.")
    parser.add_argument("--out", type=Path, required=True, help="JSON file of results")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, nothing timed (always so on a CPU)")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="some of the parts")
    parser.add_argument("--child", nargs=2, metavar=("WORK", "SECONDS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    device, quick = arguments.device, arguments.quick or arguments.device == "cpu"
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are imported
    if arguments.child:
        work, seconds = arguments.child
        return child(work, float(seconds), device, quick, arguments.out)
    if device == "cuda" and not _has_gpu():
        print("device_check: no CUDA device here; allowed: --device cpu --quick", file=sys.stderr)
        return 2
    results = run(device, quick, arguments.out, arguments.parts)
    failed = [row["name"] for row in results["checks"] if not row["passed"]]
    failed += [f"{row['part']}: {row['reason']}" for row in results["failed"]]
    missed = [
        f"{row['setting']} over {row['peer']}, {row['shape']}: {row['value']:.2f}, at least {row['floor']:.2f}"
        for row in results["ratios"]
        if row["passed"] is False
    ]
    print(
        f"device_check: {len(results['checks'])} checks, {len(failed)} failures, {len(missed)} below their floor"
    )
    for line in failed + missed + results["left_out"]:
        print(f"  {line}")
    return 1 if failed else 0


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def run(device: str, quick: bool, out: Path, wanted=PARTS) -> dict:
    """Every part in turn; returns what is in the result file."""
    start = time.monotonic()
    results = {
        "schema": SCHEMA,
        "quick": quick,
        "complete": False,
        "environment": {"device": platform.machine(), "cuda_device": device == "cuda",
                        "python": platform.python_version(), "torch": None, "triton": None},
        **{name: [] for name in ROWS},
        "failed": [],
        "seconds": {},
    }  # fmt: skip
    write(results, out)

    patience = 1 if device == "cuda" else 4  # the interpreter's time is the machine's, not the kernels'

    def part(name: str, works: list[str]) -> None:
        began = time.monotonic()
        seconds = min(patience * LIMITS_S[name], patience * BUDGET_S - (began - start))
        _run_children(works, seconds, device, quick, results)
        results["seconds"][name] = round(time.monotonic() - began, 1)
        write(results, out)

    for name in wanted:
        if name == "checks":
            part(name, CHECKS_QUICK if quick else CHECKS)
        elif name == "benchmarks" and quick:
            results["left_out"].append("benchmarks: not timed with tiny sizes")
        elif name == "benchmarks" and not _all_right(results):
            results["left_out"].append(
                "benchmarks: a check failed or did not run, and no speed is shown of a wrong kernel"
            )
        else:
            part(name, [name])
    results["complete"] = not (quick or results["failed"] or results["left_out"] or set(wanted) != set(PARTS))
    write(results, out)
    return results


CHECKS = ["checks D=16", "checks D=32", "checks D=64", "checks D=128", "checks timed", "checks formats"]
CHECKS_QUICK = ["checks D=16", "checks formats"]


def _all_right(results: dict) -> bool:
    whole = results["checks"] and not results["failed"] and not results["left_out"]
    return bool(whole) and all(row["passed"] for row in results["checks"])


def _run_children(works: list[str], seconds: float, device: str, quick: bool, results: dict) -> None:
    """Run works side by side, each in a process of its own, and take in what they wrote, whole or not."""
    with tempfile.TemporaryDirectory() as folder:
        running = []
        for index, work in enumerate(works):
            out, said = Path(folder) / f"{index}.json", Path(folder) / f"{index}.txt"
            command = [
                sys.executable,
                "-m",
                "qkpipe_kernels.device_check",
                "--out",
                str(out),
                "--device",
                device,
            ]
            command += ["--child", work, str(seconds)] + ["--quick"] * quick
            with said.open("w") as stream:
                process = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT)
            running.append((work, process, out, said))
        end = time.monotonic() + seconds + GRACE_S
        for work, process, out, said in running:
            reason = None
            try:
                if process.wait(max(0.0, end - time.monotonic())) != 0:
                    reason = (
                        said.read_text(errors="replace").strip() or f"exit status {process.returncode}"
                    )[-1500:]
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                reason = f"ended after {seconds + GRACE_S:.0f} s"
            if out.exists():
                found = json.loads(out.read_text())
                results["environment"] |= found["environment"]
                for name in ROWS:
                    results[name] += found[name]
            if reason is not None:
                results["failed"].append({"part": work, "reason": reason})


def child(work: str, seconds: float, device: str, quick: bool, out: Path) -> int:
    """One work of one part, in this process; every row is on disk as soon as it is known."""
    import torch
    from qkpipe_kernels import device_parts

    found = {"environment": environment(device), **{name: [] for name in ROWS}}
    write(found, out)
    clock = device_parts.Clock(seconds)
    try:
        for name, row in device_parts.WORKS[work](torch.device(device), quick, clock):
            found[name].append(row)
            write(found, out)
    except Exception:
        print(traceback.format_exc())
        return 1
    if clock.cut:
        found["left_out"].append(f"{work}: {clock.cut} (out of time)")
        write(found, out)
    return 0


def environment(device: str) -> dict:
    import torch
    import triton

    found = {"torch": torch.__version__, "triton": triton.__version__, "cuda": torch.version.cuda}
    if device == "cuda":
        found["device"] = torch.cuda.get_device_name()
        found["capability"] = ".".join(map(str, torch.cuda.get_device_capability()))
    return found


def write(results: dict, out: Path) -> None:
    """All or nothing: a reader never sees half a file."""
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(out.name + ".partial")
    partial.write_text(json.dumps(results, indent=1))
    partial.replace(out)


if __name__ == "__main__":
    sys.exit(main())
