"""Starts a run's ranks. Imports no torch: torchrun's processes do."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from qkpipe.config.models import RunConfig


def become_torchrun(run: RunConfig, arguments: Sequence[str]) -> None:
    """Replace this process by a torchrun whose ranks call ``qkpipe`` with ``arguments``, where ``run`` wants several ranks.

    Returns where it wants one, and inside a rank. The ranks are on this machine; for more machines call torchrun yourself. A rank
    that dies ends the others and the job, which goes on from the checkpoint when called again.
    """
    if run.parallel.ranks == 1 or "WORLD_SIZE" in os.environ:
        return
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={run.parallel.ranks}"]
    os.environ.setdefault("OMP_NUM_THREADS", str(run.train.threads))
    os.execv(sys.executable, [sys.executable, *torchrun, "-m", "qkpipe", *arguments])
