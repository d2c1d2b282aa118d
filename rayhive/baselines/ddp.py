"""Baseline ``ddp``: torch's DistributedDataParallel, over gloo or nccl."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from rayhive.baselines.base import Baseline, Member, batches_per_round
from rayhive.baselines.collectives import (
    Agreement,
    Traffic,
    listening_store,
    ring_bytes,
    store_at,
    use_interface,
)
from rayhive.spec.replicate import PeerSpec

#: Text of the errors of a collective whose other end is gone.
_OF_COLLECTIVE = re.compile(r"gloo|nccl", re.IGNORECASE)
#: A communication hook of torch: state and bucket to the future of the average.
Hook = Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]


class PeerEnvironment(ClusterEnvironment):
    """Cluster environment of a trainer whose processes are rayhive's peers.

    Args:
        rank: Number of this member.
        size: Number of members.
    """

    creates_processes_externally = True
    #: The process group exists before the trainer does.
    main_address, main_port = "", 0

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    @staticmethod
    def detect() -> bool:
        """Return False: it is given to the strategy."""
        return False

    def world_size(self) -> int:
        """Return the number of members."""
        return self._size

    def set_world_size(self, size: int) -> None:
        """Do nothing: the number is known."""

    def global_rank(self) -> int:
        """Return the number of this member."""
        return self._rank

    def set_global_rank(self, rank: int) -> None:
        """Do nothing: the number is known."""

    def local_rank(self) -> int:
        """Return 0: every member has a device of its own."""
        return 0

    def node_rank(self) -> int:
        """Return the number of this member."""
        return self._rank


class MeasuredDDP(DDPStrategy):
    """DDP with a communication hook on every device, and a note of each bucket.

    Lightning registers hooks on GPUs only.

    Args:
        traffic: Takes note of the buckets.
        hook: The hook.
        state: Its state.
        kwargs: Arguments of Lightning's strategy and of ``DistributedDataParallel``.
    """

    def __init__(self, traffic: Traffic, hook: Hook, state: Any, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._traffic, self._hook, self._state = traffic, hook, state

    def setup(self, trainer: Trainer) -> None:
        """Wrap the module, register the hook, and drop Lightning's broadcasts."""
        super().setup(trainer)
        # Lightning awaits a broadcast before every batch, and ignores its errors. Torch alone does
        # without this round trip, and a member hears of signals from its channel.
        loop = trainer.fit_loop.epoch_loop
        loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]
        assert isinstance(self.model, DistributedDataParallel)
        # torch refuses annotations that are text, as those of this file are
        hook = lambda state, bucket: self._noted(state, bucket)  # noqa: E731
        self.model.register_comm_hook(self._state, hook)

    def _noted(self, state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        self._traffic.bucket_ready()
        return self._hook(state, bucket)


class Rank(Member):
    """One process of a DDP training."""

    #: Class of the strategy.
    strategy_type: ClassVar[type[MeasuredDDP]] = MeasuredDDP

    def __init__(self, spec: PeerSpec, batch_size: int) -> None:
        super().__init__(spec, batch_size)
        self._size = spec.peers
        self.batches_per_round = batches_per_round(spec.round_size, batch_size, self._size)
        self.round_size = self.batches_per_round * batch_size * self._size
        self._traffic = Traffic()

    def hook(self) -> tuple[Hook, Any]:
        """Return the communication hook and its state."""
        return default_hooks.allreduce_hook, None

    def arguments(self) -> dict[str, Any]:
        """Return further arguments of the strategy and of ``DistributedDataParallel``."""
        return {}

    def listen(self, known: Sequence[str]) -> list[str]:
        """Create the store of the group, or connect to it."""
        limit = self.spec.swarm.averaging_timeout + 60.0
        use_interface(self.spec.host)
        if known:
            self._store = store_at(known[0], self._size, limit)
            return list(known)
        self._store, address = listening_store(self.spec.host, self._size, limit)
        return [address]

    def connect(self) -> None:
        """Initialise torch's process group."""
        limit_threads(self.spec)
        dist.init_process_group(
            backend(self.spec), store=self._store, rank=self.spec.peer, world_size=self._size
        )
        self.begin()

    def begin(self) -> None:
        """Count the bytes of the process group, which exists, from now on."""
        self._agreement = Agreement()
        self._traffic.install()

    def strategy(self) -> MeasuredDDP:
        """Return Lightning's DDP on the process group."""
        device = "cuda:0" if self.spec.accelerator == "cuda" else "cpu"
        hook, state = self.hook()
        return self.strategy_type(
            self._traffic,
            hook,
            state,
            parallel_devices=[torch.device(device)],
            cluster_environment=PeerEnvironment(self.spec.peer, self._size),
            process_group_backend=backend(self.spec),
            **self.arguments(),
        )

    def training_began(self) -> None:
        """Take note of the time."""
        self._traffic.restart()

    def backward_ended(self) -> None:
        """Take note of the time."""
        self._traffic.backward_ended()

    def round_fields(self) -> dict[str, Any]:
        """Return group, bytes and times."""
        fields = self._traffic.round_fields(self._size)
        outcome = "averaged" if self._size > 1 else "alone"
        return {"outcome": outcome, "group_size": self._size, **fields}

    def payload_fields(self, dense_bytes: int) -> dict[str, Any]:
        """Return the bytes of the dense gradients around the ring."""
        sent = float(ring_bytes(dense_bytes, self._size))
        return {"predicted_payload_bytes_per_round": sent}

    def agree(self, reason: str | None) -> str | None:
        """Exchange the reasons; see :class:`Agreement`."""
        return self._agreement.after_round(reason)

    def meet(self) -> None:
        """Wait for all members."""
        self._agreement.meet()

    def lost_others(self, error: BaseException) -> bool:
        """Return whether an error comes from a collective."""
        return of_group(error)

    def close(self) -> None:
        """End the process group."""
        self._traffic.remove()
        self._agreement.settle()
        dist.destroy_process_group()


class Ddp(Baseline):
    """DistributedDataParallel with torch's defaults.

    Every member computes the same number of micro-batches in a round, so the slowest one sets the
    pace. The training ends with an error as soon as a member is gone, and takes no further ones.
    """

    about = "torch's DistributedDataParallel, over gloo, on GPUs over nccl."
    member = Rank


def backend(spec: PeerSpec) -> str:
    """Return ``nccl`` if every peer has a GPU of its own, else ``gloo``."""
    classes = [node_class.gpus for _, node_class in spec.swarm.peer_classes]
    gpus = min(classes, default=spec.swarm.gpus_per_peer)
    return "nccl" if spec.accelerator == "cuda" and gpus >= 1 else "gloo"


def limit_threads(spec: PeerSpec) -> None:
    """Have Lightning leave the number of threads as the study wants it.

    Without the variable it gives each process the threads of the whole machine.
    """
    os.environ["OMP_NUM_THREADS"] = str(spec.swarm.threads_per_peer)


def of_group(error: BaseException) -> bool:
    """Return whether an error comes from a collective whose other end is gone, or its store."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and bool(_OF_COLLECTIVE.search(str(error)))
