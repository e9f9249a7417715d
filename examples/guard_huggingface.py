"""QK-Guard on transformers' GPT-2 and Llama, from tiny random configs; saved, and loaded again with its normalisation.

Needs the extra `hf`. Prints what it did as JSON, one line a model.
"""

import json
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from qkpipe.guard import QKGuard

ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
gpt2 = GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=4, **ids)
llama = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    **ids,
)

for make, config in ((GPT2LMHeadModel, gpt2), (LlamaForCausalLM, llama)):
    torch.manual_seed(0)
    model = make(config).train()
    guard = QKGuard(model, threshold=3.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)
    for _ in range(30):
        tokens = torch.randint(3, 64, (4, 16))
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        # Normalised weights are a variant, so that they cannot be loaded without the guard by mistake.
        loaded = make.from_pretrained(folder, variant="qk_guard" if guard.active else None)
    loaded_guard = QKGuard(loaded, threshold=3.0)
    print(json.dumps({
        "model": make.__name__, "fired": guard.fired, "loaded": loaded_guard.active, "max_logit": guard.max_logit(),
        "layers": guard.layers, "loss": loss.item(),
    }))  # fmt: skip
    guard.detach()
    loaded_guard.detach()
