"""One step: accumulation, clipping, what happens to what is not finite, and the rows that are written."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from qkpipe.hooks import Hook
from tiny_training import FAULTY, STREAM, equal_bits, step_gradients, tiny_trainer, weights


class TestAccumulation:
    @pytest.mark.parametrize("attention", [{"kind": "sdpa"}, STREAM], ids=["sdpa", "stream"])
    def test_micro_batches_add_up_to_their_batch(self, tmp_path, attention):
        """The mean over 3 micro-batches of 2 is the mean over 6, up to the order of fp32 sums."""
        micro = tiny_trainer(tmp_path, attention=attention, train={"batch_size": 2, "accumulation": 3})
        whole = tiny_trainer(tmp_path, attention=attention, train={"batch_size": 6, "accumulation": 1})
        a, b = step_gradients(micro), step_gradients(whole)
        for name in a:
            torch.testing.assert_close(a[name], b[name], rtol=1e-4, atol=1e-7)
        rows = [trainer.writer.tables["steps"][0] for trainer in (micro, whole)]
        for column in ("loss", "grad_norm"):
            assert rows[0][column] == pytest.approx(rows[1][column], rel=1e-5)

    def test_one_micro_batch_is_the_batch(self, tmp_path):
        trainer = tiny_trainer(tmp_path)
        windows = trainer._batch(0)[0]
        trainer.model(windows[:, :-1], windows[:, 1:]).backward()
        expected = {name: p.grad.clone() for name, p in trainer.model.named_parameters()}
        found = step_gradients(trainer)
        assert all(equal_bits(found[name], expected[name]) for name in expected)

    def test_stochastic_micro_batches_draw_their_own(self, tmp_path):
        """Two equal micro-batches must not be rounded alike."""
        stochastic = {**STREAM, "precision": {"uniform": 2, "mode": "stochastic"}}
        trainer = tiny_trainer(tmp_path, attention=stochastic, train={"accumulation": 2})
        batch = trainer._batch(0)
        own = []

        class Capture(Hook):
            def micro_gradient(self, step, micro):
                own.append(trainer.parameters[2].grad.clone())

        trainer.hooks.append(Capture())
        trainer._batch = lambda step: batch[[0, 0]]
        trainer.step()
        trainer.step()
        assert len({gradient.numpy().tobytes() for gradient in own}) == 4


class TestClipping:
    def test_norm_is_cut_to_the_limit(self, tmp_path):
        trainer = tiny_trainer(tmp_path, optimizer={"clip": 0.05})
        unclipped = step_gradients(tiny_trainer(tmp_path))
        total = math.sqrt(sum(float(g.double().square().sum()) for g in unclipped.values()))
        trainer.step()
        row = trainer.writer.tables["steps"][0]
        assert row["grad_norm"] == pytest.approx(total, rel=1e-5)
        assert row["clipped_norm"] == 0.05
        used = math.sqrt(sum(float(p.grad.double().square().sum()) for p in trainer.parameters))
        assert used == pytest.approx(0.05, rel=1e-5)

    @pytest.mark.parametrize("clip", [None, 1e9])
    def test_below_the_limit_nothing_changes(self, tmp_path, clip):
        trainer = tiny_trainer(tmp_path, optimizer={"clip": clip})
        before = step_gradients(trainer)
        row = trainer.writer.tables["steps"][0]
        assert row["clipped_norm"] == row["grad_norm"] > 0
        assert all(equal_bits(before[n], p.grad) for n, p in trainer.model.named_parameters())


class Spoil(Hook):
    """Puts a value into one gradient in one step."""

    def __init__(self, trainer, step, value):
        self.trainer, self.step, self.value = trainer, step, value

    def reduced_gradient(self, step):
        if step == self.step:
            self.trainer.parameters[0].grad[0, :3] = self.value


class TestNonFiniteGradient:
    @pytest.mark.parametrize("value", [math.nan, math.inf])
    @pytest.mark.parametrize("clip", [None, 1.0])
    def test_is_an_event_and_the_optimizer_gets_zeros(self, tmp_path, value, clip):
        trainer = tiny_trainer(tmp_path, optimizer={"clip": clip})
        trainer.hooks.append(Spoil(trainer, 2, value))
        for _ in range(2):
            trainer.step()
        before = weights(trainer)
        assert trainer.step().finite
        assert all(not p.grad.any() for p in trainer.parameters)
        after = weights(trainer)
        assert all(after[name].isfinite().all() for name in after)
        assert any(not torch.equal(after[name], before[name]) for name in after), "momentum still moves them"
        (event,) = trainer.writer.tables["events"]
        assert (event["step"], event["kind"]) == (2, "nonfinite_gradient")
        assert json.loads(event["detail"]) == {"norm": str(value), "elements": 3}
        row = trainer.writer.tables["steps"][2]
        assert not math.isfinite(row["grad_norm"])
        assert row["clipped_norm"] == 0.0
        assert row["update_norm"] > 0
        assert trainer.step().finite, "and training goes on"

    def test_in_the_first_step_nothing_moves(self, tmp_path):
        trainer = tiny_trainer(tmp_path)
        trainer.hooks.append(Spoil(trainer, 0, math.nan))
        before = weights(trainer)
        trainer.step()
        assert all(equal_bits(before[name], after) for name, after in weights(trainer).items())
        assert trainer.writer.tables["steps"][0]["update_norm"] == 0.0


class TestNonFiniteLoss:
    @pytest.mark.parametrize("accumulation", [1, 2])
    def test_is_recorded_and_nothing_is_updated(self, tmp_path, accumulation):
        trainer = tiny_trainer(tmp_path, train={"accumulation": accumulation})
        trainer.step()
        with torch.no_grad():
            trainer.model.norm_final.weight[0] = math.nan
        before = weights(trainer)
        result = trainer.step()
        assert not result.finite and math.isnan(result.loss)
        after = weights(trainer)
        assert all(equal_bits(before[name], after[name]) for name in before)
        row = trainer.writer.tables["steps"][1]
        assert row["step"] == 1 and math.isnan(row["loss"])
        assert "update_norm" not in row
        (event,) = trainer.writer.tables["events"]
        assert (event["step"], event["kind"], json.loads(event["detail"])) == (1, "diverged", {"loss": "nan"})
        assert trainer.step_index == 2


class TestRows:
    def test_one_row_a_step_and_validation_where_it_is_due(self, tmp_path):
        trainer = tiny_trainer(tmp_path, train={"steps": 8, "val_every": 3})
        for _ in range(8):
            trainer.step()
        rows = trainer.writer.tables["steps"]
        assert [row["step"] for row in rows] == list(range(8))
        assert [row["step"] for row in rows if row["val_loss"] is not None] == [2, 5, 7]

    def test_validation_is_the_mean_over_its_batches(self, tmp_path):
        trainer = tiny_trainer(tmp_path, train={"steps": 1})
        trainer.step()
        with torch.no_grad():
            losses = [trainer.model(w[:, :-1], w[:, 1:]) for w in trainer._validation]
        (row,) = trainer.writer.tables["steps"]
        assert row["val_loss"] == pytest.approx(float(torch.stack(losses).mean()), rel=1e-6)

    def test_validation_changes_no_bit_of_training(self, tmp_path):
        runs = []
        for every in (1, 100):
            trainer = tiny_trainer(tmp_path, attention=FAULTY, train={"val_every": every, "steps": 100})
            for _ in range(3):
                trainer.step()
            runs.append(weights(trainer))
        assert all(equal_bits(runs[0][name], runs[1][name]) for name in runs[0])

    def test_update_norm_is_that_of_the_realised_update(self, tmp_path):
        """After the probe as well."""
        trainer = tiny_trainer(tmp_path, probe={"kind": "causal", "action": "isotropic", "k": 2})
        before = weights(trainer)
        trainer.step()
        squares = sum(
            float((p.detach() - before[n]).double().square().sum())
            for n, p in trainer.model.named_parameters()
        )
        assert trainer.writer.tables["steps"][0]["update_norm"] == pytest.approx(squares**0.5, rel=1e-5)

    def test_twins_see_the_same_batches(self, tmp_path):
        healthy, faulty, other = (
            tiny_trainer(tmp_path, attention=attention, seed=seed)
            for attention, seed in (({"kind": "sdpa"}, 3), (FAULTY, 3), (FAULTY, 4))
        )
        for step in range(3):
            assert torch.equal(healthy._batch(step), faulty._batch(step))
            assert not torch.equal(healthy._batch(step), other._batch(step))


class TestOrder:
    def test_stages_of_a_step(self, tmp_path):
        trainer = tiny_trainer(tmp_path, train={"accumulation": 2})
        seen = []

        class Record(Hook):
            def __getattribute__(self, name):
                stages = (
                    "begin_step",
                    "micro_gradient",
                    "reduced_gradient",
                    "splice",
                    "before_update",
                    "after_update",
                    "end_step",
                )
                if name in stages:
                    return lambda *arguments: seen.append(
                        (name, *arguments, torch.equal(trainer.parameters[0], start))
                    )
                return super().__getattribute__(name)

        start = trainer.parameters[0].detach().clone()
        trainer.hooks.append(Record())
        trainer.step()
        assert seen == [
            ("begin_step", 0, True),
            ("micro_gradient", 0, 0, True),
            ("micro_gradient", 0, 1, True),
            ("reduced_gradient", 0, True),
            ("splice", 0, True),
            ("before_update", 0, True),
            ("after_update", 0, False),
            ("end_step", 0, False),
        ]


class TestLogits:
    """``steps.max_logit`` is what a guard would have seen in that step."""

    def test_every_step_of_a_reporting_kernel(self, tmp_path):
        trainer = tiny_trainer(tmp_path, attention=STREAM, train={"accumulation": 2, "telemetry_every": 1})
        for _ in range(3):
            trainer.step()
        rows = trainer.writer.tables["steps"]
        sensed = trainer.writer.tables["heads"]  # the last micro-batch alone
        for step, row in enumerate(rows):
            assert row["max_logit"] >= max(r["max_logit"] for r in sensed if r["step"] == step)

    def test_agrees_with_the_guard_also_beside_a_clean_pass(self, tmp_path):
        actions = [
            {"kind": "guard", "threshold": 1e-6, "mode": "log"},
            {"kind": "splice", "routes": ["qk"]},
        ]
        trainer = tiny_trainer(tmp_path, attention=FAULTY, interventions=actions)
        for _ in range(3):
            trainer.step()
            assert trainer.writer.tables["steps"][-1]["max_logit"] == trainer.hooks[0].guard.max_logit()

    def test_null_where_the_kernel_is_silent(self, tmp_path):
        trainer = tiny_trainer(tmp_path, attention={"kind": "sdpa"})
        trainer.step()
        assert trainer.writer.tables["steps"][0]["max_logit"] is None


A_RUN = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from tiny_training import FAULTY, equal_bits, tiny_trainer
mechanisms = {{"interventions": [{{"kind": "guard", "threshold": 30.0}}], "probe": {{"kind": "causal", "action": "on_target"}}}}
trainer = tiny_trainer(Path({folder!r}), attention=FAULTY, optimizer={{"name": {optimizer!r}}}, **mechanisms)
for _ in range(2):
    trainer.step()
trainer.load_state_dict(trainer.state_dict())
sys.exit("torch._dynamo" in sys.modules)
"""


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_a_run_does_not_load_the_compiler(tmp_path, optimizer):
    """It would cost a run of seconds more than a second."""
    tests = str(Path(__file__).resolve().parents[1])
    program = A_RUN.format(tests=tests, folder=str(tmp_path), optimizer=optimizer)
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
