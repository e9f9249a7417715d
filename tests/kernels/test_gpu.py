"""What runs on a GPU alone."""

import json
import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip(
    "triton", reason="triton is not installed: make kernels-test runs these under 3.6 and 3.9"
)


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no CUDA device here: make device-check on one that has"
)
def test_quick_device_check_on_the_gpu(tmp_path):
    out = tmp_path / "results.json"
    command = [sys.executable, "-m", "qkpipe_kernels.device_check", "--out", str(out), "--quick"]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert json.loads(out.read_text())["environment"]["cuda_device"]
