"""Under torch.compile, and wherever the host must not look at the device: one graph, the same bits, the same steps."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils._python_dispatch import TorchDispatchMode

from qkpipe.guard import QKGuard
from qkpipe.guard.normalise import normalise
from qkpipe.model.qk_norm import unit_rms
from tiny_training import equal_bits

BOUND = 1 + 1e-5


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(16, 48, bias=False)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (4, 4)).transpose(1, 2) for part in self.qkv(x).split(16, -1))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


class Model(nn.Module):
    def __init__(self, layers=2):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Attention() for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


def batch(seed=0):
    return torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(seed))


def train(model, forward, steps, guard=None):
    """Gradients of the last step, and what the guard saw at each."""
    seen = []
    for step in range(steps):
        model.zero_grad()
        forward(batch(step)).square().sum().backward()
        if guard is not None:
            seen.append((guard.max_logit(), guard.fired, guard.active))
    return [p.grad for p in model.parameters()], seen


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("threshold", [1e6, 1.0], ids=["dormant", "firing"])
def test_compiled_whole_it_agrees_with_eager_and_settles(threshold):
    eager, compiled = Model(), Model()
    guards = [QKGuard(m, threshold=threshold) for m in (eager, compiled)]
    counter = CompileCounterWithBackend("aot_eager")
    forward = torch.compile(compiled, backend=counter, fullgraph=True)
    expected, seen = train(eager, eager, 3, guards[0])
    found, seen_compiled = train(compiled, forward, 3, guards[1])
    frames = counter.frame_count
    assert frames <= 5, "forward and two hooks, and two of them once more when the guard has met the layers"
    train(compiled, forward, 5)
    assert counter.frame_count == frames
    for (logit, *flags), (logit_compiled, *flags_compiled) in zip(seen, seen_compiled, strict=True):
        assert logit_compiled == pytest.approx(logit, rel=1e-6)
        assert flags[0] == flags_compiled[0]
    assert guards[1].firing is None or guards[1].firing.step == guards[0].firing.step == 0
    for a, b in zip(expected, found, strict=True):
        assert equal_bits(a, b) if threshold == 1e6 else torch.allclose(a, b, rtol=1e-4, atol=1e-5)
    for guard in guards:
        guard.detach()


@pytest.mark.slow
@pytest.mark.parametrize("threshold", [1e6, 1.0], ids=["dormant", "firing"])
def test_compiled_by_inductor(threshold):
    """No graph break, nothing compiled once settled, and dormant the bits of the unguarded model compiled alike."""
    counters = torch._dynamo.utils.counters
    plain, eager, compiled = Model(), Model(), Model()
    unguarded, _ = train(plain, torch.compile(plain, fullgraph=True), 3)
    guards = [QKGuard(m, threshold=threshold) for m in (eager, compiled)]
    counters.clear()
    forward = torch.compile(compiled, fullgraph=True)
    expected, seen = train(eager, eager, 3, guards[0])
    found, seen_compiled = train(compiled, forward, 3, guards[1])
    found = [gradient.clone() for gradient in found]
    graphs = counters["stats"]["unique_graphs"]
    train(compiled, forward, 4)
    assert counters["stats"]["unique_graphs"] == graphs and not counters["graph_break"]
    assert [flags for _, *flags in seen_compiled] == [flags for _, *flags in seen]
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(expected, found, strict=True))
    if threshold == 1e6:
        assert all(equal_bits(a, b) for a, b in zip(unguarded, found, strict=True))
    for guard in guards:
        guard.detach()


def test_attached_after_compiling():
    """Code compiled before would not look for the guard."""
    model = Model()
    forward = torch.compile(model, backend="aot_eager")
    forward(batch())
    guard = QKGuard(forward, threshold=1e-3)
    forward(batch())
    assert guard.fired
    guard.detach()
    assert equal_bits(forward(batch()), Model()(batch()))


@pytest.mark.parametrize("latch", ["model", "layer"])
@pytest.mark.parametrize("on_device", [False, True], ids=["cpu", "as on a device"])
def test_layers_compiled_one_by_one_share_their_code(on_device, latch, monkeypatch):
    """More of them than code variants are allowed, without graph breaks, and nothing is compiled once the guard has settled."""
    torch._dynamo.utils.counters.clear()
    eager, model = Model(10), Model(10)
    guards = [QKGuard(eager, threshold=7.0, latch=latch)]
    monkeypatch.setattr(QKGuard, "_on_device", on_device or property(lambda _: torch.compiler.is_compiling()))
    guards.append(QKGuard(model, threshold=7.0, latch=latch))
    counter = CompileCounterWithBackend("aot_eager")
    for layer in model.layers:
        layer.compile(backend=counter, fullgraph=True)
    _, expected = train(eager, eager, 5, guards[0])
    _, found = train(model, model, 5, guards[1])
    frames = counter.frame_count
    assert frames < 10
    train(model, model, 3)
    assert counter.frame_count == frames
    for (logit, *flags), (logit_compiled, *flags_compiled) in zip(expected, found, strict=True):
        assert logit_compiled == pytest.approx(logit, rel=1e-5)
        assert flags_compiled == flags
    assert expected[0][1:] == (False, False) and expected[-1][1:] == (True, True)
    assert guards[1].firing == guards[0].firing and guards[1].firing.layer == 9
    assert guards[1].layers == guards[0].layers == [f"layers.{index}" for index in range(10)]
    for guard in guards:
        guard.detach()


class NoLook(TorchDispatchMode):
    """Forbids what would make the host wait for a device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert name not in {"_local_scalar_dense", "nonzero", "equal", "is_nonzero"}, name
        return func(*args, **kwargs or {})


@pytest.mark.parametrize(
    "options", [{}, {"latch": "head"}, {"latch": "layer", "release": 0.5, "hand_over": 3}]
)
def test_on_a_device_nothing_waits_and_the_decisions_are_the_same(options, monkeypatch):
    eager, device = Model(), Model()
    guards = [QKGuard(eager, threshold=1.0, **options)]
    expected, seen = train(eager, eager, 4, guards[0])
    monkeypatch.setattr(QKGuard, "_on_device", True)
    guards.append(QKGuard(device, threshold=1.0, **options))
    for step in range(4):
        device.zero_grad()
        with NoLook():
            device(batch(step)).square().sum().backward()
        assert (guards[1].max_logit(), guards[1].fired, guards[1].active)[1:] == seen[step][1:]
        assert guards[1].max_logit() == pytest.approx(seen[step][0], rel=1e-5)
    found = [p.grad for p in device.parameters()]
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(expected, found, strict=True))
    monkeypatch.undo()
    assert guards[0].firing == guards[1].firing
    for guard in guards:
        guard.detach()


class TestNormalise:
    @pytest.mark.parametrize("value", [0.0, -0.0, 3e38, 1e-42, float("nan"), float("inf")])
    def test_off_is_bitwise_the_identity(self, value):
        """Also in the gradient, for minus zero and where the untaken branch overflows."""
        x = torch.full((2, 4), value, requires_grad=True)
        y = normalise(x, torch.tensor(0.0))
        upstream = torch.tensor([[-0.0, 0.0, 1.0, -2.0]] * 2)
        (gradient,) = torch.autograd.grad(y, x, upstream)
        assert equal_bits(y.detach(), x.detach())
        assert equal_bits(gradient, upstream)

    def test_whole_is_unit_rms(self):
        x = torch.randn(5, 8, requires_grad=True)
        results = []
        for f in (lambda x: normalise(x, torch.tensor(1.0)), unit_rms):
            y = f(x)
            results.append((y, *torch.autograd.grad(y.square().sum() + y[:, 0].sum(), x)))
        assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(*results, strict=True))

    @pytest.mark.parametrize("strength", [0.25, 1.0])
    def test_gradient_is_the_derivative(self, strength):
        x = torch.randn(2, 5)
        g = torch.randn(2, 5)
        (gradient,) = torch.autograd.grad(normalise(x.requires_grad_(), torch.tensor(strength)), x, g)
        wide = x.detach().double().requires_grad_()
        plain = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True)) ** strength
        (expected,) = torch.autograd.grad(plain, wide, g.double())
        assert torch.allclose(gradient.double(), expected, rtol=1e-4, atol=1e-5)


class Flex(nn.Module):
    def __init__(self, attend=flex_attention, **options):
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k = (nn.Linear(32, 32) for _ in range(2))
        self.attend, self.options = attend, options

    def forward(self, x):
        q, k, v = (y.unflatten(-1, (2, 16)).transpose(1, 2) for y in (self.q(x), self.k(x), x))
        return self.attend(q, k, v, **self.options)


def causal(batch, head, query, key):
    return query >= key


class TestFlex:
    """Without gradients, as FlexAttention is on a CPU."""

    @pytest.mark.parametrize("on_device", [False, True], ids=["bound first", "as on a device"])
    @pytest.mark.parametrize("masked", [False, True])
    def test_senses_and_acts(self, masked, on_device, monkeypatch):
        x = torch.randn(2, 128, 32, generator=torch.Generator().manual_seed(0))
        options = (
            {"block_mask": create_block_mask(causal, None, None, 128, 128, device="cpu")} if masked else {}
        )
        model = Flex(**options)
        with torch.no_grad():
            plain = model(x)
        if on_device:
            monkeypatch.setattr(QKGuard, "_on_device", True)
        guard = QKGuard(model, threshold=1e-3)
        with torch.no_grad():
            q, k = (W(x).unflatten(-1, (2, 16)).transpose(1, 2) for W in (model.q, model.k))
            assert torch.allclose(model(x), plain, atol=1e-5)
            logits = q @ k.mT / 4
            if masked:
                logits = logits.masked_fill(~torch.ones(128, 128, dtype=torch.bool).tril(), -torch.inf)
            assert guard.max_logit() == pytest.approx(float(logits.max()), rel=1e-5)
            model(x)
        assert guard.active and guard.max_logit() <= BOUND * 4
        guard.detach()
        assert model.attend is flex_attention

    def test_a_bias_is_added_after_the_bound(self):
        def tilt(score, batch, head, query, key):
            return score + 100.0

        x = torch.randn(2, 128, 32, generator=torch.Generator().manual_seed(0))
        model = Flex(score_mod=tilt)
        guard = QKGuard(model, threshold=30.0)
        with torch.no_grad():
            model(x)
        assert not guard.fired and guard.max_logit() < 30
        guard.detach()
