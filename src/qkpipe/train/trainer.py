"""One training step, with everything that may act in it, in the order of :mod:`qkpipe.hooks`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qkpipe.config.models import RunConfig
from qkpipe.data.batches import training_batch, validation_batches
from qkpipe.data.shards import Tokens
from qkpipe.hooks import Hook
from qkpipe.model.transformer import Transformer
from qkpipe.numerics.counter_rng import fold_in
from qkpipe.telemetry.errors import GradientErrors
from qkpipe.telemetry.sensors import Sensors
from qkpipe.telemetry.writer import PartWriter, Silent
from qkpipe.train.context import BuildContext
from qkpipe.train.distributed import ONE_RANK, Ranks
from qkpipe.train.optimizer import learning_rate, make_optimizer


@dataclass(frozen=True)
class StepResult:
    """What one step did. ``finite`` is False where the loss was not, and then no update was made."""

    loss: float
    finite: bool


class Trainer:
    """A model in training: weights, optimizer, mechanisms and telemetry of one run.

    A non-finite loss ends the run: the step is recorded and no update is made. A non-finite gradient norm is an event
    (``nonfinite_gradient``): the optimizer is given a zero gradient in that step, as a clipping factor of 1/inf gives, so that
    momentum still moves the weights; nothing is skipped silently.

    ``ranks``: who trains it together with this process; every one of them has a trainer of its own.
    """

    def __init__(
        self, run: RunConfig, tokens: Tokens, writer: PartWriter | Silent, ranks: Ranks = ONE_RANK
    ) -> None:
        self.run, self.tokens, self.writer, self.ranks = run, tokens, writer, ranks
        self.device = torch.device(run.train.device)
        self.model = Transformer(run.model, run.attention, tokens.vocab_size)
        self.model.initialise(run.seed)
        self.model.to(self.device)
        ranks.shard(self.model)
        self.optimizer = make_optimizer(self.model, run.optimizer)
        self.parameters = list(self.model.parameters())
        self.sensors = Sensors(self.model, ranks.whole)
        self.errors = GradientErrors()
        self.step_index = 0
        self._clean: dict[str, Tensor] | None = None
        self._max_logit: float | None = None
        self._validation = [
            torch.from_numpy(batch).to(self.device)
            for batch in validation_batches(
                tokens.validation,
                batches=run.train.val_batches,
                sequences=run.train.batch_size,
                context=run.model.context,
            )[ranks.rank :: ranks.size]
        ]
        self.context = BuildContext(
            run, self.model, self.optimizer, writer, self.errors, self._clean_gradients, ranks
        )
        self.hooks: list[Hook] = [mechanism.build(self.context) for mechanism in run.mechanisms]

    def step(self) -> StepResult:
        """Forward, backward, faults, splice, clip, update, probe; one row of ``steps``."""
        step, run = self.step_index, self.run
        sensed = step % run.train.telemetry_every == 0 or step == run.train.steps - 1
        self._clean = None
        self._each("begin_step", step)
        self.model.train()
        if sensed:
            self.sensors.arm()
        guard_active = any(hook.active for hook in self.hooks)
        self._max_logit = None
        loss = self._accumulate(step, self._batch(step), faulty=True)
        self._max_logit = self.ranks.maximum(self._max_logit)
        if not math.isfinite(loss):
            observed = {"guard_active": guard_active, "max_logit": self._max_logit}
            self.writer.add("steps", step=step, loss=loss, lr=self._lr(step), **observed)
            self.context.event(step, "diverged", loss=str(loss))
            self.step_index += 1
            return StepResult(loss, finite=False)
        self._each("reduced_gradient", step)
        self._each("splice", step)
        if sensed:
            with self.ranks.whole_weights(self.model):
                self.sensors.read(step, self.writer, self.errors)
        grad_norm, clipped_norm = self._clip(step)
        for group in self.optimizer.param_groups:
            group["lr"] = self._lr(step)
        self._each("before_update", step)
        before = [p.detach().clone() for p in self.parameters]
        self.optimizer.step()
        clipped_norm = next((h.clipped_norm for h in self.hooks if h.clipped_norm is not None), clipped_norm)
        self._each("after_update", step)
        moved = self.ranks.own(before)
        torch._foreach_sub_(moved, self.ranks.own([p.detach() for p in self.parameters]))
        update_norm = self.ranks.norm(moved)
        self.sensors.updates.observe(before)
        self._each("end_step", step)
        self.step_index += 1
        self.writer.add(
            "steps",
            step=step,
            loss=loss,
            lr=self.optimizer.param_groups[0]["lr"],
            grad_norm=grad_norm,
            clipped_norm=clipped_norm,
            update_norm=update_norm,
            guard_active=guard_active,
            max_logit=self._max_logit,
            val_loss=self._validate() if self._validates(step) else None,
        )
        return StepResult(loss, finite=True)

    def state_dict(self) -> dict[str, Any]:
        return {
            "step": self.step_index,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "sensors": self.sensors.state_dict(),
            "errors": self.errors.state_dict(),
            "hooks": [hook.state_dict() for hook in self.hooks],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step_index = state["step"]
        self.ranks.load(self.model, self.optimizer, state)
        self.sensors.load_state_dict(state["sensors"])
        self.errors.load_state_dict(state["errors"])
        for hook, hook_state in zip(self.hooks, state["hooks"], strict=True):
            hook.load_state_dict(hook_state)

    def _batch(self, step: int) -> Tensor:
        train, context = self.run.train, self.run.model.context
        sequences = train.batch_size * train.accumulation
        windows = training_batch(
            self.tokens.train, seed=self.run.seed, step=step, sequences=sequences, context=context
        )
        micros = windows.reshape(train.accumulation, train.batch_size, -1)
        mine = self.ranks.cut(train.accumulation)
        return torch.from_numpy(micros[mine.start : mine.stop]).to(self.device)

    def _accumulate(self, step: int, batch_ABT: Tensor, *, faulty: bool) -> float:
        """Mean loss and, in ``parameter.grad``, its gradient over the step's micro-batches, A of which are this rank's; stops at
        a non-finite loss.
        """
        self.optimizer.zero_grad(set_to_none=True)
        micros = self.run.train.accumulation
        total: list[Tensor] | None = None
        loss_sum = 0.0
        for micro, windows in zip(self.ranks.cut(micros), batch_ABT, strict=True):
            loss = (
                self.model(windows[:, :-1], windows[:, 1:], draw=fold_in(self.run.seed, step, micro)) / micros
            )
            loss_sum += self.ranks.total(float(loss.detach()))
            if faulty:
                self._look_at_logits()
            if not math.isfinite(loss_sum):
                return loss_sum
            loss.backward()
            if faulty:
                self._each("micro_gradient", step, micro)
            if len(batch_ABT) > 1:
                own = [p.grad for p in self.parameters]
                total = own if total is None else torch._foreach_add(total, own)
                self.optimizer.zero_grad(set_to_none=True)
        if total is not None:
            for parameter, gradient in zip(self.parameters, total, strict=True):
                parameter.grad = gradient
        self.ranks.reduce([p.grad for p in self.parameters])
        return loss_sum

    def _look_at_logits(self) -> None:
        """Raise ``_max_logit`` to the latest forward's, where every layer's kernel reports it; NaN stays NaN."""
        seen = [attention.max_logit_BH for attention in self.model.attentions]
        if all(logit is not None for logit in seen):
            peak = float(torch.stack([logit.max() for logit in seen]).max())
            self._max_logit = peak if self._max_logit is None else float(np.maximum(self._max_logit, peak))

    def _clean_gradients(self) -> dict[str, Tensor]:
        """Gradients of the current step without any fault, by parameter name; ``parameter.grad`` is left as it was."""
        if self._clean is None:
            faulty = [p.grad for p in self.parameters]
            with self.model.clean_pass():
                self._accumulate(self.step_index, self._batch(self.step_index), faulty=False)
            self._clean = {name: p.grad for name, p in self.model.named_parameters()}
            for parameter, gradient in zip(self.parameters, faulty, strict=True):
                parameter.grad = gradient
        return self._clean

    def _clip(self, step: int) -> tuple[float, float]:
        """Clip to the configured global norm in place; returns the norm before and after."""
        gradients = self.ranks.own([p.grad for p in self.parameters])
        norm = self.ranks.norm(gradients)
        if not math.isfinite(norm):
            bad = self.ranks.over_shares(sum(int((~g.isfinite()).sum()) for g in gradients))
            self.context.event(step, "nonfinite_gradient", norm=str(norm), elements=int(bad))
            for gradient in gradients:
                gradient.zero_()
            return norm, 0.0
        limit = self.run.optimizer.clip
        if limit is None or norm <= limit:
            return norm, norm
        torch._foreach_mul_(gradients, limit / norm)
        return norm, limit

    @torch.no_grad()
    def _validate(self) -> float:
        self.model.eval()
        losses = [float(self.model(windows[:, :-1], windows[:, 1:])) for windows in self._validation]
        return float(np.mean(self.ranks.gather(losses)))

    def _validates(self, step: int) -> bool:
        return (step + 1) % self.run.train.val_every == 0 or step == self.run.train.steps - 1

    def _lr(self, step: int) -> float:
        return learning_rate(step, self.run.train.steps, self.run.optimizer)

    def _each(self, stage: str, *arguments: int) -> None:
        for hook in self.hooks:
            getattr(hook, stage)(*arguments)
