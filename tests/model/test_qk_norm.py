"""QK-norm variants against their definitions, and in a model."""

import pytest
import torch

from qkpipe.config.models import AttentionConfig, ModelConfig
from qkpipe.guard import max_logit_per_head
from qkpipe.model.qk_norm import FullWidthRMSNorm, HeadLayerNorm
from qkpipe.model.transformer import Transformer
from tiny_training import equal_bits, tiny_trainer


def test_layernorm_by_head():
    norm = HeadLayerNorm(2, 4)
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    x = torch.tensor([[1.0, 2.0, 3.0, 6.0], [0.0, 0.0, 0.0, 8.0]]).view(1, 2, 1, 4)
    # Head 0: mean 3, variance 3.5; head 1: mean 2, variance 12.
    by_hand = torch.stack(
        [torch.tensor([-2.0, -1.0, 0.0, 3.0]) / 3.5**0.5, torch.tensor([-2.0, -2.0, -2.0, 6.0]) / 12**0.5]
    ) * torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert torch.allclose(norm(x).view(2, 4), by_hand, atol=1e-5)


def test_rms_over_the_full_width():
    norm = FullWidthRMSNorm(2, 2)
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    x = torch.tensor([[1.0, 1.0], [3.0, 5.0]]).view(1, 2, 1, 2)  # RMS of (1, 1, 3, 5) is 3
    assert torch.allclose(norm(x).flatten(), torch.tensor([1.0, 2.0, 9.0, 20.0]) / 3, atol=1e-5)


@pytest.mark.parametrize("qk_norm", ["layernorm", "rms_full"])
@pytest.mark.parametrize("position", ["learned", "rope"])
def test_in_a_model(qk_norm, position):
    """Twins of the plain model; a gain per dimension is applied before the rotation; logits do not grow with W_Q."""
    sizes = {"d_model": 16, "n_layers": 1, "n_heads": 4, "n_kv_heads": 2, "context": 8, "position": position}
    plain, normed = (
        Transformer(ModelConfig(**sizes, qk_norm=kind), AttentionConfig(), vocab_size=32)
        for kind in ("none", qk_norm)
    )
    for model in (plain, normed):
        model.initialise(0)
    ours, theirs = dict(normed.named_parameters()), dict(plain.named_parameters())
    assert all(equal_bits(p, ours[name]) for name, p in theirs.items())
    gains = set(ours) - set(theirs)
    assert gains == {f"blocks.0.attention.norm_{side}.weight" for side in "qk"}

    attention = normed.attentions[0]
    with torch.no_grad():
        for name in gains:
            ours[name].copy_(torch.rand_like(ours[name]) + 0.5)
    x = torch.randn(2, 8, 16)
    out = attention(x)
    with torch.no_grad():
        attention.W_Q.weight.mul_(1000)
    assert torch.allclose(attention(x), out, atol=1e-3)

    tokens = torch.randint(0, 32, (2, 8))
    normed(tokens, tokens).backward()
    assert all(float(ours[name].grad.abs().sum()) > 0 for name in gains)


@pytest.mark.parametrize("qk_norm", ["layernorm", "rms_full"])
def test_telemetry_has_the_logits_with_and_without_it(tmp_path, qk_norm):
    trainer = tiny_trainer(tmp_path, model={"qk_norm": qk_norm, "position": "rope", "init_std": 0.3})
    model = trainer.model
    seen = []
    model.attentions[0].register_forward_hook(
        lambda a, inputs, out: seen.append(max_logit_per_head(*a.queries_keys(inputs[0]), a.scale))
    )
    trainer.step()
    rows = [row for row in trainer.writer.tables["heads"] if row["layer"] == 0]
    assert [row["max_logit_raw"] for row in rows] == pytest.approx(seen[0].tolist(), rel=1e-4)
    assert all(row["max_logit"] != row["max_logit_raw"] for row in rows)
