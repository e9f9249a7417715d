"""Everything here runs on the Slurm that ``tests/slurm/local_slurm`` has started; without it, it is skipped."""

import os
import subprocess
from pathlib import Path

import pytest

from slurm.accidents import Accident

OURS = Path("/tmp/qkpipe-slurm/slurm.conf")


def pytest_collection_modifyitems(items):
    here = [item for item in items if Path(__file__).parent in item.path.parents]
    configured = os.path.realpath("/etc/slurm/slurm.conf") == str(OURS)
    up = configured and subprocess.run(["sinfo", "-h"], capture_output=True).returncode == 0
    for item in here if not up else ():
        item.add_marker(pytest.mark.skip(reason="no local Slurm is running: make test-slurm starts one"))


@pytest.fixture(scope="session")
def unbroken(tmp_path_factory):
    """The accidents' run without one, trained here; and the data that all of them share."""
    from qkpipe.train.run import train_run

    plain = Accident(tmp_path_factory.mktemp("unbroken"), None)
    train_run(plain.study.resolve("first", 0), plain.paths, progress=False)
    return plain


@pytest.fixture
def accident(tmp_path, unbroken):
    """Makes an :class:`Accident`; whatever it leaves running is ended."""
    made = []

    def make(**resources):
        made.append(Accident(tmp_path / f"study-{len(made)}", unbroken.paths.results / "data", **resources))
        return made[-1]

    yield make
    for study in made:
        study.close()
