"""Kernels run under Triton's interpreter, which has to be chosen before they are imported."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import torch

try:
    import triton
except ImportError:
    triton = None


def pytest_collection_modifyitems(items):
    if triton is None:
        skip = pytest.mark.skip(
            reason="triton is not installed: make kernels-test runs these under 3.6 and 3.9"
        )
        for item in items:
            if "tests/kernels" in str(item.path):
                item.add_marker(skip)


@pytest.fixture(autouse=True)
def _poison(monkeypatch):
    """What a kernel does not write is NaN (255 in integers), not what lay there before."""

    def poisoned(empty):
        def allocate(*args, **kwargs):
            x = empty(*args, **kwargs)
            return x.fill_(float("nan") if x.is_floating_point() else 255)

        return allocate

    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poisoned(torch.empty_like))
