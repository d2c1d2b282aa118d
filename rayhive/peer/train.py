"""One peer of a collaborative run by hand: what ``rayhive train FILE`` does."""

from __future__ import annotations

import contextlib
import secrets
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

import rayhive.faults  # noqa: F401 - a study names its scenarios
from rayhive.errors import ConfigError, Problem
from rayhive.membership.addresses import initial_peers as resolve_peers
from rayhive.peer.from_spec import make_trainer, strategy_arguments, workload_and_data
from rayhive.registry import CODECS
from rayhive.spec import Configuration, Range, SweepConfig, load_sweep
from rayhive.spec.replicate import PeerSpec
from rayhive.strategy.strategy import HivemindStrategy
from rayhive.workloads.base import Workload

#: Shortest time between two lines of progress [s].
LINE_EVERY_S = 1.0


def train_file(
    path: str | Path,
    initial_peers: Sequence[str] = (),
    *,
    overrides: Sequence[str] = (),
    host: str | None = None,
) -> None:
    """Train as one peer until the budget of the study is spent or Ctrl-C.

    The first peer prints the command with which others join.

    Args:
        path: The study. Its first enqueued configuration is trained, else its constants.
        initial_peers: Addresses of peers to join; without any, and without ``INITIAL_PEERS`` in
            the environment, this is the first peer.
        overrides: ``a.b=c`` strings that replace single fields of the study.
        host: Address to listen on; all if absent.

    Raises:
        ConfigError: The study is not valid, or has no single configuration.
        PeerError: Nobody answers at the addresses.
    """
    config = load_sweep(path, overrides)
    first = resolve_peers(initial_peers or None) is None
    spec = peer_spec(config, first)
    workload, batch_size, loader = workload_and_data(spec)
    torch.set_num_threads(spec.swarm.threads_per_peer)
    print(f"{config.name}: {workload.name}, {spec.configuration.label}", flush=True)
    strategy = HivemindStrategy(
        initial_peers=list(initial_peers) or None,
        host_maddrs=None if host is None else [f"/ip4/{host}/tcp/0"],
        scheduler_fn=workload.scheduler_fn(),
        extra_tensors=workload.extra_tensors,
        **strategy_arguments(spec, batch_size),
    )
    progress = Progress(spec, workload)
    trainer = make_trainer(spec, strategy, progress)
    with stopping_on_interrupt(trainer, progress):
        trainer.fit(workload.module(spec.seed), loader)


def peer_spec(config: SweepConfig, first: bool) -> PeerSpec:
    """Return what the peer is to do.

    Args:
        config: The study.
        first: Whether it begins the swarm. Every other peer draws an order of the data of its
            own, as nobody numbers the peers of such a run.

    Raises:
        ConfigError: The study has no single configuration.
    """
    peers = config.swarm.peers
    return PeerSpec(
        run_id=config.name.replace(".", "_"),
        peer=0 if first else peers + secrets.randbelow(2**31),
        peers=peers,
        seed=config.seed,
        workload=config.workload,
        swarm=config.swarm,
        configuration=single_configuration(config),
        budget=config.budget,
        evaluation=config.evaluation,
    )


def single_configuration(config: SweepConfig) -> Configuration:
    """Return the configuration that one peer trains.

    Raises:
        ConfigError: Nothing is enqueued, and an axis of the space that matters has several points.
    """
    if config.enqueue:
        return config.enqueue[0]
    space, problems = config.space, []

    def constant(name: str) -> Any:
        axis = getattr(space, name)
        if not isinstance(axis, Range) and len(axis) == 1:
            return axis[0]
        shown = axis.model_dump() if isinstance(axis, Range) else list(axis)
        allowed = "one value, or a configuration under enqueue, of which the first is trained"
        problems.append(Problem(f"space.{name}", shown, allowed))
        return None

    fields = {name: constant(name) for name in ("codec", "powersgd_rank", "delay")}
    if fields["codec"] in CODECS and CODECS.get(fields["codec"]).uses_threshold:
        fields["threshold"] = constant("threshold")
    if fields["powersgd_rank"] is not None:
        fields["min_compression_ratio"] = constant("min_compression_ratio")
    if problems:
        raise ConfigError(problems)
    return Configuration(**fields)


class Progress(Callback):
    """Prints rounds and evaluations, and ends the fit when the budget is spent.

    Args:
        spec: The peer.
        workload: What it trains.
    """

    def __init__(self, spec: PeerSpec, workload: Workload) -> None:
        self.spec, self.workload = spec, workload
        self.reason = "the budget is spent"
        self._round = 0
        self._evaluated = -1
        self._samples = 0
        self._loss = float("nan")
        self._began = self._printed = 0.0

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Begin to count, at the first batch."""
        if self._began == 0.0:
            self._round = self._optimizer(trainer).local_epoch
            self._began = self._printed = time.monotonic()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Print a line after a round, unless the last one is too recent."""
        optimizer = self._optimizer(trainer)
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if isinstance(loss, torch.Tensor):
            self._loss = float(loss.detach())
        self._samples += optimizer.batch_size_per_step
        before, self._round = self._round, optimizer.local_epoch
        now = time.monotonic()
        if self._round != before:
            if now - self._printed >= LINE_EVERY_S:
                self._print_line(trainer, now)
            every = self.spec.evaluate_every_rounds
            if self._round // every > before // every:
                self._evaluate(trainer, pl_module)
        rounds = self.spec.rounds
        seconds = self.spec.budget.seconds_per_replicate
        if (rounds is not None and self._round >= rounds) or now - self._began >= seconds:
            trainer.should_stop = True

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print what came of it."""
        self._optimizer(trainer).state_averager.step(wait_for_delayed_updates=True)
        if self._evaluated != self._round:
            self._evaluate(trainer, pl_module)
        print(f"ended in round {self._round}: {self.reason}", flush=True)

    @staticmethod
    def _optimizer(trainer: Trainer) -> Any:
        return trainer.strategy.optimizer  # type: ignore[attr-defined]

    def _print_line(self, trainer: Trainer, now: float) -> None:
        rate = self._samples / (now - self._printed)
        peers = self._optimizer(trainer).live_peers
        print(
            f"round {self._round}: loss {self._loss:.4f}, {rate:.0f} samples/s here, "
            f"{peers} {'peer' if peers == 1 else 'peers'}",
            flush=True,
        )
        self._samples, self._printed = 0, now

    def _evaluate(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._evaluated = self._round
        values = self.workload.evaluate(pl_module, pl_module.device)
        shown = ", ".join(f"{name} {value:.4f}" for name, value in values.items())
        print(f"round {self._round}: held out: {shown}", flush=True)
        target = self.workload.target
        if self.spec.budget.stop_at_target and target.reached(values[target.metric]):
            self.reason = "the target is reached"
            trainer.should_stop = True


@contextlib.contextmanager
def stopping_on_interrupt(trainer: Trainer, progress: Progress) -> Iterator[None]:
    """Let the first Ctrl-C end the fit of the body in order; the second interrupts it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)

    def stop(*_: Any) -> None:
        signal.signal(signal.SIGINT, before)
        progress.reason = "interrupted"
        trainer.should_stop = True
        print("stopping after this batch; Ctrl-C again stops at once", flush=True)

    signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
