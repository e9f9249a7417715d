"""QK-Clip against its definition, computed by hand, and on our own attention."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from qkpipe.config.models import AttentionConfig, ModelConfig
from qkpipe.errors import BadInput
from qkpipe.guard import QKGuard, max_logit_per_head
from qkpipe.model.transformer import Transformer
from qkpipe.rivals.qk_clip import QKClip, QKProjections
from tiny_training import equal_bits


def layer(n_heads=2, n_kv_heads=2, bias=False):
    """Every weight is 1; two dimensions a head."""
    made = [nn.Linear(3, 2 * heads, bias=bias) for heads in (n_heads, n_kv_heads)]
    for parameter in (p for linear in made for p in linear.parameters()):
        nn.init.ones_(parameter)
    return QKProjections(*made, n_heads, n_kv_heads)


def clipped(projections, *observed, **options):
    """Weights of one layer, head by head, after a step with these maxima (each of one forward)."""
    optimizer = torch.optim.SGD(projections.W_Q.parameters(), lr=0.1)
    clip = QKClip([projections], optimizer, threshold=100.0, **options)
    for max_logit in observed:
        clip.observe(0, torch.tensor(max_logit))
    optimizer.step()
    return [W.weight[::2, 0].tolist() for W in (projections.W_Q, projections.W_K)]


def test_a_head_past_the_threshold_takes_the_root_of_gamma_on_both_sides():
    W_Q, W_K = clipped(layer(), [50.0, 400.0])
    assert W_Q == W_K == pytest.approx([1.0, 0.5]), "gamma = 100/400, its root 1/2"


@pytest.mark.parametrize("harmless", [-400.0, 0.0, 100.0, math.nan, math.inf, -math.inf])
def test_no_other_maximum_touches_a_weight(harmless):
    assert clipped(layer(), [harmless, 50.0]) == [[1.0, 1.0], [1.0, 1.0]]


def test_the_largest_of_all_forwards_counts_and_only_of_this_step():
    projections = layer()
    assert clipped(projections, [400.0, 0.0], [50.0, 100.0])[0] == pytest.approx([0.5, 1.0])
    assert clipped(projections)[0] == pytest.approx([0.5, 1.0]), "a step without a forward clips nothing"


def test_a_nan_in_one_micro_batch_is_not_forgotten():
    assert clipped(layer(), [math.nan, 0.0], [400.0, 0.0])[0] == [1.0, 1.0]


def test_grouped_heads_each_shrink_by_their_own_gamma():
    """Key heads of two query heads each; gammas (1/4, 1) and (1/16, 1/4): keys take the root of the smaller one."""
    queries, keys = clipped(layer(4, 2), [400.0, 50.0, 1600.0, 400.0])
    assert keys == pytest.approx([0.5, 0.25])
    assert queries == pytest.approx([0.5, 2.0, 0.25, 1.0])
    products = [q * keys[h // 2] for h, q in enumerate(queries)]
    assert products == pytest.approx([1 / 4, 1, 1 / 16, 1 / 4])


def test_a_bias_is_scaled_with_its_weight():
    projections = layer(bias=True)
    clipped(projections, [400.0, 0.0])
    assert projections.W_K.bias.tolist() == pytest.approx([0.5, 0.5, 1.0, 1.0])


def test_the_callback_names_the_layer_and_its_gammas():
    seen = []
    clipped(layer(), [400.0, 0.0], on_clip=lambda *what: seen.append(what))
    ((index, peak, gamma),) = seen
    assert (index, peak.tolist(), gamma.tolist()) == (0, [400.0, 0.0], [0.25, 1.0])


ATTENTIONS = {"sdpa": {}, "stream": {"kind": "streaming", "tile": 4}}


def model(attention="sdpa", **changes):
    sizes = {"d_model": 16, "n_layers": 2, "n_heads": 4, "context": 8, **changes}
    made = Transformer(ModelConfig(**sizes), AttentionConfig(**ATTENTIONS[attention]), vocab_size=32)
    made.initialise(0)
    with torch.no_grad():
        for attention_layer in made.attentions:
            attention_layer.W_Q.weight.mul_(40)
    return made


def batch():
    return torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(1))


def peaks(watched):
    """Largest logit of each head of the first layer on the batch, by hand."""
    attention = watched.attentions[0]
    x = watched.blocks[0].norm_attention(watched.embed(batch()) + watched.position.weight[:8])
    return max_logit_per_head(*attention.queries_keys(x), attention.scale)


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("kv", [4, 2])
def test_on_our_attention_the_logits_come_down_to_the_threshold(attention, kv):
    watched = model(attention, n_kv_heads=kv)
    before = peaks(watched).detach()
    tau = float(before.median())
    optimizer = torch.optim.SGD(watched.parameters(), lr=0.0)
    QKClip(watched, optimizer, threshold=tau)
    watched.train()
    watched(batch(), batch()).backward()
    optimizer.step()
    above = before > tau
    assert above.any() and not above.all()
    assert torch.allclose(peaks(watched)[above], torch.tensor(tau), rtol=1e-5)
    if kv == 4:  # else a head shares its key with one that was clipped
        assert equal_bits(peaks(watched)[~above], before[~above])


@pytest.mark.parametrize("unseen", ["evaluation", "clean pass"])
def test_what_is_no_training_forward_is_not_seen(unseen):
    watched = model("stream")
    optimizer = torch.optim.SGD(watched.parameters(), lr=0.0)
    QKClip(watched, optimizer, threshold=1e-6)
    before = watched.attentions[0].W_Q.weight.clone()
    if unseen == "evaluation":
        watched.eval()
        watched(batch(), batch())
    else:
        with watched.clean_pass():
            watched.train()(batch(), batch())
    for p in watched.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert equal_bits(watched.attentions[0].W_Q.weight, before)


def test_detached_it_is_not_there():
    watched = model()
    optimizer = torch.optim.SGD(watched.parameters(), lr=0.0)
    clip = QKClip(watched, optimizer, threshold=1e-6)
    clip.detach()
    before = watched.attentions[0].W_Q.weight.clone()
    watched(batch(), batch()).backward()
    optimizer.step()
    assert equal_bits(watched.attentions[0].W_Q.weight, before)


def test_refused():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    with pytest.raises(BadInput, match="found no attention to watch in Linear"):
        QKClip(nn.Linear(2, 2), optimizer)
    with pytest.raises(BadInput, match="normalises queries and keys"):
        QKClip(model(qk_norm="unit_rms"), optimizer)
    with pytest.raises(BadInput, match="threshold must be above 0, got 0"):
        QKClip([layer()], optimizer, threshold=0)


class Theirs(nn.Module):
    """Attention as others write it."""

    def __init__(self, heads=4, kv_heads=4, fused=False):
        super().__init__()
        self.heads, self.kv_heads, self.fused = heads, kv_heads, fused
        if fused:
            self.c_attn = nn.Linear(16, 48)
        else:
            self.q_proj, self.k_proj, self.v_proj = (
                nn.Linear(16, 4 * n) for n in (heads, kv_heads, kv_heads)
            )

    def qkv(self, x):
        parts = (
            self.c_attn(x).split(16, -1)
            if self.fused
            else [W(x) for W in (self.q_proj, self.k_proj, self.v_proj)]
        )
        return [part.unflatten(-1, (-1, 4)).transpose(1, 2) for part in parts]

    def forward(self, x):
        q, k, v = self.qkv(x)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads != self.kv_heads)
        return out.transpose(1, 2).flatten(2)


def their_model(**options):
    torch.manual_seed(0)
    layers = nn.Sequential(*(Theirs(**options) for _ in range(2)))
    with torch.no_grad():
        for attention in layers:
            (attention.c_attn if options.get("fused") else attention.q_proj).weight[:16].mul_(20)
    return layers, torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("options", [{}, {"kv_heads": 2}, {"fused": True}], ids=["apart", "grouped", "fused"])
def test_another_model_is_sensed_without_being_told(options):
    watched, x = their_model(**options)

    def first_peaks():
        q, k, _ = watched[0].qkv(x)
        return max_logit_per_head(q, k, 0.5).detach()

    before, values = first_peaks(), watched[0].qkv(x)[2].detach()
    tau = float(before.median())
    optimizer = torch.optim.SGD(watched.parameters(), lr=0.0)
    clip = QKClip(watched, optimizer, threshold=tau)
    watched(0.1 * x)  # two micro-batches: the larger maximum counts
    watched(x).sum().backward()
    with torch.no_grad():
        watched.eval()(100 * x)
        watched.train()
    optimizer.step()
    above = before > tau
    assert above.any() and not above.all()
    assert torch.allclose(first_peaks()[above], torch.tensor(tau), rtol=1e-5)
    assert equal_bits(watched[0].qkv(x)[2].detach(), values)
    assert "qk_guard" not in watched.state_dict()
    clip.detach()


def test_another_model_is_left_as_it_was():
    watched, x = their_model()
    optimizer = torch.optim.SGD(watched.parameters(), lr=0.0)
    kernel = F.scaled_dot_product_attention
    plain = watched(x)
    clip = QKClip(watched, optimizer, threshold=1e-6)
    assert equal_bits(watched(x), plain)
    clip.detach()
    assert F.scaled_dot_product_attention is kernel
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in watched.modules())
    QKGuard(watched).detach()


def test_another_model_whose_projections_are_unknown_is_refused():
    watched, x = their_model()
    optimizer = torch.optim.SGD(watched.parameters(), lr=0.0)
    watched[0].q_norm, watched[1].q_norm = nn.Identity(), nn.LayerNorm(4)
    QKClip(watched, optimizer)
    watched(x).sum().backward()
    with pytest.raises(BadInput, match="1 normalises queries and keys"):
        optimizer.step()
    assert not watched._forward_hooks, "taken off"


def test_another_model_that_attends_by_itself_is_refused():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.q_proj, self.k_proj = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return torch.softmax(self.q_proj(x) @ self.k_proj(x).mT, -1) @ x

    watched = Own()
    optimizer = torch.optim.SGD(watched.parameters(), lr=0.0)
    QKClip(watched, optimizer)
    watched(torch.randn(2, 3, 4)).sum().backward()
    with pytest.raises(BadInput, match="no attention in the model could be intercepted"):
        optimizer.step()
