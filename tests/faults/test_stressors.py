"""Generic stressors: a hot learning rate, noise on weights, frozen weights, wrong targets."""

import pytest
import torch

from qkpipe.model.transformer import Transformer
from tiny_training import equal_bits, tiny_run, tiny_trainer, weights


def updates(tmp_path, steps=1, **changes):
    """Realised updates of the last of some steps, by parameter name."""
    trainer = tiny_trainer(tmp_path, **changes)
    for _ in range(steps - 1):
        trainer.step()
    before = weights(trainer)
    trainer.step()
    return {name: new - before[name] for name, new in weights(trainer).items()}


def is_mlp(name):
    return "W_up" in name or "W_down" in name


@pytest.mark.parametrize("gain", [0.5, 3.0])
def test_noise_turns_the_update_and_keeps_its_size(tmp_path, gain):
    clean = updates(tmp_path)
    noisy = updates(tmp_path, faults=[{"kind": "weight_noise", "routes": ["mlp"], "gain": gain}])
    for name, D in clean.items():
        if not is_mlp(name):
            assert equal_bits(noisy[name], D), name
            continue
        assert float(noisy[name].norm()) == pytest.approx(float(D.norm()), rel=1e-4)
        cosine = float((noisy[name] * D).sum() / (noisy[name].norm() * D.norm()))
        # Noise of norm g |D|, nearly at a right angle to D: the cosine is 1 / sqrt(1 + g^2).
        assert cosine == pytest.approx((1 + gain**2) ** -0.5, abs=0.1)


def test_noise_is_drawn_anew_every_step_and_for_every_matrix(tmp_path):
    clean = [updates(tmp_path, steps) for steps in (1, 2)]
    fault = {"faults": [{"kind": "weight_noise", "routes": ["mlp"], "gain": 100.0}]}
    first, second = (updates(tmp_path, steps, **fault) for steps in (1, 2))
    mlp = [name for name in clean[0] if is_mlp(name)]
    for a, b in [(first[mlp[0]], second[mlp[0]]), (first[mlp[0]], first[mlp[2]])]:
        assert abs(float((a * b).sum() / (a.norm() * b.norm()))) < 0.2


def test_frozen_weights_stay_and_count_in_no_norm(tmp_path):
    shared = {"optimizer": {"weight_decay": 0.1}}
    frozen = tiny_trainer(tmp_path, **shared, faults=[{"kind": "frozen", "routes": ["mlp"]}])
    plain = tiny_trainer(tmp_path, **shared)
    before = weights(frozen)
    for _ in range(3):
        frozen.step(), plain.step()
    for name, new in weights(frozen).items():
        assert equal_bits(new, before[name]) == is_mlp(name), name
    assert frozen.writer.tables["steps"][0]["grad_norm"] < plain.writer.tables["steps"][0]["grad_norm"]
    norms = {row["route"]: row["grad_norm"] for row in frozen.writer.tables["routes"]}
    assert norms["mlp"] == 0 < norms["qk"]


class Targets:
    """What the model is asked to predict, forward by forward."""

    def __init__(self, monkeypatch):
        self.seen, own = [], Transformer.forward

        def forward(model, tokens, targets=None, draw=0):
            self.seen.append((model.training, targets.clone()))
            return own(model, tokens, targets, draw)

        monkeypatch.setattr(Transformer, "forward", forward)


def test_a_share_of_the_training_targets_is_wrong(tmp_path, monkeypatch):
    sizes = {"train": {"batch_size": 32, "accumulation": 2, "val_every": 2, "steps": 2}}
    seen = {}
    for rate in (None, 0.25, 1.0):
        with monkeypatch.context() as patch:
            targets = Targets(patch)
            faults = [] if rate is None else [{"kind": "label_noise", "rate": rate}]
            trainer = tiny_trainer(tmp_path, **sizes, faults=faults)
            trainer.step(), trainer.step()
            seen[rate] = targets.seen
    changed = [
        float((a != b).float().mean()) for (training, a), (_, b) in zip(seen[None], seen[0.25]) if training
    ]
    assert changed == pytest.approx([0.25] * 4, abs=0.06)
    assert len({tuple(t.flatten().tolist()) for training, t in seen[1.0] if training}) == 4, "drawn anew"
    assert max(int(t.max()) for _, t in seen[1.0]) > 200, "over the whole vocabulary"
    for clean, noisy in zip(seen[None], seen[1.0]):
        if not clean[0]:
            assert torch.equal(clean[1], noisy[1]), "validation keeps its targets"


def test_a_splice_sees_the_same_wrong_targets(tmp_path):
    """Over clean attention the clean pass has the faulty one's gradients, bit for bit."""
    fault = {"faults": [{"kind": "label_noise", "rate": 0.3}], "train": {"accumulation": 2}}
    plain = tiny_trainer(tmp_path, **fault)
    spliced = tiny_trainer(tmp_path, **fault, interventions=[{"kind": "splice", "routes": ["all"]}])
    for _ in range(2):
        plain.step(), spliced.step()
    assert all(equal_bits(p, weights(spliced)[name]) for name, p in weights(plain).items())


def test_a_hot_learning_rate_is_the_schedule_s_times_a_factor(tmp_path):
    hot = tiny_trainer(tmp_path, faults=[{"kind": "learning_rate", "factor": 2.0}])
    twice = tiny_trainer(tmp_path, optimizer={"lr": 2e-2})
    for _ in range(3):
        hot.step(), twice.step()
    assert all(equal_bits(p, weights(twice)[name]) for name, p in weights(hot).items())
    rates = [[row["lr"] for row in trainer.writer.tables["steps"]] for trainer in (hot, twice)]
    assert rates[0] == rates[1]


def test_their_labels_name_them():
    faults = [
        {"kind": "learning_rate", "factor": 2.0},
        {"kind": "weight_noise", "routes": ["mlp"], "gain": 2.0},
        {"kind": "frozen", "routes": ["mlp"]},
        {"kind": "label_noise", "rate": 0.1},
    ]
    source = "lr_x2+weight_noise(mlp)x2+frozen(mlp)+label_noise(0.1)"
    assert tiny_run(faults=faults).labels()["source"] == source
