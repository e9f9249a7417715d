"""Reads spectra, logits, entropy and the row-sum residual off a model, every few steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from qkpipe.guard import max_logit_per_head
from qkpipe.model.attention import Tap
from qkpipe.model.routes import route_of
from qkpipe.model.transformer import Transformer
from qkpipe.numerics.spectra import leading_triplets, leading_values_batched, sigma_qk_max
from qkpipe.telemetry.errors import GradientErrors
from qkpipe.telemetry.updates import UpdateSigns
from qkpipe.telemetry.writer import PartWriter


class Sensors:
    """Senses one step: :meth:`arm` before its forward, :meth:`read` after its backward and before the update.

    Rows describe the weights and activations that this step's forward used. Of several micro-batches the last is sensed.
    ``whole`` makes a whole tensor of a process's share, where the model is cut among several.
    """

    def __init__(self, model: Transformer, whole: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._model, self._whole = model, whole
        self._spectral_state: dict[str, Any] = {}
        self.updates = UpdateSigns(model, whole)
        groups: dict[tuple[int, str], list[tuple[str, torch.nn.Parameter]]] = {}
        for name, parameter in model.named_parameters():
            route, layer = route_of(name)
            groups.setdefault((layer, route), []).append((name, parameter))
        self._groups = groups

    def arm(self) -> None:
        """Record the next forward and backward; a later forward overwrites an earlier one."""
        for attention in self._model.attentions:
            attention.tap = Tap()

    @torch.no_grad()
    def read(self, step: int, writer: PartWriter, errors: GradientErrors) -> None:
        """Write this step's rows to ``layers``, ``heads`` and ``routes``."""
        spectra = self._spectra()
        V_LDK = self._leading_inputs()
        coherence = self.updates.coherence or [None] * len(V_LDK)
        for layer, attention in enumerate(self._model.attentions):
            tap, attention.tap = attention.tap, None
            stats = tap.statistics()
            logit_H = stats.max_logit.amax(0)
            entropy_H = stats.entropy.mean(0)
            normalised = tap.q.data_ptr() != tap.q_raw.data_ptr()
            raw_H = max_logit_per_head(tap.q_raw, tap.k_raw, attention.scale) if normalised else logit_H
            writer.add(
                "layers",
                step=step,
                layer=layer,
                **{key: float(values[layer]) for key, values in spectra.items()},
                entropy_mean=float(entropy_H.mean()),
                entropy_min=float(entropy_H.min()),
                residual_r=float(stats.residual_r.mean()),
                residual_mean=float(stats.residual_mean.mean()),
                update_coherence=coherence[layer],
                spectral_alignment=float((tap.x.double() @ V_LDK[layer]).sign().mean().abs()),
            )
            for head in range(attention.n_heads):
                writer.add(
                    "heads",
                    step=step,
                    layer=layer,
                    head=head,
                    max_logit=float(logit_H[head]),
                    max_logit_raw=float(raw_H[head]),
                    entropy=float(entropy_H[head]),
                )
        for (layer, route), members in self._groups.items():
            names = [name for name, _ in members]
            norm = torch.linalg.vector_norm(torch.stack([self._whole(p.grad).norm() for _, p in members]))
            row = errors.row(step, names, [p.numel() for _, p in members])
            writer.add("routes", step=step, layer=layer, route=route, grad_norm=float(norm), **row)

    def state_dict(self) -> dict[str, Any]:
        return {**self._spectral_state, "updates": self.updates.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._spectral_state = {key: value for key, value in state.items() if key != "updates"}
        if "updates" in state:  # a checkpoint of an older version has none
            self.updates.load_state_dict(state["updates"])

    def _leading_inputs(self) -> torch.Tensor:
        """The input that every layer's W_Q amplifies most: its leading right singular vector, (layers, d_model, 1), float64."""
        W_LOD = torch.stack([b.attention.W_Q.weight for b in self._model.blocks])
        *_, V_LDK, state = leading_triplets(W_LOD, 1, self._spectral_state.get("inputs"))
        self._spectral_state["inputs"] = state
        return V_LDK

    def _spectra(self) -> dict[str, Any]:
        """Columns of ``layers`` that depend on the weights alone, each a sequence over layers."""
        blocks = self._model.blocks
        matrices = {
            "q": [b.attention.W_Q.applied_weight for b in blocks],
            "k": [b.attention.W_K.applied_weight for b in blocks],
            "v": [b.attention.W_V.applied_weight for b in blocks],
            "o": [b.attention.W_O.applied_weight for b in blocks],
            "up": [b.mlp.W_up.applied_weight for b in blocks],
            "down": [b.mlp.W_down.applied_weight for b in blocks],
        }
        flat = [W for family in matrices.values() for W in family]
        k = min(3, *(min(W.shape) for W in flat))
        values, state = leading_values_batched(flat, k, self._spectral_state.get("values"))
        self._spectral_state["values"] = state
        n = len(blocks)
        by_family = {name: values[i * n : (i + 1) * n] for i, name in enumerate(matrices)}
        columns = {
            f"sigma_{name}_{rank + 1}": by_family[name][:, rank] for name in ("q", "k") for rank in range(k)
        }
        columns |= {f"sigma_{name}": by_family[name][:, 0] for name in ("v", "o", "up", "down")}
        attention = blocks[0].attention
        columns["sigma_qk_max"] = sigma_qk_max(
            torch.stack(matrices["q"]),
            torch.stack(matrices["k"]),
            attention.n_heads,
            attention.n_kv_heads,
            torch.stack([b.norm_attention.weight for b in blocks]),
        )
        return columns
