"""QK-Guard: dormant it is not there, active it bounds, and it fires exactly when a logit passes the threshold."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from qkpipe.config.models import AttentionConfig, ModelConfig
from qkpipe.errors import BadInput
from qkpipe.guard import QKGuard, logit_bound_per_head, max_logit_per_head
from qkpipe.model.qk_norm import unit_rms
from qkpipe.model.transformer import Transformer
from tiny_training import FAULTY, STREAM, equal_bits

SCALE = 0.5  # of four-wide heads


class Scores(nn.Module):
    """One attention layer, reduced to its guard's slot: (B, H, T, 4) queries and keys to logits (B, H, T, T)."""

    def __init__(self, own_maximum: bool = False):
        super().__init__()
        self.qk_site = None
        self.own_maximum = own_maximum

    def forward(self, q, k):
        if self.qk_site is not None:
            q, k = self.qk_site.act(q, k)
            own = max_logit_per_head(q, k, SCALE)[None] if self.own_maximum else None
            self.qk_site.sense(q, k, SCALE, own)
        return q @ k.mT * SCALE


class TwoLayers(nn.Module):
    def __init__(self, own_maximum: bool = False):
        super().__init__()
        self.layers = nn.ModuleList(Scores(own_maximum) for _ in range(2))

    def forward(self, *qk):
        """Inputs q, k for every layer, or for both."""
        pairs = [qk, qk] if len(qk) == 2 else [qk[:2], qk[2:]]
        return tuple(layer(*pair) for layer, pair in zip(self.layers, pairs, strict=True))


def logit(value, heads=2, head=0):
    """q, k whose largest logit is ``value`` in ``head`` and zero in the others."""
    q = torch.zeros(1, heads, 3, 4)
    k = torch.zeros(1, heads, 3, 4)
    q[0, head, 2, 0] = value / SCALE
    k[0, head, 1, 0] = 1.0
    return q, k


@pytest.fixture(params=[False, True], ids=["bound first", "kernel's own maximum"])
def model(request):
    return TwoLayers(request.param)


def transformer(attention=None, **changes):
    config = ModelConfig(**({"d_model": 16, "n_layers": 2, "n_heads": 2, "context": 12} | changes))
    model = Transformer(config, AttentionConfig(**(attention or {})), 61)
    model.initialise(0)
    return model


def tokens(seed=0):
    return torch.randint(0, 61, (2, 13), generator=torch.Generator().manual_seed(seed))


class TestDormant:
    @pytest.mark.parametrize("attention", [{}, STREAM, FAULTY], ids=["sdpa", "stream", "faulty"])
    def test_bitwise_the_unguarded_model(self, attention):
        plain, guarded = transformer(attention), transformer(attention)
        guard = QKGuard(guarded, threshold=1e6)
        for seed in range(3):
            results = []
            for model in (plain, guarded):
                model.zero_grad()
                loss = model(tokens(seed)[:, :-1], tokens(seed)[:, 1:])
                loss.backward()
                results.append([loss.detach(), *(p.grad for p in model.parameters())])
            assert all(equal_bits(a, b) for a, b in zip(*results, strict=True))
        assert not guard.fired

    def test_log_mode_never_acts(self):
        plain, guarded = transformer(), transformer()
        guard = QKGuard(guarded, threshold=1e-6, mode="log")
        for _ in range(3):
            assert equal_bits(plain(tokens()[:, :-1]), guarded(tokens()[:, :-1]))
        assert guard.fired and not guard.active


HOSTILE = {
    "random": torch.randn(2, 2, 5, 4, generator=torch.Generator().manual_seed(0)),
    "huge": torch.full((1, 2, 5, 4), 3e38),
    "large": torch.full((1, 2, 5, 4), 1e18),
    "tiny": torch.full((1, 2, 5, 4), 1e-44),
    "small": torch.full((1, 2, 5, 4), 1e-18),
    "zero": torch.zeros(1, 2, 5, 4),
    "one-hot": torch.eye(4)[None, None, [0, 0, 1, 2, 3]].expand(1, 2, 5, 4) * 1e15,
    "mixed": torch.tensor([1e-30, 1.0, -1e15, 0.0]).expand(1, 2, 5, 4),
}


class TestBound:
    @pytest.mark.parametrize("k", HOSTILE)
    @pytest.mark.parametrize("q", HOSTILE)
    def test_hostile_inputs(self, q, k):
        q, k = HOSTILE[q], HOSTILE[k]
        q, k = (x.expand(2, 2, 5, 4) for x in (q, k))
        model = TwoLayers()
        guard = QKGuard(model, threshold=1e-3)
        model(*logit(1.0))
        assert guard.fired
        for logits in model(q, k):
            assert logits.isfinite().all()
            assert float(logits.abs().max()) <= (1 + 1e-5) * SCALE * 4
        assert guard.max_logit() <= (1 + 1e-5) * SCALE * 4

    @pytest.mark.parametrize("width", [1, 2, 64, 128, 257])
    def test_parallel_vectors_of_any_width(self, width):
        """The worst case: cosine 1."""
        q = torch.randn(1, 1, 200, width, generator=torch.Generator().manual_seed(width)) * 37
        scale = width**-0.5
        assert float(max_logit_per_head(unit_rms(q), unit_rms(q), scale)) <= (1 + 1e-5) * scale * width

    def test_a_rounded_format(self):
        """After rounding q and k to bf16 the bound allows for the format."""
        q = unit_rms(torch.randn(1, 1, 500, 64, generator=torch.Generator().manual_seed(0))).bfloat16()
        assert float(max_logit_per_head(q, q, 0.125)) <= 0.125 * 64 * (1 + 2**-8) ** 2


class TestFiring:
    def test_at_the_step_that_crosses_and_acts_from_the_next_forward(self, model):
        fired = []
        guard = QKGuard(model, threshold=30.0, on_fire=fired.append)
        for value in (1.0, 29.0, 30.0):
            model(*logit(value))
            assert not guard.fired and not guard.active
        crossing = model(*logit(10.0), *logit(31.0, head=1))
        assert guard.fired, "known as soon as the forward is over"
        assert guard.max_logit() == 31.0
        assert float(crossing[1].max()) == 31.0, "not yet normalised"
        firing = guard.firing
        assert (firing.step, firing.layer, firing.head, firing.logit) == (3, 1, 1, 31.0)
        after = model(*logit(31.0))
        assert guard.active
        assert float(after[0].max()) == pytest.approx(SCALE * 4)
        model(*logit(99.0))
        assert fired == [firing], "once"

    def test_stays_on_and_goes_on_sensing(self, model):
        guard = QKGuard(model, threshold=30.0)
        model(*logit(31.0))
        q, k = (torch.randn(1, 2, 3, 4, generator=torch.Generator().manual_seed(s)) for s in (0, 1))
        for _ in range(3):
            model(q, k)
            expected = max_logit_per_head(unit_rms(q), unit_rms(k), SCALE).max()
            assert guard.max_logit() == float(expected) < SCALE * 4
            assert guard.active

    def test_not_a_number_is_past_the_threshold(self, model):
        guard = QKGuard(model)
        q, k = logit(1.0)
        q[0, 1, 2] = math.nan
        model(q, k)
        assert guard.fired
        assert math.isnan(guard.firing.logit)
        assert (guard.firing.layer, guard.firing.head) == (0, 1)

    def test_overflow_is_past_the_threshold(self, model):
        guard = QKGuard(model)
        model(torch.full((1, 2, 3, 4), 1e25), torch.full((1, 2, 3, 4), 1e25))
        assert guard.fired

    def test_the_future_is_not_seen(self, model):
        guard = QKGuard(model)
        q, k = torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4)
        q[..., 0, 0], k[..., 1, 0] = 100.0, 100.0
        model(q, k)
        assert guard.max_logit() == 0.0
        assert not guard.fired

    @pytest.mark.parametrize("bad", [0.0, -1.0, math.nan])
    def test_threshold_out_of_range(self, bad):
        with pytest.raises(BadInput, match="threshold must be above 0"):
            QKGuard(TwoLayers(), threshold=bad)

    def test_other_options_out_of_range(self):
        with pytest.raises(BadInput, match="'act' or 'log', got 'watch'"):
            QKGuard(TwoLayers(), mode="watch")
        with pytest.raises(BadInput, match="every must be at least 1, got 0"):
            QKGuard(TwoLayers(), every=0)


class TestMaximum:
    def test_before_the_first_step(self, model):
        assert math.isnan(QKGuard(model).max_logit())

    def test_negative_logits_have_one(self, model):
        guard = QKGuard(model)
        model(torch.full((1, 2, 3, 4), -1.0), torch.full((1, 2, 3, 4), 2.0))
        assert guard.max_logit() == -4.0
        assert not guard.fired

    def test_exact_although_sensing_made_do_with_a_bound(self):
        model = transformer()
        with torch.no_grad():
            for attention in model.attentions:
                attention.W_Q.weight.mul_(20)
        guard = QKGuard(model)
        exact, bounds = [], []

        @torch.no_grad()
        def spy(q, k, v, draw):
            exact.append(float(max_logit_per_head(q, k, 8**-0.5).max()))
            bounds.append(float(logit_bound_per_head(q, k, 8**-0.5).max()))
            return own(q, k, v, draw)

        own = model.attentions[0].kernel
        for attention in model.attentions:
            attention.kernel = spy
        model(tokens()[:, :-1])
        assert guard.max_logit() == max(exact)
        assert max(exact) < max(bounds) < guard.threshold, "else nothing is tested"

    def test_of_the_streaming_kernel_is_its_own(self):
        model, plain = transformer(STREAM), transformer()
        guards = [QKGuard(model), QKGuard(plain)]
        for m in (model, plain):
            m(tokens()[:, :-1])
        assert guards[0].max_logit() == pytest.approx(guards[1].max_logit(), rel=1e-5)

    @given(
        st.integers(0, 2**31),
        st.sampled_from([1, 3, 8, 64]),
        st.floats(-60, 60),
        st.booleans(),
    )
    @settings(max_examples=200, deadline=None)
    def test_a_bound_decides_as_the_maximum_does(self, seed, width, log_size, parallel):
        """Also where the maximum and the bound are the same number up to rounding: q parallel to k."""
        generator = torch.Generator().manual_seed(seed)
        q = torch.randn(2, 2, 5, width, generator=generator) * 2.0 ** (log_size / 4)
        k = q if parallel else torch.randn(2, 1, 5, width, generator=generator)
        exact_H, bound_H = (f(q, k, 0.3) for f in (max_logit_per_head, logit_bound_per_head))
        assert (exact_H <= bound_H).all()
        top = float(exact_H.max())
        for threshold in (top, math.nextafter(top, -math.inf), top / 2, top * 2):
            if threshold <= 0:
                continue
            model = nn.Module()
            model.layer = Scores()
            model.forward = model.layer.forward
            guard = QKGuard(model, threshold=threshold)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("guard.test_controller.SCALE", 0.3)
                model(q, k)
            assert guard.fired == (top > threshold)
            assert guard.max_logit() == top


class TestSteps:
    def test_every_forward_in_training_is_one(self, model):
        guard = QKGuard(model)
        for _ in range(4):
            model(*logit(1.0))
        model(*logit(31.0))
        assert guard.firing.step == 4

    def test_accumulation_takes_the_maximum_and_fires_when_the_step_is_closed(self, model):
        guard = QKGuard(model, explicit_steps=True)
        for value in (1.0, 5.0, 2.0):
            model(*logit(value))
        assert guard.max_logit() == 5.0
        guard.step()
        assert guard.max_logit() == 5.0
        model(*logit(2.0))
        assert guard.max_logit() == 2.0, "the latest step's"
        model(*logit(31.0))
        still = model(*logit(31.0))
        assert not guard.fired and float(still[0].max()) == 31.0, "the same weights, the same step"
        guard.step()
        assert guard.firing.step == 1
        assert float(model(*logit(31.0))[0].max()) == pytest.approx(2.0)

    def test_accumulation_needs_no_declaration(self, model):
        """The first call of step() makes steps explicit."""
        guard = QKGuard(model)
        for _ in range(2):
            model(*logit(1.0))
        guard.step()
        model(*logit(31.0))
        assert float(model(*logit(31.0))[0].max()) == 31.0
        assert not guard.fired
        guard.step()
        assert guard.fired

    def test_every_k_steps(self, model):
        guard = QKGuard(model, every=3, explicit_steps=True)
        model(*logit(1.0))
        guard.step()
        for value in (31.0, 32.0):  # steps 1 and 2 are not sensed
            model(*logit(value))
            guard.step()
            assert guard.max_logit() == 1.0
        assert not guard.fired
        model(*logit(33.0))
        guard.step()
        assert guard.firing.step == 3

    def test_every_k_forwards(self, model):
        guard = QKGuard(model, every=2)
        for value in (1.0, 31.0, 2.0, 31.0):
            model(*logit(value))
        assert not guard.fired
        model(*logit(31.0))
        assert guard.firing.step == 4

    def test_evaluation_is_not_sensed_but_normalised(self, model):
        """With gradients on as well: what counts is the mode."""
        guard = QKGuard(model)
        model.eval()
        model(*logit(99.0))
        with torch.no_grad():
            model(*logit(99.0))
        assert math.isnan(guard.max_logit()) and not guard.fired
        model.train()
        model(*logit(31.0))
        assert guard.firing.step == 0
        model.eval()
        assert float(model(*logit(31.0))[0].max()) == pytest.approx(2.0), "the next forward, whichever it is"
        assert guard.max_logit() == 31.0

    def test_a_forward_broken_off_counts_for_nothing(self, model):
        guard = QKGuard(model)
        q, k = logit(99.0)
        with pytest.raises(RuntimeError):
            model(q, k, q, k[..., :3])
        model(*logit(1.0))
        assert guard.max_logit() == 1.0
        assert not guard.fired

    @pytest.mark.parametrize("reentrant", [False, True])
    def test_recomputation_is_neither_sensed_nor_normalised(self, reentrant):
        """The layer recomputed in the backward of the step that fires must do what it did in the forward."""

        class Checkpointed(TwoLayers):
            def forward(self, q, k):
                return checkpoint(super().forward, q, k, use_reentrant=reentrant)

        gradients = []
        for make in (TwoLayers, Checkpointed):
            model = make()
            guard = QKGuard(model)
            q, k = (x.requires_grad_() for x in logit(31.0))
            logits = model(q, k)
            logits[0].square().sum().backward()
            gradients.append((q.grad, k.grad))
            assert guard.firing.step == 0
            with torch.no_grad():
                model(*logit(0.5))
            assert guard.max_logit() == pytest.approx(2.0)
        assert all(equal_bits(a, b) for a, b in zip(*gradients, strict=True))


class TestAttaching:
    def test_detach_restores(self, model):
        guard = QKGuard(model)
        model(*logit(31.0))
        model(*logit(31.0))
        guard.detach()
        assert float(model(*logit(31.0))[0].max()) == 31.0
        assert not model._forward_pre_hooks and not model._forward_hooks
        assert all(layer.qk_site is None for layer in model.layers)
        QKGuard(model)  # may be guarded again

    def test_twice_is_refused(self, model):
        QKGuard(model)
        with pytest.raises(BadInput, match="already has a guard"):
            QKGuard(model)

    def test_nothing_to_guard_is_refused(self):
        with pytest.raises(BadInput, match="no attention to guard in Linear"):
            QKGuard(nn.Linear(2, 2))

    def test_state_round_trip(self, model):
        guard = QKGuard(model, every=2, explicit_steps=True)
        for value in (1.0, 1.0, 31.0):
            model(*logit(value))
            guard.step()
        other = TwoLayers()
        resumed = QKGuard(other, every=2, explicit_steps=True)
        resumed.load_state_dict(guard.state_dict())
        assert (resumed.fired, resumed.active, resumed.firing) == (True, True, guard.firing)
        assert resumed.max_logit() == guard.max_logit() == 31.0
        assert float(other(*logit(31.0))[0].max()) == pytest.approx(2.0)
        assert resumed.state_dict() == guard.state_dict()

    def test_state_of_a_dormant_guard(self, model):
        guard = QKGuard(model, every=2)
        model(*logit(5.0))
        other = TwoLayers()
        resumed = QKGuard(other, every=2)
        resumed.load_state_dict(guard.state_dict())
        assert not resumed.fired and resumed.max_logit() == 5.0
        other(*logit(31.0))
        assert not resumed.fired, "step 1 is not sensed"
        other(*logit(31.0))
        assert resumed.firing.step == 2
