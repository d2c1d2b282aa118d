"""Baseline ``elastic``: DDP under torch's elastic agent, restarted from checkpoints."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from torch.distributed.distributed_c10d import _set_pg_timeout, default_pg_timeout
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.launcher.api import LaunchConfig

from rayhive.baselines.collectives import use_interface
from rayhive.baselines.ddp import Ddp, MeasuredDDP, Rank, backend, limit_threads
from rayhive.files import replaced
from rayhive.spec.replicate import PeerSpec

#: Restarts after failures; a torchrun user chooses more than there are faults.
MAX_RESTARTS = 10_000
#: Interval at which the agent looks after its process, torchrun's default [s].
MONITOR_S = 0.1
#: Shortest timeout of a collective [s]: members start their processes at different speeds.
SHORTEST_S = 30.0
#: Variable without which members of a changed group look for each other at a store that is gone
#: (https://github.com/pytorch/pytorch/issues/135712).
OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
_CHECKPOINT = re.compile(r"round-(\d+)\.ckpt")


class EverywhereDDP(MeasuredDDP):
    """DDP of which every rank writes the checkpoints, each on its own node."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Write a checkpoint."""
        self.checkpoint_io.save_checkpoint(checkpoint, filepath, storage_options=storage_options)


class ElasticRank(Rank):
    """One training process; its spec has the rank and the size of the present group."""

    strategy_type: ClassVar[type[MeasuredDDP]] = EverywhereDDP

    def listen(self, known: Sequence[str]) -> list[str]:
        """Do nothing: the agent met the others."""
        return list(known)

    def connect(self) -> None:
        """Count the bytes of the process group."""
        self.begin()

    def training_began(self) -> None:
        """Take note of the time; from now on a member that vanishes counts as lost soon."""
        super().training_began()
        self._limit(collective_timeout(self.spec))

    def meet(self) -> None:
        """Wait for all members; each may evaluate for longer than a collective may take."""
        self._limit(default_pg_timeout)
        super().meet()
        self._limit(collective_timeout(self.spec))

    def _limit(self, timeout: timedelta) -> None:
        _set_pg_timeout(timeout)
        self._agreement.limit(timeout)


class Elastic(Ddp):
    """DDP in processes of torch's elastic agent, as ``torchrun`` starts them.

    When a member is lost or comes, the agents of the others end their training processes, meet
    again, and start new ones, which go on from the newest checkpoint. Every member writes a
    checkpoint on its own node; one that lacks the newest gets it from a member that has it.
    """

    about = "DDP under torch's elastic agent, restarted from checkpoints when members go or come."
    member = ElasticRank
    restarts = True

    def trains(self, spec: PeerSpec) -> bool:
        """Return True: peers may join at any time."""
        return True


def launch_config(spec: PeerSpec, address: str, folder: str) -> LaunchConfig:
    """Return the options of torch's agent, in torchrun's terms.

    Args:
        spec: The peer.
        address: Address of the store of the rendezvous, host:port.
        folder: Folder for the agent's files.
    """
    elastic = spec.elastic
    return LaunchConfig(
        min_nodes=1,
        max_nodes=max(spec.peers, spec.replicas or 0),
        nproc_per_node=1,
        run_id=spec.run_id,
        role="peer",
        rdzv_backend="c10d",
        rdzv_endpoint=address,
        rdzv_configs={
            "is_host": False,
            "last_call_timeout": elastic.last_call_timeout,
            "keep_alive_interval": elastic.keep_alive_interval,
            "keep_alive_max_attempt": elastic.keep_alive_max_attempt,
        },
        max_restarts=MAX_RESTARTS,
        monitor_interval=MONITOR_S,
        local_addr=spec.host,
        logs_specs=DefaultLogsSpecs(log_dir=folder),
    )


@dataclass(frozen=True)
class Restored:
    """Point from which the members of a group go on.

    Attributes:
        path: The checkpoint; None to begin with round 0.
        round: Its round.
        group: Names of the members.
        received_bytes: Size of the checkpoint, if another member sent it [B].
        seconds: Time of the exchange [s].
    """

    path: Path | None
    round: int
    group: list[str]
    received_bytes: int | None
    seconds: float


def collective_timeout(spec: PeerSpec) -> timedelta:
    """Return the time after which a member counts as lost, once training has begun.

    Before that, and while members evaluate, it is torch's default of half an hour: the first
    broadcast has all parameters, and members of unequal speed do not begin together.
    """
    return timedelta(seconds=max(SHORTEST_S, spec.swarm.averaging_timeout))


def join_group(spec: PeerSpec) -> PeerSpec:
    """Connect with the other members that the agents have found.

    Args:
        spec: The peer.

    Returns:
        The spec with the rank and the size of the group as number and number of peers.
    """
    use_interface(spec.host)
    limit_threads(spec)
    dist.init_process_group(backend(spec))
    return spec.model_copy(update={"peer": dist.get_rank(), "peers": dist.get_world_size()})


def newest_checkpoint(folder: Path) -> tuple[int, Path | None]:
    """Return round and path of the newest checkpoint in a folder; 0 and None without one."""
    found = [
        (int(match[1]), path)
        for path in folder.iterdir()
        if (match := _CHECKPOINT.fullmatch(path.name)) is not None
    ]
    return max(found, default=(0, None))


def exchange_checkpoint(folder: Path, name: str) -> Restored:
    """Agree with the other members on the newest checkpoint, and get it if it is not here.

    Args:
        folder: Folder of this member's checkpoints.
        name: Name of this member.
    """
    began, rank = time.perf_counter(), dist.get_rank()
    channel = dist.new_group(backend="gloo")  # torch's timeout: a checkpoint may take long
    own, path = newest_checkpoint(folder)
    told: list[tuple[str, int]] = [("", 0)] * dist.get_world_size()
    dist.all_gather_object(told, (name, own), group=channel)
    rounds = [round_ for _, round_ in told]
    newest, received = max(rounds), None
    source = rounds.index(newest)
    for lacking in (other for other, round_ in enumerate(rounds) if round_ < newest):
        if rank == source:
            assert path is not None
            data = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
            dist.send(torch.tensor([len(data)]), lacking, group=channel)
            dist.send(data, lacking, group=channel)
        elif rank == lacking:
            size = torch.zeros(1, dtype=torch.long)
            dist.recv(size, source, group=channel)
            data = torch.empty(int(size), dtype=torch.uint8)
            dist.recv(data, source, group=channel)
            path, received = checkpoint_path(folder, newest), len(data)
            with replaced(path, durable=False) as new:
                new.write_bytes(data.numpy().tobytes())
    dist.barrier(group=channel)  # the collectives of training wait less long for a member
    seconds = time.perf_counter() - began
    return Restored(path, newest, [member for member, _ in told], received, seconds)


def checkpoint_path(folder: Path, round_: int) -> Path:
    """Return the path of the checkpoint of a round."""
    return folder / f"round-{round_}.ckpt"


def write_checkpoint(trainer: Trainer, folder: Path, round_: int) -> Path:
    """Write the checkpoint of a round, and remove older ones; every member calls it."""
    path = checkpoint_path(folder, round_)
    with replaced(path, durable=False) as new:
        trainer.save_checkpoint(new, weights_only=False)
    for other in folder.glob("round-*.ckpt"):
        if other != path:
            other.unlink()
    return path
