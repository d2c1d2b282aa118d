"""Training process of the baseline ``elastic``, as torch's agent starts it."""

from __future__ import annotations

import ctypes
import math
import signal
import socket
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException

from rayhive import events
from rayhive.baselines.base import batches_per_round
from rayhive.baselines.ddp import of_group
from rayhive.baselines.elastic import (
    ElasticRank,
    Restored,
    exchange_checkpoint,
    join_group,
    write_checkpoint,
)
from rayhive.peer.baseline import BaselineTraining
from rayhive.peer.channel import Channel
from rayhive.peer.from_spec import PeerFit
from rayhive.peer.measurements import SampleCounts
from rayhive.peer.process import leave, prepare_one_at_a_time
from rayhive.spec.commands import Resume
from rayhive.spec.replicate import PeerSpec

_PR_SET_PDEATHSIG = 1
#: Key of the committed samples of the group in a checkpoint.
SAMPLES = "rayhive_samples"


@dataclass(frozen=True)
class Order:
    """Order to train, the same for every process of a peer.

    Attributes:
        spec: The peer, as JSON.
        address: Name of the socket of the peer process.
        folder: Folder of the peer's checkpoints.
        facts: Further fields of ``peer_ready``.
    """

    spec: str
    address: str
    folder: str
    facts: dict[str, Any]

    @property
    def peer(self) -> PeerSpec:
        """The peer."""
        return PeerSpec.model_validate_json(self.spec)


class Stopped(SystemExit):
    """The agent ends this process, to start another one in a new group."""


def work(order: Order) -> None:
    """Train until the replicate is over; after an error, end the process with exit code 1."""
    sys.setswitchinterval(0.0005)
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    spec = order.peer
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(order.address)
    channel = Channel(connection, spec.name)
    try:
        _train(channel, spec, order)
    except BaseException as error:
        if not may_restart(error):
            channel.fail(error)
        traceback.print_exc()
        leave(1)


def may_restart(error: BaseException) -> bool:
    """Return whether an error means that the group has changed, and not that training failed."""
    return isinstance(error, (Stopped, SIGTERMException)) or of_group(error)


def _train(channel: Channel, spec: PeerSpec, order: Order) -> None:
    resume = channel.wait_for(Resume)
    placed = join_group(spec)
    restored = exchange_checkpoint(Path(order.folder), spec.name)
    # A group that goes on deals the data anew, and begins another order of the samples.
    share = placed.peer + restored.round * placed.peers, placed.peers
    fit = PeerFit(placed, share)
    prepare_one_at_a_time(fit.module)
    member = ElasticRank(placed, fit.batch_size)
    member.connect()
    training = ElasticTraining(placed, fit, member, channel, order, resume, restored)
    trainer = fit.make_trainer(
        member.strategy(), training, accumulate_grad_batches=member.batches_per_round
    )
    fit.run(trainer, restored.path)


class ElasticTraining(BaselineTraining):
    """Part of a peer's training between two changes of the group.

    Args:
        spec: The peer, with rank and size of the group.
        fit: Its workload and data.
        member: Its part of the baseline.
        channel: Channel to the peer process.
        order: The order to train.
        resume: What the peer has done before.
        restored: Where the group goes on.
    """

    _member: ElasticRank

    def __init__(
        self,
        spec: PeerSpec,
        fit: PeerFit,
        member: ElasticRank,
        channel: Channel,
        order: Order,
        resume: Resume,
        restored: Restored,
    ) -> None:
        super().__init__(spec, fit, member, channel, order.facts)
        self._resume, self._restored = resume, restored
        self._folder = Path(order.folder)
        self._samples_before, self._round_size = 0, member.round_size
        peers, target = order.peer.peers, spec.swarm.target_batch_size
        full = batches_per_round(target, fit.batch_size, peers) * fit.batch_size * peers
        self._evaluate_every = spec.evaluation.rounds(full)
        self._stopped, self._waits = False, True
        self._round = restored.round
        # All that had a checkpoint are gone: training begins again, and their rounds are undone.
        first = {f"peer-{number}" for number in range(order.peer.peers)}
        self._anew = restored.round == 0 and first.isdisjoint(restored.group)
        self._samples = SampleCounts(resume.computed)
        self._batches.samples = self._samples

    # -- begin ---------------------------------------------------------------------------------

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Take the committed samples of the group from a checkpoint."""
        self._samples_before = int(checkpoint[SAMPLES])

    def _begin(self, module: LightningModule) -> None:
        """Report ready and wait for the start of training, or report that the peer goes on."""
        signal.signal(signal.SIGTERM, self._on_sigterm)  # Lightning's would meet the others first
        if module.trainer.received_sigterm:  # before this
            raise Stopped(1)
        budget = self._spec.budget.samples_per_replicate
        if budget is not None:
            left = max(0, budget - self._samples_before)
            self._rounds = self._round + math.ceil(left / self._round_size)
        if self._resume.training:
            self._go_on()
        else:
            if self._restored.round:
                self._channel.emit(
                    events.StateLoaded(
                        round_of_state=self._round,
                        round=self._round,
                        seconds=self._restored.seconds,
                        received_bytes=self._restored.received_bytes,
                        lost=0,
                    )
                )
            super()._begin(module)
            if self._anew:
                self._channel.emit(
                    events.RolledBack(
                        round=0, group=self._restored.group, seconds=0.0, load_s=0.0, lost=0
                    )
                )
        self._waits = False

    def _go_on(self) -> None:
        resume, restored = self._resume, self._restored
        undone = sum(samples for number, samples in resume.rounds if number > restored.round)
        ended = time.monotonic() if resume.ended_s is None else resume.ended_s
        self._channel.emit(
            events.RolledBack(
                round_before=resume.round,
                round=restored.round,
                group=restored.group,
                seconds=time.monotonic() - ended,
                load_s=restored.seconds,
                received_bytes=restored.received_bytes,
                lost=resume.pending + undone,
            )
        )
        self._round_ended_s = resume.round_ended_s
        self._clock.start(resume.clock_s + time.monotonic() - resume.sent_s)

    # -- rounds --------------------------------------------------------------------------------

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Report a batch, and end the process if the agent wants it."""
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if self._stopped:
            raise Stopped(1)

    def _keep(self, trainer: Trainer) -> None:
        """Write a checkpoint if it is time."""
        if self._round % self._spec.elastic.checkpoint_every_rounds:
            return
        began = time.perf_counter()
        path = write_checkpoint(trainer, self._folder, self._round)
        self._channel.emit(
            events.Checkpoint(
                round=self._round,
                path=path.name,
                ok=True,
                bytes=path.stat().st_size,
                seconds=time.perf_counter() - began,
            )
        )

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Add the committed samples, and begin to count batches anew.

        Another group accumulates other numbers of batches, and its rounds begin with the first.
        """
        rounds = self._round - self._restored.round
        checkpoint[SAMPLES] = self._samples_before + rounds * self._round_size
        loop = checkpoint["loops"]["fit_loop"]
        batches = loop["epoch_loop.batch_progress"]
        for counts in (batches["total"], batches["current"]):
            counts.update(dict.fromkeys(counts, 0))

    # -- end -----------------------------------------------------------------------------------

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        """End after the present batch, or at once if the process waits for a command."""
        self._stopped = True
        if self._waits:
            raise Stopped(1)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Evaluate a last time, report the end, and stay until all members may leave."""
        self._waits = True
        super().on_train_end(trainer, pl_module)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Report the samples so far, or an error that a restart cannot mend."""
        if may_restart(exception):
            self._channel.emit(events.Progress(computed=self._samples.computed))
        else:
            self._channel.fail(exception)
