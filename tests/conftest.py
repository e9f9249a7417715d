"""One thread for every test: micro runs use one, and bits may depend on it. And two ways to call the project."""

import os
import subprocess
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def qkpipe(capsys):
    """Run the command line in this process; returns (exit status, stdout, stderr)."""
    from qkpipe.cli import main

    def call(*args):
        try:
            status = main([str(arg) for arg in args])
        except SystemExit as stop:
            status = stop.code
        said = capsys.readouterr()
        return status, said.out, said.err

    return call


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
