"""One peer of a collaborative run by hand, as ``rayhive train FILE`` starts it."""

from __future__ import annotations

import contextlib
import secrets
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from rayhive.errors import ConfigError, Problem
from rayhive.membership.addresses import initial_peers as resolve_peers
from rayhive.membership.addresses import tcp_address
from rayhive.peer.callback import swarm_optimizer
from rayhive.peer.from_spec import PeerFit
from rayhive.spec import Axis, Configuration, SweepConfig, load_sweep
from rayhive.spec.axes.base import Values, shown
from rayhive.spec.configuration import decide
from rayhive.spec.replicate import PeerSpec
from rayhive.workloads.base import Target

#: Shortest interval between two lines of progress [s].
LINE_EVERY_S = 1.0
#: Texts for reasons to stop; any other reason is the budget.
REASONS = {"target": "the target is reached", "interrupted": "interrupted"}


def train_file(
    path: str | Path,
    initial_peers: Sequence[str] = (),
    *,
    overrides: Sequence[str] = (),
    host: str | None = None,
) -> None:
    """Train as one peer until the budget of the study is spent or Ctrl-C.

    The first peer prints the command with which other peers join.

    Args:
        path: The study. Its first enqueued configuration is trained, or else its constants.
        initial_peers: Addresses of peers to join; without any, and without ``INITIAL_PEERS`` in
            the environment, this is the first peer.
        overrides: ``a.b=c`` strings that replace single fields of the study.
        host: Address to listen on; all if absent.

    Raises:
        ConfigError: The study or the address is not valid, or the study has no single
            configuration.
        PeerError: No peer answers at the addresses.
    """
    config = load_sweep(path, overrides)
    spec = peer_spec(config, first=resolve_peers(initial_peers or None) is None)
    fit = PeerFit(spec)
    print(f"{config.name}: {fit.workload.name}, {spec.configuration.label}", flush=True)
    strategy = fit.strategy(
        initial_peers=list(initial_peers) or None,
        host_maddrs=None if host is None else [tcp_address(host)],
    )
    console = ConsoleMonitor(fit.workload.target if spec.budget.stop_at_target else None)
    trainer = fit.trainer(strategy, console)
    with stopping_on_interrupt(trainer, console):
        fit.run(trainer)


def peer_spec(config: SweepConfig, first: bool) -> PeerSpec:
    """Return the spec of a peer that is started by hand.

    Args:
        config: The study.
        first: Whether it begins the swarm. All other peers draw an order of the data at random,
            because peers of such a run have no numbers.

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
    """Return the configuration that a peer by hand trains.

    Raises:
        ConfigError: No configuration is enqueued, and an axis that applies has several values.
    """
    if config.enqueue:
        return config.enqueue[0]
    problems: list[Problem] = []

    def constant(axis: Axis, values: Values) -> Any:
        distribution = getattr(config.space, axis.name)
        points = axis.choices(distribution)
        if points is not None and len(points) == 1:
            return points[0]
        allowed = "one value, or a configuration under enqueue, of which the first is trained"
        problems.append(Problem(f"space.{axis.name}", shown(distribution), allowed))
        return None

    values = decide(constant)
    if problems:
        raise ConfigError(problems)
    return Configuration(**values)


class ConsoleMonitor:
    """Monitor that prints rounds and evaluations.

    Args:
        target: Target that ends training; None without one.

    Attributes:
        interrupted: Whether Ctrl-C was pressed; training stops after the present batch.
    """

    def __init__(self, target: Target | None = None) -> None:
        self.interrupted, self._target = False, target
        self._samples = 0
        self._loss = float("nan")
        self._began = self._printed = 0.0

    def start(self, trainer: Trainer, module: LightningModule) -> None:
        """Do nothing: a peer by hand trains at once."""

    def begin_batch(self) -> None:
        """Begin to measure time at the first batch."""
        if self._began == 0.0:
            self._began = self._printed = time.monotonic()

    def count_samples(self) -> None:
        """Do nothing: samples are counted after the batch."""

    def after_batch(self, trainer: Trainer, loss: float | None) -> str | None:
        """Keep the loss, and count the samples."""
        self._loss = self._loss if loss is None else loss
        self._samples += swarm_optimizer(trainer).batch_size_per_step
        return None

    @contextlib.contextmanager
    def after_round(self, trainer: Trainer, round_: int) -> Iterator[str | None]:
        """Print a line, unless the last one is too recent; a long evaluation is a break."""
        now = time.monotonic()
        if now - self._printed >= LINE_EVERY_S:
            rate = self._samples / (now - self._printed)
            peers = swarm_optimizer(trainer).live_peers
            print(
                f"round {round_}: loss {self._loss:.4f}, {rate:.0f} samples/s here, "
                f"{peers} {'peer' if peers == 1 else 'peers'}",
                flush=True,
            )
            self._samples, self._printed = 0, now
        yield None

    def after_evaluation(
        self, round_: int, values: dict[str, float], *, clock_s: float, final: bool
    ) -> str | None:
        """Print the values; stop at the target."""
        shown = ", ".join(f"{name} {value:.4f}" for name, value in values.items())
        print(f"round {round_}: held out: {shown}", flush=True)
        target = self._target
        return "target" if target is not None and target.reached(values[target.metric]) else None

    def requested_stop(self, trainer: Trainer) -> str | None:
        """Return ``interrupted`` after Ctrl-C."""
        return "interrupted" if self.interrupted else None

    def seconds(self) -> float:
        """Return the time since the first batch [s]."""
        return time.monotonic() - self._began if self._began else 0.0

    def evaluates_at_end(self, trainer: Trainer, reason: str | None, *, evaluated: bool) -> bool:
        """Return whether the last round was not evaluated yet."""
        return not evaluated

    def end(self, trainer: Trainer, reason: str) -> None:
        """Print the last round and the reason of the end."""
        text = REASONS.get("interrupted" if self.interrupted else reason, "the budget is spent")
        print(f"ended in round {swarm_optimizer(trainer).local_epoch}: {text}", flush=True)

    def fail(self, round_: int, error: BaseException) -> None:
        """Do nothing: Lightning prints the error."""


@contextlib.contextmanager
def stopping_on_interrupt(trainer: Trainer, console: ConsoleMonitor) -> Iterator[None]:
    """End the fit of the body in order at the first Ctrl-C, and at once at the second."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)

    def stop(*_: Any) -> None:
        signal.signal(signal.SIGINT, before)
        console.interrupted = True
        trainer.should_stop = True
        print("stopping after this batch; Ctrl-C again stops at once", flush=True)

    signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
