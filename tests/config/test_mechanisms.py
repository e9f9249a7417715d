"""Mechanisms are found by themselves, whichever file is imported first."""

import subprocess
import sys

import pytest

from qkpipe.config.mechanisms import mechanisms

FAMILIES = ("qkpipe.faults", "qkpipe.interventions", "qkpipe.probes")


@pytest.mark.parametrize("family", FAMILIES)
def test_kinds_name_their_classes(family):
    found = mechanisms(family)
    assert found
    assert all(cls.model_fields["kind"].default == kind for kind, cls in found.items())


def test_any_mechanism_may_be_imported_first():
    modules = sorted({cls.__module__ for family in FAMILIES for cls in mechanisms(family).values()})
    known = [sorted(mechanisms(family)) for family in FAMILIES]
    for module in modules:
        code = (
            f"import {module}, sys; from qkpipe.config.mechanisms import mechanisms; import qkpipe.config.models; "
            f"assert [sorted(mechanisms(f)) for f in {FAMILIES}] == {known}; assert 'torch' not in sys.modules"
        )
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert result.returncode == 0, f"{module} first: {result.stderr}"
