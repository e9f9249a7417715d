"""The examples run as a reader would run them, and do what they say."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def lines(name):
    """The JSON lines an example prints."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / f"{name}.py")],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{os.environ.get('PYTHONPATH', '')}"},
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.parametrize(
    ("name", "layers", "bound"),
    [("guard_torch", ["1.self_attn"], 8**0.5), ("guard_nanogpt", ["h.0.attn", "h.1.attn"], 8**0.5)],
)
def test_training(name, layers, bound):
    [found] = lines(name)
    assert found["fired"] and found["layers"] == layers
    assert found["max_logit"] <= bound * (1 + 1e-5)
    assert found.get("resumed", True)


def test_hugging_face():
    pytest.importorskip("transformers")
    found = lines("guard_huggingface")
    assert [line["model"] for line in found] == ["GPT2LMHeadModel", "LlamaForCausalLM"]
    for line in found:
        assert line["fired"] and line["loaded"] and len(line["layers"]) == 2
        assert line["max_logit"] <= 8**0.5 * (1 + 1e-5)


def test_flex():
    [found] = lines("guard_flex")
    assert found["fired"] and found["max_logit"][found["step"]] > 3
    assert max(found["max_logit"][found["step"] + 1 :]) <= 16**0.5 * (1 + 1e-5)


@pytest.mark.slow
def test_hand_over():
    """The gentler the hand-over, the smaller the jump."""
    unguarded, at_once, ten, fifty = lines("hand_over")
    assert unguarded["worst"] < fifty["worst"] < ten["worst"] <= at_once["worst"]
    assert at_once["first"] > at_once["before"]
