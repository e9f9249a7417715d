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
    """At once the loss jumps, over some steps hardly; afterwards it is that of the unguarded model again."""
    unguarded, at_once, ten, fifty = lines("hand_over")
    jump = at_once["first"] - unguarded["first"]
    assert jump > 0.01 and at_once["worst"] > unguarded["worst"] + jump / 2
    for gradual in (ten, fifty):
        assert abs(gradual["first"] - unguarded["first"]) < jump / 10
        assert gradual["worst"] < unguarded["worst"] + jump / 10
    for found in (at_once, ten, fifty):
        assert found["max_logit"] <= 4 * (1 + 1e-5) < unguarded["max_logit"]
        assert abs(found["last_10"] - unguarded["last_10"]) < jump / 2
