"""sigma-Reparam against its definition."""

import pytest
import torch
from torch import nn

from qkpipe.errors import BadInput
from qkpipe.model.sigma_reparam import SigmaReparam, sigma_reparam
from tiny_training import STREAM, equal_bits, tiny_trainer, weights


def weight():
    """Singular values 4 and 1, directions that are not the axes'."""
    U, V = (torch.linalg.qr(torch.randn(n, 2, generator=torch.Generator().manual_seed(n))).Q for n in (3, 5))
    return nn.Parameter(U @ torch.diag(torch.tensor([4.0, 1.0])) @ V.mT)


def test_the_spectral_norm_is_gamma():
    W = weight()
    reparam = SigmaReparam(W)
    assert torch.allclose(reparam(W), W / 4, atol=1e-6)
    with torch.no_grad():
        reparam.gamma.fill_(2.5)
    assert float(torch.linalg.matrix_norm(reparam(W).detach(), ord=2)) == pytest.approx(2.5, rel=1e-5)


def test_one_power_iteration_a_training_forward():
    W = weight()
    reparam = SigmaReparam(W)
    with torch.no_grad():
        W.copy_(W.flip(0) * 3)
    v = reparam.v.clone()
    u = nn.functional.normalize(W @ v, dim=0)
    v = nn.functional.normalize(W.mT @ u, dim=0)
    sigma = u @ W @ v
    assert equal_bits(reparam(W), W * (reparam.gamma / sigma))
    assert equal_bits(reparam.u, u.detach()) and equal_bits(reparam.v, v.detach())


@pytest.mark.parametrize("held", ["evaluation", "not advancing"])
def test_it_moves_in_training_alone(held):
    reparam, other = SigmaReparam(weight()), nn.Parameter(torch.randn(3, 5))
    before = reparam.u.clone()
    if held == "evaluation":
        reparam.eval()
    else:
        reparam.advancing = False
    reparam(other)
    assert equal_bits(reparam.u, before)
    reparam.train()
    reparam.advancing = True
    reparam(other)
    assert not equal_bits(reparam.u, before)


def test_the_gradient_passes_through_sigma_with_u_and_v_constant():
    W = weight()
    reparam = SigmaReparam(W).eval()
    dY = torch.randn(3, 5, generator=torch.Generator().manual_seed(2))
    reparam(W).backward(dY)
    sigma = 4.0
    uv = torch.outer(reparam.u, reparam.v)
    by_hand = dY / sigma - (dY * W).sum() / sigma**2 * uv
    assert torch.allclose(W.grad, by_hand.detach(), atol=1e-5)
    assert float(reparam.gamma.grad) == pytest.approx(float((dY * W.detach()).sum() / sigma), rel=1e-5)


def test_on_any_model():
    model = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 2, bias=False))
    sigma_reparam(model)
    for layer in (model[0], model[2]):
        assert float(torch.linalg.matrix_norm(layer.weight.detach(), ord=2)) == pytest.approx(1.0, abs=1e-5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model[2].parametrizations.weight[0].gamma.clone()
    model(torch.randn(3, 5)).sum().backward()
    optimizer.step()
    assert not equal_bits(model[2].parametrizations.weight[0].gamma, before)
    loaded = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 2, bias=False))
    sigma_reparam(loaded)
    loaded.load_state_dict(model.state_dict())
    x = torch.randn(3, 5)
    assert equal_bits(loaded.eval()(x), model.eval()(x))


def test_nothing_to_reparametrise():
    with pytest.raises(BadInput, match=r"found no nn.Linear in ReLU"):
        sigma_reparam(nn.ReLU())


REPARAM = {"model": {"weight_norm": "sigma_reparam"}}


def test_in_our_model_every_linear_map_of_the_blocks_has_norm_gamma(tmp_path):
    trainer = tiny_trainer(tmp_path, **REPARAM)
    plain = weights(tiny_trainer(tmp_path))
    assert all(equal_bits(p, weights(trainer)[name]) for name, p in plain.items()), "twins"
    gammas = [name for name, _ in trainer.model.named_parameters() if name not in plain]
    assert len(gammas) == 2 * 6
    trainer.step()
    assert all(float(p.detach()) != 1.0 for name, p in trainer.model.named_parameters() if name in gammas)
    (row, *_) = trainer.writer.tables["layers"]
    for name in ("q_1", "k_1", "v", "o", "up", "down"):
        assert row[f"sigma_{name}"] == pytest.approx(1.0, abs=1e-4), "of the weight as applied"


def test_a_splice_over_clean_attention_changes_no_bit(tmp_path):
    """The clean pass holds the power iteration."""
    shared = {**REPARAM, "attention": STREAM}
    plain = tiny_trainer(tmp_path, **shared)
    spliced = tiny_trainer(tmp_path, **shared, interventions=[{"kind": "splice", "routes": ["all"]}])
    for _ in range(3):
        plain.step(), spliced.step()
    assert all(equal_bits(p, weights(spliced)[name]) for name, p in weights(plain).items())
    buffers = dict(spliced.model.named_buffers())
    assert all(equal_bits(b, buffers[name]) for name, b in plain.model.named_buffers())
