"""The ranks of one run: how a step's work is cut among processes, and what they tell each other.

``train.accumulation`` counts the micro-batches of a step over all ranks, which share them out. So one rank and many see the same
micro-batches, with the same draws and the same faults in each, and differ by the order of sums alone.

Gradients of replicated weights are summed once a step, after the faults that act on each micro-batch's own (``pre_reduction``);
torch's DistributedDataParallel sums inside the backward, where it would be too late for these. Sharded weights are those of
FSDP2 (:func:`torch.distributed.fsdp.fully_shard`), which sums inside the backward by nature: what needs a rank's own gradient,
or whole weights, is refused there by the config.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from qkpipe.config.models import RunConfig
from qkpipe.errors import BadInput

T = TypeVar("T")


class Ranks:
    """One process, which does all of it. What several do otherwise is in the subclasses."""

    rank = 0
    size = 1

    @property
    def leads(self) -> bool:
        """Whether this rank writes the run's files."""
        return self.rank == 0

    def cut(self, micros: int) -> range:
        """Which of a step's micro-batches are this rank's: an equal run of neighbours.

        The leader's are the last: telemetry describes the last micro-batch, whatever the number of ranks.
        """
        each = micros // self.size
        first = (self.size - 1 - self.rank) * each
        return range(first, first + each)

    def gather(self, values: list[float]) -> list[float]:
        """Every rank's equally many values, dealt out in turn (value i of rank 0, of rank 1, ...); NaN stays NaN."""
        return values

    def total(self, value: float) -> float:
        """The sum over ranks, equal in every bit on all of them."""
        return value

    def maximum(self, value: float | None) -> float | None:
        """The largest over ranks, NaN if one is; None, on every rank alike, where there is nothing to see."""
        return value

    def ask_leader(self, question: Callable[[], T]) -> T:
        """What the leader answers, on every rank; its :class:`BadInput` too."""
        return question()

    def shard(self, model: nn.Module) -> None:
        """Leave this rank its share of the weights; before the optimizer is made."""

    def reduce(self, gradients: list[Tensor]) -> None:
        """Sum gradients over ranks, in place."""

    def summed(self, tensor: Tensor) -> Tensor:
        """The sum over ranks of a tensor that each computed from its own micro-batches."""
        return tensor

    def own(self, tensors: list[Tensor]) -> list[Tensor]:
        """This rank's shares, in the same memory."""
        return tensors

    def norm(self, shares: list[Tensor]) -> float:
        """Euclidean norm of what these are this rank's shares of."""
        return float(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(shares))))

    def over_shares(self, value: float) -> float:
        """The sum of what was counted in each rank's shares."""
        return value

    def whole(self, tensor: Tensor) -> Tensor:
        """The tensor that this is a share of. Every rank must ask."""
        return tensor

    def put(self, target: Tensor, whole: Tensor) -> None:
        """Set ``target`` to its share of ``whole``."""
        target.copy_(whole)

    @contextmanager
    def whole_weights(self, model: nn.Module) -> Iterator[None]:
        """The model's weights are whole in here. Every rank must enter."""
        yield

    def whole_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """A state dict for a checkpoint that any kind and number of ranks can load."""
        return state

    def load(self, model: nn.Module, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Take ``state["model"]`` and ``state["optimizer"]`` of such a checkpoint."""
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])


ONE_RANK = Ranks()


class Replicated(Ranks):
    """Every rank holds all weights and moments, and does the same to them (``kind: ddp``)."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def gather(self, values: list[float]) -> list[float]:
        mine = torch.tensor(values, dtype=torch.float64)
        gathered = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(gathered, mine)
        return torch.stack(gathered, -1).flatten().tolist()

    def total(self, value: float) -> float:
        return sum(self.gather([value]))

    def maximum(self, value: float | None) -> float | None:
        return None if value is None else float(torch.tensor(self.gather([value]), dtype=torch.float64).max())

    def ask_leader(self, question: Callable[[], T]) -> T:
        answer: list[Any] = [None, None]
        if self.leads:
            try:
                answer[0] = question()
            except BadInput as error:
                answer[1] = str(error)
        dist.broadcast_object_list(answer)
        if answer[1] is not None:
            raise BadInput(answer[1])
        return answer[0]

    def reduce(self, gradients: list[Tensor]) -> None:
        for work in [dist.all_reduce(gradient, async_op=True) for gradient in gradients]:
            work.wait()

    def summed(self, tensor: Tensor) -> Tensor:
        total = tensor.clone()
        dist.all_reduce(total)
        return total

    def whole_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """Raises :class:`RuntimeError` where the replicas are no longer one model: such a run means nothing."""
        prints: list[Any] = [None] * self.size
        dist.all_gather_object(prints, _fingerprint(state["model"]))
        if drifted := [rank for rank, other in enumerate(prints) if other != prints[0]]:
            raise RuntimeError(f"the weights of rank {drifted[0]} are no longer those of rank 0")
        return state


class Sharded(Replicated):
    """Every rank holds a share of each weight, its gradient and its moments, cut along the first axis (``kind: fsdp2``)."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self._mesh = dist.init_device_mesh(device, (self.size,))

    def shard(self, model: nn.Module) -> None:
        from torch.distributed.fsdp import fully_shard

        for module in (*model.blocks, model):
            fully_shard(module, mesh=self._mesh)
            # Sums, not means: the losses are shares of the step's mean already.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other

    def reduce(self, gradients: list[Tensor]) -> None:
        """Nothing is left to do: the backward did it."""

    def own(self, tensors: list[Tensor]) -> list[Tensor]:
        return [tensor.detach().to_local() for tensor in tensors]

    def norm(self, shares: list[Tensor]) -> float:
        return self.total(super().norm(shares) ** 2) ** 0.5

    def over_shares(self, value: float) -> float:
        return self.total(value)

    def whole(self, tensor: Tensor) -> Tensor:
        return tensor.full_tensor() if _is_share(tensor) else tensor

    def put(self, target: Tensor, whole: Tensor) -> None:
        target.copy_(_share_of(whole, target))

    @contextmanager
    def whole_weights(self, model: nn.Module) -> Iterator[None]:
        modules = (model, *model.blocks)
        for module in modules:
            module.unshard()
        try:
            yield
        finally:
            for module in modules:
                module.reshard()

    def whole_state(self, state: dict[str, Any]) -> dict[str, Any]:
        def on_leader(share: Tensor) -> Tensor | None:
            whole = share.full_tensor()
            return whole.cpu() if self.leads else None

        return _mapped(state, on_leader)

    def load(self, model: nn.Module, optimizer: Optimizer, state: dict[str, Any]) -> None:
        own = model.state_dict()
        model.load_state_dict({name: _share_of(value, own[name]) for name, value in state["model"].items()})
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        moments = {
            place: {
                # Adam's count of steps is a number, and everybody's.
                name: _share_of(value, parameters[place]) if value.shape == parameters[place].shape else value
                for name, value in remembered.items()
            }
            for place, remembered in state["optimizer"]["state"].items()
        }
        optimizer.load_state_dict({**state["optimizer"], "state": moments})


@contextmanager
def join(run: RunConfig) -> Iterator[Ranks]:
    """The ranks of ``run``, of which this process is one; it must have been started by torchrun if there are several.

    Raises:
        BadInput: another number of processes was started than the config says. What is raised inside, on every rank, the leader
            says alone.
    """
    wanted, started = run.parallel.ranks, int(os.environ.get("WORLD_SIZE", "1"))
    if wanted != started:
        raise BadInput(
            f"{run.arm}: parallel.ranks: {wanted}, and {started} processes were started; `qkpipe train` starts as many as are "
            f"wanted, torchrun those of --nproc-per-node"
        )
    if wanted == 1:
        yield ONE_RANK
        return
    cuda = run.train.device == "cuda"
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    ranks = Sharded(run.train.device) if run.parallel.kind == "fsdp2" else Replicated()
    if not ranks.leads:
        logging.disable(logging.INFO)
    try:
        yield ranks
    except BadInput:
        if ranks.leads:
            raise
        raise SystemExit(2) from None
    # Not after any other error: the ranks left behind wait in a collective, and torchrun ends them.
    dist.destroy_process_group()


def _is_share(tensor: Tensor) -> bool:
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def _share_of(whole: Tensor, like: Tensor) -> Tensor:
    """This rank's share of ``whole``, cut as ``like`` is; ``whole`` itself where that is not cut."""
    from torch.distributed.tensor import distribute_tensor

    if not _is_share(like):
        return whole
    return distribute_tensor(whole.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def _mapped(value: Any, act: Callable[[Tensor], Any]) -> Any:
    """The same nested dictionaries and lists, with ``act`` applied to every share in them."""
    if isinstance(value, dict):
        return {key: _mapped(inner, act) for key, inner in value.items()}
    if isinstance(value, list):
        return [_mapped(inner, act) for inner in value]
    return act(value) if _is_share(value) else value


def _fingerprint(tensors: dict[str, Tensor]) -> list[int]:
    """Changes with any bit of the tensors, but for coincidence."""
    return [int(t.detach().reshape(-1).view(torch.int32).sum(dtype=torch.int64)) for t in tensors.values()]
