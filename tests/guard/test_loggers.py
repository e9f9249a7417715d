"""What the adapters write where people look."""

import sys

import pytest

from qkpipe.errors import BadInput
from qkpipe.guard import to_mlflow, to_tensorboard

VALUES = {"max_logit": 31.5, "strength": 0.25}


def test_mlflow(tmp_path):
    mlflow = pytest.importorskip("mlflow")
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    try:
        with mlflow.start_run() as run:
            log = to_mlflow(prefix="guard")
            log(7, VALUES)
            log(8, VALUES | {"max_logit": 5.5})
        history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "guard/max_logit")
        assert [(point.step, point.value) for point in history] == [(7, 31.5), (8, 5.5)]
        assert mlflow.get_run(run.info.run_id).data.metrics["guard/strength"] == 0.25
    finally:
        mlflow.set_tracking_uri(None)


def test_mlflow_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(BadInput, match="pip install mlflow"):
        to_mlflow()


def test_tensorboard():
    """By the signature of torch's SummaryWriter, which also tensorboardX has."""
    written = []

    class Writer:
        def add_scalar(self, tag, scalar_value, global_step=None):
            written.append((tag, scalar_value, global_step))

    to_tensorboard(Writer())(7, VALUES)
    assert written == [("qk_guard/max_logit", 31.5, 7), ("qk_guard/strength", 0.25, 7)]
