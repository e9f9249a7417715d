"""Kernels run under Triton's interpreter, which has to be chosen before they are imported."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import torch


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
