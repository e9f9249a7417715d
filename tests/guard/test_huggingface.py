"""A guard on models of transformers, made from tiny random configs."""

import math

import pytest
import torch

transformers = pytest.importorskip("transformers")

from qkpipe.errors import BadInput  # noqa: E402
from qkpipe.guard import QKGuard, intercept, max_logit_per_head  # noqa: E402
from tiny_training import equal_bits  # noqa: E402

BOUND = 1 + 1e-5
COMMON = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def config(name):
    if name == "GPT2":
        return transformers.GPT2Config(
            vocab_size=61, n_positions=32, n_embd=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2,
            attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0,
        )  # fmt: skip
    extra = {
        "Qwen3": {"head_dim": 8},
        "Gemma": {"head_dim": 8},
        "Gemma2": {"head_dim": 8, "sliding_window": 4, "attn_logit_softcapping": 20.0},
        "Mistral": {"sliding_window": 4},
    }
    return getattr(transformers, f"{name}Config")(**COMMON | extra.get(name, {}))


def build(name, implementation="sdpa"):
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}{'LMHeadModel' if name == 'GPT2' else 'ForCausalLM'}")(config(name))
    model.set_attn_implementation(implementation)
    return model.train()


def batch(seed=0):
    tokens = torch.randint(3, 61, (2, 9), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": tokens, "labels": tokens}


def heat(model, by):
    """Larger queries; where the model normalises them itself, larger gains of that."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("q_norm.weight", "q_proj.weight")):
                parameter.mul_(by)
            elif name.endswith("c_attn.weight"):
                parameter[:, :32].mul_(by)
    return model


NAMES = ["GPT2", "Llama", "Qwen3", "Gemma", "Gemma2", "Olmo2", "Mistral"]


@pytest.mark.parametrize(
    ("name", "implementation"),
    [(name, kind) for name in NAMES for kind in ("eager", "sdpa") if (name, kind) != ("Gemma2", "sdpa")],
)
def test_dormant_then_firing(name, implementation):
    plain, guarded = build(name, implementation), build(name, implementation)
    guard = QKGuard(guarded, threshold=1e6)
    results = []
    for model in (plain, guarded):
        loss = model(**batch()).loss
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters())])
    assert all(equal_bits(a, b) for a, b in zip(*results, strict=True))
    assert len(guard.layers) == 2 and math.isfinite(guard.max_logit())
    guard.detach()

    heat(guarded, 1e3)
    guard = QKGuard(guarded, threshold=0.01)
    guarded(**batch())
    hot = guard.max_logit()
    assert guard.fired
    guarded(**batch())
    assert guard.active
    attention = next(m for m in guarded.modules() if hasattr(m, "scaling") and hasattr(m, "head_dim"))
    assert guard.max_logit() <= BOUND * attention.scaling * attention.head_dim < hot
    guard.detach()
    assert "save_pretrained" not in guarded.__dict__


@pytest.mark.parametrize("name", ["Llama", "Mistral"])
def test_eager_and_sdpa_see_the_same_maximum(name):
    """Masks, padding and windows are read alike from either."""
    seen = []
    for implementation in ("eager", "sdpa"):
        model = heat(build(name, implementation), 30.0)
        guard = QKGuard(model, threshold=1e6)
        for mask in (torch.ones(2, 9).long(), torch.tensor([[0] * 4 + [1] * 5, [1] * 9])):
            model(**batch(), attention_mask=mask)
            seen.append(guard.max_logit())
        guard.detach()
    assert seen[:2] == pytest.approx(seen[2:], rel=1e-5)


def test_padding_does_not_count():
    mask = torch.tensor([[1] * 5 + [0] * 4, [1] * 9])
    model = heat(build("Llama"), 30.0)
    guard = QKGuard(model, threshold=1e6)
    with torch.no_grad():
        model.model.embed_tokens.weight[0] = 1e3 * torch.randn(32)
    inputs = batch()
    model(input_ids=inputs["input_ids"], attention_mask=mask)
    clean = guard.max_logit()
    inputs["input_ids"][0, 5:] = 0
    model(input_ids=inputs["input_ids"], attention_mask=mask)
    assert guard.max_logit() == clean
    guard.detach()


@pytest.mark.parametrize("mask", [None, torch.tensor([[1] * 6 + [0] * 3, [1] * 9])], ids=["whole", "padded"])
def test_masks_of_flash_kernels(mask):
    """They are given the padding alone and mask the rest themselves: causal, within a window."""
    module = torch.nn.Module()
    module.is_causal = True
    q, k = (torch.randn(2, 2, 9, 8, generator=torch.Generator().manual_seed(s)) for s in (0, 1))
    found = intercept._hf_mask("flash_attention_2", module, q, k, mask, {"sliding_window": 3})
    past = torch.ones(9, 9, dtype=torch.bool).tril()
    used = (past & ~past.tril(-3)).expand(2, 1, 9, 9)
    if mask is not None:
        used = used & mask.bool()[:, None, None] & mask.bool()[:, None, :, None]
    logits = (q @ k.mT).masked_fill(~used, -math.inf)
    assert equal_bits(max_logit_per_head(q, k, 1.0, found), logits.amax((0, 2, 3)))


def test_gradient_checkpointing():
    gradients = []
    for recompute in (False, True):
        model = heat(build("Llama"), 1e3)
        guard = QKGuard(model, threshold=1.0)
        if recompute:
            model.gradient_checkpointing_enable()
        for _ in range(2):
            model.zero_grad()
            model(**batch(), use_cache=False).loss.backward()
        assert guard.active
        gradients.append([p.grad for p in model.parameters()])
        guard.detach()
    assert all(equal_bits(a, b) for a, b in zip(*gradients, strict=True))


def test_generation_normalises_cached_keys_as_well():
    model = heat(build("Llama"), 1e3)
    guard = QKGuard(model, threshold=1.0)
    for _ in range(2):
        model(**batch())
    model.eval()
    prompt = batch()["input_ids"][:1]
    cached, whole = (
        model.generate(prompt, max_new_tokens=5, do_sample=False, use_cache=cache) for cache in (True, False)
    )
    assert torch.equal(cached, whole)
    guard.detach()


class TestSaving:
    def test_normalised_weights_are_not_found_by_mistake(self, tmp_path):
        model = heat(build("GPT2"), 1e3)
        guard = QKGuard(model, threshold=1.0)
        for _ in range(2):
            model(**batch())
        model.save_pretrained(tmp_path)
        assert not hasattr(model.config, "qk_guard")
        with pytest.raises(OSError, match="safetensors"):
            type(model).from_pretrained(tmp_path)
        loaded = type(model).from_pretrained(tmp_path, variant="qk_guard").train()
        other = QKGuard(loaded, threshold=1.0)
        assert other.active
        assert equal_bits(loaded(**batch()).logits, model(**batch()).logits)
        assert other.firing == guard.firing
        for each in (guard, other):
            each.detach()

    def test_dormant_ones_are_saved_as_ever(self, tmp_path):
        model = build("GPT2")
        guard = QKGuard(model)
        model(**batch())
        model.save_pretrained(tmp_path)
        guard.detach()
        loaded, report = type(model).from_pretrained(tmp_path, output_loading_info=True)
        assert not report["unexpected_keys"] and not report["missing_keys"]
        assert equal_bits(loaded.eval()(**batch()).logits, model.eval()(**batch()).logits)


def test_what_bypasses_the_interface_is_refused():
    """GPT-2's own upcast attention."""
    settings = config("GPT2")
    settings.reorder_and_upcast_attn = True
    model = transformers.GPT2LMHeadModel(settings)
    model.set_attn_implementation("eager")
    QKGuard(model)
    with pytest.raises(BadInput, match="no attention in it could be intercepted"):
        model.train()(**batch())
