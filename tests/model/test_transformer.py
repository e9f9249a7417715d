"""The model: shapes, causality, variants, initialisation of twins, routes, and the clean second pass."""

import pytest
import torch

from qkpipe.config.models import AttentionConfig, ModelConfig
from qkpipe.model.attention import Tap
from qkpipe.model.linear import Linear
from qkpipe.model.routes import ROUTES, expand_routes, route_of
from qkpipe.model.transformer import Transformer
from tiny_training import FAULTY, STREAM, equal_bits

VARIANTS = {
    "gpt2": {},
    "grouped": {"n_kv_heads": 1},
    "rope": {"position": "rope"},
    "rmsnorm": {"norm": "rmsnorm"},
    "swiglu": {"mlp": "swiglu"},
    "untied": {"tied_head": False},
    "qk_norm": {"qk_norm": "unit_rms"},
    "llama": {
        "position": "rope",
        "norm": "rmsnorm",
        "mlp": "swiglu",
        "tied_head": False,
        "n_kv_heads": 2,
        "d_ff": 24,
    },
}
VOCABULARY = 61


def make(attention=None, seed=0, **changes):
    sizes = {"d_model": 16, "n_layers": 2, "n_heads": 4, "context": 12}
    config = ModelConfig(**(sizes | changes))
    model = Transformer(config, AttentionConfig(**(attention or {})), VOCABULARY)
    model.initialise(seed)
    return model


@pytest.fixture
def tokens():
    return torch.randint(0, VOCABULARY, (3, 12), generator=torch.Generator().manual_seed(1))


def livelier(model):
    """Weights large enough that a change anywhere is visible everywhere downstream."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(10)
    return model


@pytest.mark.parametrize("attention", [{}, STREAM, FAULTY], ids=["sdpa", "stream", "faulty"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_run_and_every_parameter_has_a_gradient(variant, attention, tokens):
    model = livelier(make(attention, **VARIANTS[variant]))
    assert model(tokens).shape == (3, 12, VOCABULARY)
    loss = model(tokens[:, :-1], tokens[:, 1:])
    assert loss.shape == ()
    loss.backward()
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        assert gradient is not None and gradient.isfinite().all(), name
        assert gradient.count_nonzero() > 0, name


@pytest.mark.parametrize("attention", [{}, STREAM, FAULTY], ids=["sdpa", "stream", "faulty"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_causality(variant, attention, tokens):
    model = livelier(make(attention, **VARIANTS[variant]))
    changed = tokens.clone()
    changed[:, 7] = (changed[:, 7] + 1) % VOCABULARY
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :7], after[:, :7], rtol=1e-5, atol=1e-5)
    assert all(not torch.equal(before[:, t], after[:, t]) for t in range(7, 12))


def test_loss_is_the_mean_cross_entropy_of_the_logits(tokens):
    model = livelier(make())
    log_p = model(tokens[:, :-1]).log_softmax(-1)
    expected = -log_p.gather(-1, tokens[:, 1:, None]).mean()
    torch.testing.assert_close(model(tokens[:, :-1], tokens[:, 1:]), expected)


@pytest.mark.parametrize("position", ["learned", "rope"])
def test_positions_matter(position):
    model = livelier(make(position=position))
    tokens = torch.tensor([[1, 2, 3], [2, 1, 3]])
    logits = model(tokens)[:, -1]
    assert not torch.allclose(logits[0], logits[1], atol=1e-3)


def test_grouped_queries_equal_repeated_keys_and_values(tokens):
    grouped, full = make(n_kv_heads=2), make()
    state = grouped.state_dict()
    for name in list(state):
        if name.endswith(("W_K.weight", "W_V.weight")):
            heads = state[name].view(2, 4, 16)
            state[name] = heads.repeat_interleave(2, dim=0).reshape(16, 16)
    full.load_state_dict(state)
    torch.testing.assert_close(grouped(tokens), full(tokens))


def test_twins_start_from_equal_bits():
    healthy = make().state_dict()
    for other in (make(STREAM), make(FAULTY), make(qk_norm="unit_rms")):
        other = other.state_dict()
        assert healthy.keys() == other.keys()
        assert all(equal_bits(healthy[name], other[name]) for name in healthy)
    another = make(seed=1).state_dict()
    assert all(not torch.equal(healthy[n], another[n]) for n in healthy if healthy[n].dim() == 2)


def test_initialisation_ignores_and_leaves_the_global_generator():
    torch.manual_seed(5)
    first = make().state_dict()
    torch.manual_seed(6)
    before = torch.get_rng_state()
    model = make()
    # Building draws torch's own defaults; initialising must not draw from the same place.
    torch.set_rng_state(before)
    model.initialise(0)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(equal_bits(first[name], value) for name, value in model.state_dict().items())


def test_initial_sizes():
    model = make(d_model=64, n_layers=8, n_heads=2)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            assert (parameter == 1).all()
        else:
            residual = name.endswith(("W_O.weight", "W_down.weight"))
            assert float(parameter.detach().std()) == pytest.approx(
                0.02 / 4 if residual else 0.02, rel=0.1
            ), name


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_parameter_belongs_to_one_route(variant):
    model = make(**VARIANTS[variant])
    found = {name: route_of(name) for name, _ in model.named_parameters()}
    assert {route for route, _ in found.values()} == set(ROUTES)
    for name, (route, layer) in found.items():
        assert layer == (int(name.split(".")[1]) if name.startswith("blocks") else -1)
        is_block_matrix = ".W_" in name
        assert (route != "embed") == is_block_matrix, name
    matrices = {"qk": 2, "value": 1, "proj": 1, "mlp": 3 if model.config.mlp == "swiglu" else 2}
    for route, count in matrices.items():
        assert sum(r == route for r, _ in found.values()) == 2 * count


def test_unions_of_routes():
    assert expand_routes(("vo",)) == {"value", "proj"}
    assert expand_routes(("all",)) == set(ROUTES) - {"embed"}
    assert expand_routes(("vo", "qk", "value")) == {"qk", "value", "proj"}
    assert expand_routes(("embed",)) == {"embed"}


class TestCleanPass:
    def armed(self):
        model = make(FAULTY)
        linear = model.blocks[1].mlp.W_up
        linear.weight_gradient = lambda dy, x: torch.zeros_like(linear.weight)
        model.blocks[0].attention.tap = Tap()
        model.blocks[1].attention.sensing = False
        return model

    def settings(self, model):
        linears = [m.weight_gradient for m in model.modules() if isinstance(m, Linear)]
        return linears, [(a.kernel, a.tap, a.sensing, a.qk_site) for a in model.attentions]

    def test_gradients_are_those_of_the_clean_structure(self, tokens):
        model, clean = self.armed(), make(STREAM)
        with model.clean_pass():
            model(tokens[:, :-1], tokens[:, 1:]).backward()
        clean(tokens[:, :-1], tokens[:, 1:]).backward()
        for (name, a), b in zip(model.named_parameters(), clean.parameters(), strict=True):
            assert equal_bits(a.grad, b.grad), name

    def test_nothing_is_recorded(self, tokens):
        model = self.armed()
        with model.clean_pass():
            model(tokens)
        assert model.blocks[0].attention.tap.q is None

    def test_everything_is_restored(self):
        model = self.armed()
        before = self.settings(model)
        with model.clean_pass():
            assert self.settings(model) != before
        assert self.settings(model) == before

    def test_everything_is_restored_after_an_exception(self):
        model = self.armed()
        before = self.settings(model)
        with pytest.raises(ZeroDivisionError), model.clean_pass():
            raise ZeroDivisionError
        assert self.settings(model) == before
