"""What benchmarks train with torch's DDP and with rayhive, and how a peer of a swarm trains it."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import psutil

from benchmarks.shaped_peers import INTERFACE, Seat, wire

PARAMETERS = 64 * 768 + 768 + 768 * 896 + 896 + 896 * 10 + 10
#: Rank of PowerSGD.
RANK = 4
RUN = "against-ddp"


class Stops:
    """Notes the end of every round, and the bytes sent and processor time spent until then.

    Args:
        warm_up: Rounds before the measurement.
        interface: Interface to the other peers.
    """

    def __init__(self, warm_up: int, interface: str = INTERFACE) -> None:
        self._warm_up, self._interface = warm_up, interface
        self._processes: list[psutil.Process] = []
        self._at: dict[int, tuple[float, int, float]] = {}

    def note(self, round_: int) -> None:
        if round_ >= self._warm_up and round_ not in self._at:
            now = time.perf_counter()
            self._at[round_] = now, wire(self._interface).sent, self._processor_s()

    def _processor_s(self) -> float:
        """Return the processor time of this process and its children [s]."""
        if not self._processes:
            this = psutil.Process()
            self._processes = [this, *this.children(recursive=True)]
        spent = [process.cpu_times() for process in self._processes]
        return float(sum(times.user + times.system for times in spent))

    def result(self, incomplete: int = 0) -> dict[str, Any]:
        """Return the durations of the measured rounds; bytes and processor time of the mean one."""
        stops = [self._at[round_] for round_ in sorted(self._at)]
        rounds = len(stops) - 1
        return {
            "seconds": [later[0] - one[0] for one, later in itertools.pairwise(stops)],
            "sent": (stops[-1][1] - stops[0][1]) / rounds,
            "processor_s": (stops[-1][2] - stops[0][2]) / rounds,
            "incomplete": incomplete,
        }


@dataclass
class Task:
    """What a peer trains.

    Attributes:
        module: The module.
        loss: Returns the loss of the module on the batch.
        batch: The batch, the same in each step.
        batch_size: Its samples.
        batches: Batches of a peer and round.
        optimizer: Makes the optimizer of parameters.
    """

    module: Any
    loss: Callable[[Any, Any], Any]
    batch: Any
    batch_size: int
    batches: int
    optimizer: Callable[[Any], Any]


def make_module(batch_s: float, seed: int = 0) -> Any:
    """Return a module of 0.75 million parameters with a wait in its forward pass.

    Args:
        batch_s: The wait [s].
        seed: Seed of the parameters.
    """
    import torch

    class Waiting(torch.nn.Sequential):
        def forward(self, data: torch.Tensor) -> torch.Tensor:
            time.sleep(batch_s)
            return super().forward(data)

    torch.manual_seed(seed)
    return Waiting(
        torch.nn.Linear(64, 768), torch.nn.ReLU(), torch.nn.Linear(768, 896), torch.nn.ReLU(),
        torch.nn.Linear(896, 10),
    )  # fmt: skip


def lightning_module(task: Task) -> Any:
    """Return the Lightning module of a task."""
    from lightning.pytorch import LightningModule

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.inner = task.module

        def training_step(self, batch: Any) -> Any:
            return task.loss(self.inner, batch)

        def configure_optimizers(self) -> Any:
            return task.optimizer(self.parameters())

    return Module()


def batches_of(task: Task) -> Any:
    """Return the data of a task: its batch, without end."""

    class Batches:
        def __iter__(self) -> Any:
            return itertools.repeat(task.batch)

    return Batches()


def plain_trainer(strategy: Any, callback: Any, **options: Any) -> Any:
    """Return a trainer that does nothing beside training."""
    from lightning.pytorch import Trainer

    return Trainer(
        strategy=strategy,
        max_epochs=-1,
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        **{"accelerator": "cpu", "devices": 1, **options},
    )


def joined(
    seat: Seat,
    configuration: dict[str, Any],
    samples: int,
    batch_size: int,
    module: Any,
    batches: Any,
    callback: Any,
    on_event: Any = None,
    trainer_options: Mapping[str, Any] | None = None,
    strategy_options: Mapping[str, Any] | None = None,
) -> None:
    """Train a module as one peer of a swarm, with the arguments that a study passes.

    Args:
        seat: The peer's place.
        configuration: Configuration of the study.
        samples: Samples of a round of gradients, over the swarm.
        batch_size: Samples of a batch.
        module: A Lightning module.
        batches: Its data.
        callback: A callback, which ends the training.
        on_event: Called with the kind and the fields of each event.
        trainer_options: Further arguments of the trainer; it uses the CPU by default.
        strategy_options: Arguments of the strategy in place of those of a study.
    """
    import hivemind
    import torch
    from lightning.fabric.plugins.environments.lightning import LightningEnvironment

    from rayhive.peer.from_spec import strategy_arguments
    from rayhive.spec import Configuration, SwarmConfig, WorkloadConfig
    from rayhive.spec.replicate import PeerSpec
    from rayhive.strategy.dht import dial_from_own_ports
    from rayhive.strategy.strategy import HivemindStrategy

    torch.set_num_threads(1)
    first = seat.found()
    host = seat.hosts[seat.index]
    dial_from_own_ports()
    dht = hivemind.DHT(
        initial_peers=first, host_maddrs=[f"/ip4/{host}/tcp/0"], use_relay=False, start=True
    )
    seat.tell([str(address) for address in dht.get_visible_maddrs()])
    peers = len(seat.hosts)
    spec = PeerSpec(
        run_id=RUN,
        peer=seat.index,
        peers=peers,
        workload=WorkloadConfig(name="digits"),
        swarm=SwarmConfig(peers=peers, target_batch_size=samples),
        configuration=Configuration(**configuration),
    )
    arguments = {**strategy_arguments(spec, batch_size), **(strategy_options or {})}
    strategy = HivemindStrategy(dht=dht, on_event=on_event, **arguments)
    trainer = plain_trainer(
        strategy, callback, plugins=[LightningEnvironment()], **(trainer_options or {})
    )
    trainer.fit(module, batches)
    dht.shutdown()


def peer_rounds(
    seat: Seat,
    configuration: dict[str, Any],
    task: Task,
    rounds: int,
    warm_up: int,
    at_end: Callable[[], None] = lambda: None,
    on_event: Callable[[str, dict[str, Any]], None] = lambda kind, fields: None,
    **options: Any,
) -> dict[str, Any]:
    """Train one peer with the arguments of a study; return its rounds, see :class:`Stops`.

    Args:
        seat: The peer's place.
        configuration: Configuration of the study.
        task: What the peer trains.
        rounds: Rounds that are measured.
        warm_up: Rounds before them.
        at_end: Called after the last round, before the peer leaves the swarm.
        on_event: Called with the kind and the fields of each event.
        options: Further arguments of :func:`joined`.
    """
    from lightning.pytorch import Callback

    stops, incomplete, peers = Stops(warm_up, seat.interface), 0, len(seat.hosts)
    last = rounds + warm_up

    def note(kind: str, fields: dict[str, Any]) -> None:
        nonlocal incomplete
        on_event(kind, fields)
        if kind == "transition":
            stops.note(fields["round"])
        elif kind in ("round", "state_round") and fields["round"] > warm_up:
            incomplete += fields["outcome"] != "averaged"

    class Rounds(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            trainer.strategy.catch_up()
            assert trainer.strategy.optimizer.tracker.wait_for_peers(peers, 60)

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.strategy.optimizer.local_epoch >= last:
                trainer.should_stop = True

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            trainer.strategy.optimizer.settle()
            at_end()

    samples = task.batch_size * task.batches * peers
    parts = (lightning_module(task), batches_of(task), Rounds(), note)
    joined(seat, configuration, samples, task.batch_size, *parts, **options)
    return stops.result(incomplete)
