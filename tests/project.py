"""This repository, and its workflow as a command."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def snakemake_command(folder, *args):
    """This repository's workflow with its results under ``folder``."""
    command = [sys.executable, "-m", "snakemake", "--snakefile", str(ROOT / "Snakefile"), "--cores", "2"]
    profile = ["--workflow-profile", str(ROOT / "profiles" / "default")]
    return [*command, *profile, "--directory", str(folder), *map(str, args)]


def run_snakemake(folder, *args, timeout=400):
    """Run it to its end; returns the completed process."""
    return subprocess.run(
        snakemake_command(folder, *args),
        capture_output=True,
        text=True,
        timeout=timeout,
        stdin=subprocess.DEVNULL,
    )
