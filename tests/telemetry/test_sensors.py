"""Sensor rows against direct float64 computation."""

import math
from itertools import pairwise

import pytest
import torch

from qkpipe.model.qk_norm import unit_rms
from qkpipe.model.routes import route_of
from qkpipe.telemetry.schema import TABLES
from tiny_training import FAULTY, STREAM, step_gradients, tiny_trainer, weights

LIVELY = {"model": {"init_std": 0.3}}


class Watch:
    """Wraps every layer's kernel: what entered it in the latest forward, and the gradient of what left."""

    def __init__(self, trainer):
        self.seen = [{} for _ in trainer.model.attentions]
        for record, attention in zip(self.seen, trainer.model.attentions, strict=True):
            attention.kernel = self._wrap(attention.kernel, record)

    @staticmethod
    def _wrap(kernel, record):
        def watched(q, k, v, draw):
            out, stats = kernel(q, k, v, draw)
            record.update({name: x.detach().double() for name, x in zip("qkvo", (q, k, v, out))})
            if out.requires_grad:
                out.register_hook(lambda gradient: record.update(do=gradient.double()))
            return out, stats

        return watched


def reference(seen, scale):
    """Per head, in float64: largest logit, mean entropy; per layer: residual of delta = rowsum(dO * O)."""
    q, k, v, o, do = (seen[name] for name in ("q", "k", "v", "o", "do"))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    logits = (q @ k.mT * scale).masked_fill(torch.ones(q.shape[2], q.shape[2]).triu(1).bool(), -math.inf)
    p = logits.softmax(-1)
    entropy = -torch.xlogy(p, p).sum(-1)
    ds = p * (do @ v.mT - (do * o).sum(-1, keepdim=True))
    return logits.amax((0, 2, 3)), entropy.mean((0, 2)), ds


def rows(trainer, table, step=0, **where):
    """The one row asked for."""
    (row,) = (
        row
        for row in trainer.writer.tables[table]
        if row["step"] == step and all(row[key] == value for key, value in where.items())
    )
    return row


@pytest.mark.parametrize("accumulation", [1, 2], ids=["one batch", "accumulating"])
@pytest.mark.parametrize(
    "variant",
    [
        {"attention": {"kind": "sdpa"}},
        {"attention": STREAM},
        {"attention": {"kind": "sdpa"}, "model": {"init_std": 0.3, "n_kv_heads": 1, "position": "rope"}},
    ],
    ids=["sdpa", "stream", "grouped"],
)
def test_logits_entropy_and_residual(tmp_path, variant, accumulation):
    """Of several micro-batches the last is sensed: its queries, output and gradient together."""
    trainer = tiny_trainer(tmp_path, **{**LIVELY, **variant}, train={"accumulation": accumulation})
    watch = Watch(trainer)
    trainer.step()
    for layer, (seen, attention) in enumerate(zip(watch.seen, trainer.model.attentions, strict=True)):
        logit_H, entropy_H, ds = reference(seen, attention.scale)
        for head in range(2):
            row = rows(trainer, "heads", layer=layer, head=head)
            assert row["max_logit"] == pytest.approx(float(logit_H[head]), rel=1e-5)
            assert row["max_logit_raw"] == row["max_logit"]
            assert row["entropy"] == pytest.approx(float(entropy_H[head]), rel=1e-5)
        row = rows(trainer, "layers", layer=layer)
        assert row["entropy_mean"] == pytest.approx(float(entropy_H.mean()), rel=1e-5)
        assert row["entropy_min"] == pytest.approx(float(entropy_H.min()), rel=1e-5)
        # Rounding error over its own size: the order of an fp32 ulp, whatever the draw; a mismatch of tensors gives 0.1.
        assert 1e-9 < row["residual_r"] < 1e-5
        assert abs(row["residual_mean"]) < 1e-6 * float(ds.abs().sum(-1).mean())


def test_the_residual_of_a_rounded_output(tmp_path):
    """Large enough to be compared with float64: SDPA whose output is rounded to bf16 in the forward."""
    trainer = tiny_trainer(tmp_path, **LIVELY)
    for attention in trainer.model.attentions:
        attention.kernel = rounded_output(attention.kernel)
    watch = Watch(trainer)
    trainer.step()
    for layer, (seen, attention) in enumerate(zip(watch.seen, trainer.model.attentions, strict=True)):
        _, _, ds = reference(seen, attention.scale)
        row_sum = ds.sum(-1)
        r_BH = row_sum.abs().mean(-1) / ds.abs().sum(-1).mean(-1)
        row = rows(trainer, "layers", layer=layer)
        assert row["residual_r"] == pytest.approx(float(r_BH.mean()), rel=1e-3)
        assert row["residual_mean"] == pytest.approx(float(row_sum.mean()), rel=1e-2)
        assert row["residual_r"] > 1e-4


def rounded_output(kernel):
    def rounded(q, k, v, draw):
        out, stats = kernel(q, k, v, draw)
        return out + (out.detach().bfloat16().float() - out.detach()), stats

    return rounded


@pytest.mark.parametrize("how", ["model", "guard"])
def test_raw_logits_are_those_without_normalisation(tmp_path, how):
    guard = [{"kind": "guard", "threshold": 1e-6}]
    changes = {"model": {"init_std": 0.3, "qk_norm": "unit_rms"}} if how == "model" else LIVELY
    trainer = tiny_trainer(
        tmp_path,
        **changes,
        interventions=guard if how == "guard" else [],
        train={"telemetry_every": 1},
    )
    raw = []
    for _ in range(2):
        raw.clear()
        for attention in trainer.model.attentions:
            attention.tap = None
        hooks = [
            a.register_forward_pre_hook(lambda module, args: raw.append(raw_logits(module, args[0])))
            for a in trainer.model.attentions
        ]
        trainer.step()
        for hook in hooks:
            hook.remove()
    for layer in (0, 1):
        for head in (0, 1):
            row = rows(trainer, "heads", step=1, layer=layer, head=head)
            logit, normalised = (float(x[head]) for x in raw[layer])
            assert row["max_logit_raw"] == pytest.approx(logit, rel=1e-5)
            assert row["max_logit"] == pytest.approx(normalised, rel=1e-5)
            assert logit != pytest.approx(normalised, rel=1e-2)


@torch.no_grad()
def raw_logits(attention, x):
    """Largest logit a head without and with normalisation."""
    q, k = (attention._split(x, W).double() for W in (attention.W_Q, attention.W_K))
    future = torch.ones(x.shape[1], x.shape[1]).triu(1).bool()
    return [
        (a @ b.mT * attention.scale).masked_fill(future, -math.inf).amax((0, 2, 3))
        for a, b in ((q, k), (unit_rms(q.float()).double(), unit_rms(k.float()).double()))
    ]


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_spectra_are_those_of_the_weights_before_the_update(tmp_path, kv_heads):
    trainer = tiny_trainer(tmp_path, model={"n_kv_heads": kv_heads}, train={"telemetry_every": 1})
    with torch.no_grad():
        for block in trainer.model.blocks:
            block.norm_attention.weight.uniform_(0.5, 2.0, generator=torch.Generator().manual_seed(0))
    for step in range(2):
        before = {name: W.double() for name, W in weights(trainer).items()}
        trainer.step()
        for layer in (0, 1):
            row = rows(trainer, "layers", step=step, layer=layer)
            place = f"blocks.{layer}."
            W_Q, W_K = (before[f"{place}attention.{W}.weight"] for W in ("W_Q", "W_K"))
            for column, W in (("q", W_Q), ("k", W_K)):
                values = torch.linalg.svdvals(W)[:3]
                assert [row[f"sigma_{column}_{i}"] for i in (1, 2, 3)] == pytest.approx(
                    values.tolist(), rel=1e-6
                )
            for column, name in {
                "v": "attention.W_V",
                "o": "attention.W_O",
                "up": "mlp.W_up",
                "down": "mlp.W_down",
            }.items():
                largest = float(torch.linalg.matrix_norm(before[f"{place}{name}.weight"], 2))
                assert row[f"sigma_{column}"] == pytest.approx(largest, rel=1e-6)
            gain = before[f"{place}norm_attention.weight"]
            forms = [
                (W_Q.view(2, 8, 16)[h] * gain).mT @ (W_K.view(kv_heads, 8, 16)[h * kv_heads // 2] * gain)
                for h in range(2)
            ]
            largest = max(float(torch.linalg.matrix_norm(form, 2)) for form in forms)
            assert row["sigma_qk_max"] == pytest.approx(largest, rel=1e-6)


def test_gradient_norms_of_the_routes(tmp_path):
    trainer = tiny_trainer(tmp_path)
    gradients = step_gradients(trainer)
    found = {(row["layer"], row["route"]): row["grad_norm"] for row in trainer.writer.tables["routes"]}
    expected = {}
    for name, gradient in gradients.items():
        route, layer = route_of(name)
        expected[layer, route] = expected.get((layer, route), 0.0) + float(gradient.double().square().sum())
    assert found == pytest.approx({place: square**0.5 for place, square in expected.items()}, rel=1e-5)


@pytest.mark.parametrize("attention", [{"kind": "sdpa"}, STREAM, FAULTY], ids=["sdpa", "stream", "faulty"])
def test_every_column_is_filled_where_it_should_be(tmp_path, attention):
    trainer = tiny_trainer(
        tmp_path,
        attention=attention,
        faults=[{"kind": "quantizer", "routes": ["all", "embed"]}],
        probe={"kind": "causal", "action": "observe", "k": 2},
        train={"steps": 5},
    )
    for _ in range(5):
        trainer.step()
    tables = trainer.writer.tables
    counts = {"steps": 5, "layers": 3 * 2, "heads": 3 * 2 * 2, "routes": 3 * (2 * 5 + 1), "probe": 5 * 2 * 2}
    assert {name: len(found) for name, found in tables.items()} == counts
    for name, found in tables.items():
        for row in found:
            assert {"run_id", *row} == set(TABLES[name].names)
            empty = {"coherence", "update_coherence"} if row["step"] == 0 else set()
            empty |= {"val_loss"} if row["step"] not in (2, 4) else set()
            if (
                name == "steps" and attention["kind"] == "sdpa"
            ):  # torch's kernels keep their logits to themselves
                empty |= {"max_logit"}
            if row.get("route") == "embed" and row["layer"] >= 0:  # the gains of two norms are not quantized
                empty = {"error_norm", "error_mean", "coherence"}
            for column, value in row.items():
                assert (value is None) == (column in empty), (name, row["step"], column)
                assert value is None or isinstance(value, str) or math.isfinite(value)
    assert [row["step"] for row in tables["layers"]] == [0, 0, 2, 2, 4, 4], "every second step, and the last"


def test_taps_are_removed_and_sensing_changes_no_bit(tmp_path):
    runs = []
    for every in (1, 100):
        trainer = tiny_trainer(tmp_path, attention=FAULTY, train={"telemetry_every": every, "steps": 100})
        for _ in range(3):
            trainer.step()
            assert all(attention.tap is None for attention in trainer.model.attentions)
        runs.append(weights(trainer))
    assert all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])


def test_spectral_alignment_is_the_share_of_tokens_on_one_side(tmp_path):
    trainer = tiny_trainer(tmp_path, **LIVELY)
    inputs = []
    for attention in trainer.model.attentions:
        attention.register_forward_pre_hook(lambda module, args: inputs.append(args[0].detach().double()))
    before = weights(trainer)
    trainer.step()
    for layer in (0, 1):
        W_Q = before[f"blocks.{layer}.attention.W_Q.weight"].double()
        side = (inputs[layer] @ torch.linalg.svd(W_Q).Vh[0]).sign()
        assert rows(trainer, "layers", layer=layer)["spectral_alignment"] == pytest.approx(
            abs(float(side.mean())), abs=1e-9
        )


def test_update_coherence_counts_the_updates_before_the_look(tmp_path):
    """An EMA of the agreement of successive updates, which starts at the first agreement."""
    trainer = tiny_trainer(tmp_path, train={"telemetry_every": 1})
    seen = [weights(trainer)]
    for _ in range(4):
        trainer.step()
        seen.append(weights(trainer))
    for layer in (0, 1):
        names = [f"blocks.{layer}.attention.{W}.weight" for W in ("W_Q", "W_K")]
        signs = [
            torch.cat([(new[n] - old[n]).sign().flatten() for n in names]) for old, new in pairwise(seen)
        ]
        agreements = [float((a * b).double().mean()) for a, b in pairwise(signs)]
        found = [rows(trainer, "layers", step=s, layer=layer)["update_coherence"] for s in range(4)]
        assert found[:2] == [None, None]
        assert found[2:] == pytest.approx([agreements[0], 0.9 * agreements[0] + 0.1 * agreements[1]])
