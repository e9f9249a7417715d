"""One thread for every test: micro runs use one, and bits may depend on it. And the command line, called in this process."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest


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
