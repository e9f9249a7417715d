"""A guard on models it knows nothing of: whatever calls torch's attention is sensed, bounded, and left exactly as it was."""

import copy
import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention as imported_by_name
from torch.utils.checkpoint import checkpoint

from qkpipe.errors import BadInput
from qkpipe.guard import QKGuard, intercept, without_guard
from qkpipe.model.qk_norm import unit_rms
from tiny_training import equal_bits

REAL = (F.scaled_dot_product_attention,)  # not bound to a name of this module, where a guard would find it
BOUND = 1 + 1e-5


class Attention(nn.Module):
    """Causal self-attention as people write it; ``call`` holds what else to give the kernel."""

    def __init__(self, heads=4, kv_heads=4, width=16, attend=None, **call):
        super().__init__()
        self.heads, self.kv_heads, self.d = heads, kv_heads, width // heads
        self.q = nn.Linear(width, heads * self.d, bias=False)
        self.k, self.v = (nn.Linear(width, kv_heads * self.d, bias=False) for _ in range(2))
        self.attend, self.call = attend, call or {"is_causal": True}

    def forward(self, x, memory=None):
        memory = x if memory is None else memory
        q, k, v = (
            W(y).unflatten(-1, (-1, self.d)).transpose(1, 2)
            for W, y in ((self.q, x), (self.k, memory), (self.v, memory))
        )
        attend = self.attend or F.scaled_dot_product_attention
        y = attend(q, k, v, enable_gqa=self.heads != self.kv_heads, **self.call)
        return y.transpose(1, 2).flatten(2)


class Model(nn.Module):
    def __init__(self, layers=2, recompute=False, **attention):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Attention(**attention) for _ in range(layers))
        self.recompute = recompute

    def forward(self, x, *memory):
        for layer in self.layers:
            run = partial(checkpoint, layer, use_reentrant=False) if self.recompute else layer
            x = x + run(x, *memory)
        return x


def heat(model, by=30.0):
    """Larger queries, larger logits."""
    with torch.no_grad():
        for layer in model.layers:
            layer.q.weight.mul_(by)
    return model


def batch(seed=0, tokens=6, width=16):
    return torch.randn(3, tokens, width, generator=torch.Generator().manual_seed(seed))


def applied_logits(model, *inputs):
    """All logits that reach the kernel, per call, from its own arguments: fp32, before mask and bias."""
    seen = []

    def kernel(query, key, value, **options):
        scale = options["scale"] if options["scale"] is not None else query.shape[-1] ** -0.5
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3) if query.dim() > 3 else key
        seen.append((query @ key.mT * scale).detach())
        return REAL[0](query, key, value, **options) if query.shape[-3] == key.shape[-3] else value

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", intercept._sdpa(kernel))
        with torch.no_grad():
            model(*inputs)
    return seen


MASK = torch.ones(6, 6, dtype=torch.bool).tril()
CALLS = {
    "causal": {},
    "grouped": {"kv_heads": 2},
    "one key head": {"kv_heads": 1},
    "scale": {"is_causal": True, "scale": 1.7},
    "boolean mask": {"attn_mask": MASK},
    "window": {"attn_mask": MASK & ~MASK.tril(-3)},
    "additive mask": {"attn_mask": torch.zeros(6, 6).masked_fill(~MASK, float("-inf"))},
    "bias": {"attn_mask": torch.randn(4, 6, 6)},
    "bias class": {"attn_mask": causal_lower_right(6, 6)},
    "none": {"is_causal": False},
    "imported by name": {"attend": imported_by_name},
}


@pytest.mark.parametrize("options", CALLS.values(), ids=CALLS)
class TestEveryCall:
    def test_dormant_is_bitwise_not_there(self, options):
        plain, guarded = Model(**options), Model(**options)
        guard = QKGuard(guarded, threshold=1e6)
        for seed in range(2):
            results = []
            for model in (plain, guarded):
                model.zero_grad()
                out = model(batch(seed))
                out.square().sum().backward()
                results.append([out.detach(), *(p.grad for p in model.parameters())])
            assert all(equal_bits(a, b) for a, b in zip(*results, strict=True))
        assert not guard.fired and math.isfinite(guard.max_logit())
        assert guard.layers == ["layers.0", "layers.1"]
        guard.detach()

    def test_active_is_bounded(self, options):
        model = heat(Model(**options), 1e3)
        guard = QKGuard(model, threshold=1e-3)
        model(batch())
        assert guard.fired and guard.firing.layer in (0, 1)
        model(batch())
        assert guard.active
        attention = model.layers[0]
        bound = BOUND * abs(attention.call.get("scale", attention.d**-0.5)) * attention.d
        assert guard.max_logit() <= bound
        if attention.attend is None:
            found = applied_logits(model, batch())
            assert len(found) == 2 and max(float(x.abs().max()) for x in found) <= bound
        guard.detach()

    def test_the_maximum_is_that_of_the_logits_used(self, options):
        model = Model(layers=1, **options)
        guard = QKGuard(model, threshold=1e6)
        model(batch())
        layer = model.layers[0]
        q, k = (W(batch()).unflatten(-1, (-1, layer.d)).transpose(1, 2) for W in (layer.q, layer.k))
        logits = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT
        logits = logits * layer.call.get("scale", layer.d**-0.5)
        mask = layer.call.get("attn_mask")
        if layer.call.get("is_causal") or isinstance(mask, type(CALLS["bias class"]["attn_mask"])):
            mask = MASK
        elif mask is not None and mask.dtype != torch.bool:
            mask = mask > float("-inf")
        if mask is not None:
            logits = logits.masked_fill(~mask, float("-inf"))
        assert guard.max_logit() == pytest.approx(float(logits.max()), rel=1e-6)
        guard.detach()


class TestKinds:
    def test_cross_attention(self):
        model = heat(Model(layers=1, is_causal=False))
        guard = QKGuard(model, threshold=5.0)
        memory = batch(1, tokens=9)
        model(batch(), memory)
        assert guard.fired
        model(batch(), memory)
        assert guard.max_logit() <= BOUND * 2
        guard.detach()

    @pytest.mark.parametrize("dims", [2, 3, 5])
    def test_other_numbers_of_dimensions(self, dims):
        class Raw(nn.Module):
            def forward(self, q, k, v):
                return F.scaled_dot_product_attention(q, k, v)

        shape = {2: (6, 8), 3: (2, 6, 8), 5: (2, 3, 2, 6, 8)}[dims]
        q, k, v = (torch.randn(shape, generator=torch.Generator().manual_seed(s)) for s in range(3))
        model = Raw()
        guard = QKGuard(model, threshold=1e-3)
        assert equal_bits(model(q, k, v), REAL[0](q, k, v))
        assert guard.max_logit() == pytest.approx(float((q @ k.mT * 8**-0.5).max()), rel=1e-6)
        assert equal_bits(model(q, k, v), REAL[0](unit_rms(q), unit_rms(k), v))
        guard.detach()

    def test_torch_s_own_layers(self):
        """nn.TransformerEncoderLayer, whose fused path in evaluation would know of no guard."""
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
        x = batch()
        plain = layer(x)
        guard = QKGuard(layer, threshold=1e-3)
        assert equal_bits(layer(x), plain) and guard.fired and guard.layers == ["self_attn"]
        normalised = layer(x)
        assert not torch.allclose(normalised, plain)
        layer.eval()
        with torch.no_grad():
            assert torch.allclose(layer(x), normalised, atol=1e-5)
        guard.detach()
        layer.train()
        assert equal_bits(layer(x), plain)

    def test_padding_does_not_count(self):
        """Neither its keys, which the mask hides, nor its queries, which see real keys."""
        x = batch()
        x[1, 4:] = 1e3
        mask = MASK.expand(3, 1, 6, 6).clone()
        mask[1, ..., 4:] = False
        model = Model(layers=1, attn_mask=mask)
        guard = QKGuard(model, threshold=30.0)
        model(x)
        clean = guard.max_logit()
        assert not guard.fired and clean < 30
        x[1, 4:] = 0.0
        model(x)
        assert guard.max_logit() == clean
        guard.detach()

    def test_a_layer_called_twice_keeps_the_larger(self):
        class Twice(Model):
            def forward(self, x):
                return self.layers[0](x) + self.layers[0](5 * x)

        model = Twice(layers=1)
        guard = QKGuard(model)
        model(batch())
        twice = guard.max_logit()
        guard.detach()
        single = Model(layers=1)
        guard = QKGuard(single)
        single(5 * batch())
        assert guard.max_logit() == twice
        guard.detach()

    def test_autocast(self):
        model = heat(Model(), 100.0)
        guard = QKGuard(model, threshold=1.0)
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                model(batch())
        assert guard.active
        assert guard.max_logit() <= 2 * (1 + 2**-8) ** 2
        guard.detach()


class TestRefused:
    def test_a_model_that_writes_its_own_softmax(self):
        class Own(nn.Module):
            def forward(self, x):
                return torch.softmax(x @ x.mT, -1) @ x

        model = Own()
        QKGuard(model)
        model.eval()
        model(batch())  # evaluation alone decides nothing
        model.train()
        with pytest.raises(BadInput, match="Own ran a training forward and no attention"):
            model(batch())
        assert F.scaled_dot_product_attention is REAL[0] and not model._forward_hooks
        model(batch())

    def test_a_part_trained_alone(self):
        model = Model()
        guard = QKGuard(model)
        model(batch())
        with pytest.raises(BadInput, match="outside the forward of Model"):
            model.layers[0](batch())
        model.eval()
        model.layers[0](batch())
        guard.detach()

    def test_weights_on_the_meta_device(self):
        with torch.device("meta"):
            model = Model()
        with pytest.raises(BadInput, match="meta device"):
            QKGuard(model)

    def test_twice(self):
        model = Model()
        guard = QKGuard(model)
        with pytest.raises(BadInput, match="already has a guard"):
            QKGuard(model)
        guard.detach()


class TestComingAndGoing:
    def test_detach_restores_all(self):
        model = Model(attend=imported_by_name)
        model.mine = F.scaled_dot_product_attention
        before = {name: dict(m.__dict__) for name, m in model.named_modules()}
        state = {key: value.clone() for key, value in model.state_dict().items()}
        guard = QKGuard(model, threshold=1e-3)
        assert F.scaled_dot_product_attention is not REAL[0]
        for _ in range(2):
            model(batch())
        guard.detach()
        assert F.scaled_dot_product_attention is REAL[0] and imported_by_name is REAL[0]
        assert torch.backends.mha.get_fastpath_enabled()
        for name, module in model.named_modules():
            assert module.__dict__.keys() == before[name].keys()
            assert module.__dict__["_forward_hooks"] == {} == module.__dict__["_forward_pre_hooks"]
        assert model.mine is REAL[0]
        assert model.state_dict().keys() == state.keys()
        assert all(equal_bits(value, state[key]) for key, value in model.state_dict().items())
        QKGuard(model).detach()

    def test_other_models_are_left_alone(self):
        """Also while a guarded forward is broken off, and while a guard is active elsewhere."""
        guarded, other = heat(Model()), Model()
        plain = other(batch())
        guard = QKGuard(guarded, threshold=1e-3)
        guarded(batch())
        with pytest.raises(RuntimeError):
            guarded(batch(width=15))
        guarded(batch())
        assert guard.active
        assert equal_bits(other(batch()), plain)
        guard.detach()

    def test_two_guards(self):
        first, second = Model(), Model()
        guards = [QKGuard(m) for m in (first, second)]
        guards[0].detach()
        second(batch())
        assert math.isfinite(guards[1].max_logit())
        guards[1].detach()
        assert F.scaled_dot_product_attention is REAL[0]

    def test_a_deep_copy_is_guarded_by_a_guard_of_its_own(self):
        """As averages of weights are made."""
        model = heat(Model())
        guard = QKGuard(model, threshold=1e-3)
        for _ in range(2):
            model(batch())
        twin = copy.deepcopy(model)
        expected = model(batch())
        guard.detach()
        assert equal_bits(twin(batch()), expected)
        assert not equal_bits(model(batch()), expected)
        del twin


@pytest.mark.parametrize("threshold", [1e6, 1e-3], ids=["dormant", "firing"])
def test_recomputation_and_accumulation(threshold):
    """Activation checkpointing, over micro-batches: the gradients of every step are those without recomputation."""
    gradients, guards = [], []
    for recompute in (False, True):
        model = heat(Model(recompute=recompute))
        guard = QKGuard(model, threshold=threshold, explicit_steps=True)
        for step in range(3):
            model.zero_grad()
            for micro in range(2):
                model(batch(2 * step + micro)).square().sum().backward()
            guard.step()
        gradients.append([p.grad for p in model.parameters()])
        guards.append((guard.firing, guard.max_logit(), guard.active))
        guard.detach()
    assert all(equal_bits(a, b) for a, b in zip(*gradients, strict=True))
    assert guards[0] == guards[1]
    assert guards[0][2] == (threshold < 1)


class TestState:
    def fired(self):
        model = heat(Model())
        guard = QKGuard(model, threshold=1e-3)
        for _ in range(2):
            model(batch())
        return model, guard

    def test_a_checkpoint_carries_it(self):
        model, guard = self.fired()
        resumed = heat(Model(), 1.0)
        other = QKGuard(resumed, threshold=1e-3)
        resumed.load_state_dict(model.state_dict())
        assert other.active and other.fired
        assert equal_bits(resumed(batch()), model(batch()))
        assert other.firing == guard.firing
        for each in (guard, other):
            each.detach()

    def test_a_model_without_a_guard_refuses_it(self):
        model, guard = self.fired()
        state = model.state_dict()
        with pytest.raises(RuntimeError, match="qk_guard"):
            Model().load_state_dict(state)
        with pytest.raises(BadInput, match="QK normalisation is on"):
            without_guard(state)
        guard.detach()
        Model().load_state_dict(model.state_dict())

    def test_a_dormant_one_is_dropped_on_request(self):
        model = Model()
        guard = QKGuard(model)
        model(batch())
        Model().load_state_dict(without_guard(model.state_dict()))
        guard.detach()

    def test_weights_of_an_unguarded_model_make_it_dormant_again(self):
        model, guard = self.fired()
        model.load_state_dict(Model().state_dict())
        assert not guard.active and not guard.fired
        guard.detach()

    def test_of_another_kind_is_refused(self):
        model, guard = self.fired()
        other = Model()
        second = QKGuard(other, latch="layer")
        with pytest.raises(BadInput, match="saved with latch='model', this guard has latch='layer'"):
            other.load_state_dict(model.state_dict())
        for each in (guard, second):
            each.detach()

    def test_survives_a_change_of_precision(self):
        model, guard = self.fired()
        model.double().float().bfloat16()
        assert guard.firing.logit > 1e-3 and guard.active
        model(batch().bfloat16())
        assert guard.max_logit() <= 2 * (1 + 2**-8) ** 2
        guard.detach()

    def test_rolling_back_from_the_callback(self):
        """Back to the weights before, but normalised from here on."""
        model = Model()
        saved = []

        def roll_back(firing):
            model.load_state_dict(saved[0])
            guard.activate()

        guard = QKGuard(model, threshold=30.0, on_fire=roll_back)
        model(batch())
        saved.append(copy.deepcopy(model.state_dict()))
        heat(model, 1e3)
        model(batch())
        assert equal_bits(model.layers[0].q.weight, saved[0]["layers.0.q.weight"])
        model(batch())
        assert guard.active and guard.max_logit() <= 2 * BOUND
        guard.detach()


class TestUnits:
    def hot(self, options=None, layer=1, head=2):
        """One head of one layer is hot."""
        model = Model(**(options or {}))
        with torch.no_grad():
            model.layers[layer].q.weight[4 * head : 4 * head + 4].mul_(1e3)
        return model

    @pytest.mark.parametrize("options", [{}, {"kv_heads": 2}], ids=["heads", "grouped"])
    @pytest.mark.parametrize("latch", ["layer", "head"])
    def test_only_what_passed_is_normalised(self, latch, options):
        model = self.hot(options)
        guard = QKGuard(model, threshold=30.0, latch=latch)
        plain = applied_logits(model, batch())
        model(batch())
        assert (guard.firing.layer, guard.firing.head) == (1, 2)
        model(batch())
        found = applied_logits(model, batch())
        assert equal_bits(found[0], plain[0])
        group = {2, 3} if options else {2}
        for head in range(4):
            touched = latch == "layer" or head in group
            assert equal_bits(found[1][:, head], plain[1][:, head]) != touched
            if touched:
                assert float(found[1][:, head].abs().max()) <= 2 * BOUND
        guard.detach()

    def test_state_of_heads_round_trips_into_a_guard_that_has_seen_nothing(self):
        model = self.hot()
        guard = QKGuard(model, threshold=30.0, latch="head")
        for _ in range(2):
            model(batch())
        other = Model()
        resumed = QKGuard(other, threshold=30.0, latch="head")
        other.load_state_dict(model.state_dict())
        assert equal_bits(other(batch()), model(batch()))
        for each in (guard, resumed):
            each.detach()

    def test_release_waits_until_what_is_hidden_is_calm(self):
        model = heat(Model(), 1e3)
        fired = []
        guard = QKGuard(model, threshold=30.0, release=10.0, on_fire=fired.append)
        for _ in range(3):
            model(batch())
        assert guard.active, "the logits underneath are as large as ever"
        heat(model, 1e-3)
        model(batch())
        model(batch())
        assert not guard.active
        plain = Model()
        assert torch.allclose(plain(batch()), model(batch()), atol=1e-5)
        heat(model, 1e3)
        model(batch())
        model(batch())
        assert guard.active and [f.step for f in fired] == [0, 6]
        guard.detach()

    def test_gradual_hand_over(self):
        """RMS to the power of 1 - n/4, whole and bounded from the fourth step on."""
        model = heat(Model(layers=1), 1e3)
        guard = QKGuard(model, threshold=30.0, hand_over=4)
        model(batch())
        largest = [guard.max_logit()]
        for _ in range(5):
            model(batch())
            largest.append(guard.max_logit())
        assert largest[0] > largest[1] > largest[2] > largest[3] > largest[4]
        assert largest[4] == largest[5] <= 2 * BOUND
        guard.detach()


def test_logs_what_a_function_is_given():
    lines = []
    model = heat(Model())
    guard = QKGuard(model, threshold=1.0, log=lambda step, values: lines.append((step, values)), log_every=2)
    largest = []
    for _ in range(4):
        model(batch())
        largest.append(guard.max_logit())
    assert [step for step, _ in lines] == [0, 2]
    assert [values["max_logit"] for _, values in lines] == largest[::2]
    assert [values["strength"] for _, values in lines] == [1.0, 1.0]
    guard.detach()
