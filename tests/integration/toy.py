"""A small module for tests of swarms, the settings of its peers, and checks of their leftovers."""

from __future__ import annotations

import glob
import json
import os
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import psutil
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

#: Rounds begin at once on a link of milliseconds.
FAST: dict[str, Any] = {
    "matchmaking_time": 2.0,
    "averaging_timeout": 10.0,
    "tracker_opts": {
        "min_refresh_period": 0.02,
        "default_refresh_period": 0.1,
        "max_refresh_period": 0.5,
    },
}
LOOPBACK = ["/ip4/127.0.0.1/tcp/0"]
#: Of one peer with batches of 16: a round is four batches.
ALONE: dict[str, Any] = {**FAST, "target_batch_size": 64, "host_maddrs": LOOPBACK}


class Regression(pl.LightningModule):
    """Learns a fixed linear map through one hidden layer.

    Args:
        seed: Seed of the initial parameters.
        optimizer: Makes the optimizer out of parameters.
        scheduler: Makes the scheduler out of the optimizer.
    """

    def __init__(self, seed: int = 0, optimizer: Any = None, scheduler: Any = None) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.net = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 4))
        self.make_optimizer = optimizer or (lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9))
        self.make_scheduler = scheduler
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(self.parameters())
        if self.make_scheduler is None:
            return optimizer
        return [optimizer], [self.make_scheduler(optimizer)]


def loader(seed: int = 0, samples: int = 4096, batch_size: int = 16) -> DataLoader[Any]:
    """Return data of the same linear map for every seed."""
    weights = torch.randn(8, 4, generator=torch.Generator().manual_seed(77))
    inputs = torch.randn(samples, 8, generator=torch.Generator().manual_seed(seed))
    return DataLoader(TensorDataset(inputs, inputs @ weights), batch_size=batch_size)


class UntilRound(pl.Callback):
    """Ends after a number of rounds, and keeps a log.

    Args:
        rounds: Rounds to stop after.
        at_round: Called with the trainer after each round.
        pace_s: Shortest time of a batch [s].
    """

    def __init__(self, rounds: int, at_round: Any = None, pace_s: float = 0.0) -> None:
        self.rounds, self.at_round, self.pace_s = rounds, at_round, pace_s
        self.seen = 0
        self.started = False
        self.most_peers = 0
        self.rates: dict[int, float] = {}
        self.deadline = time.monotonic() + 60

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.seen = trainer.optimizers[0].local_epoch

    def at_start(self, trainer: pl.Trainer) -> None:
        """Do something before the first batch, after the strategy took the state of others."""

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if not self.started:
            self.started = True
            self.at_start(trainer)
        if self.pace_s:
            time.sleep(self.pace_s)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        optimizer = trainer.optimizers[0]
        self.most_peers = max(self.most_peers, trainer.strategy.num_peers)
        if optimizer.local_epoch != self.seen:
            self.seen = optimizer.local_epoch
            self.rates[self.seen] = optimizer.param_groups[0]["lr"]
            if self.at_round is not None:
                self.at_round(trainer)
        if self.seen >= self.rounds or time.monotonic() > self.deadline:
            trainer.should_stop = True


class Together(UntilRound):
    """Begins and ends with the other peers, so that every round is a round of all.

    Args:
        folder: A folder that they share.
        peer: The number of this one.
        peers: How many there are.
        **options: See the base class.
    """

    def __init__(self, folder: str, peer: int, peers: int = 2, **options: Any) -> None:
        super().__init__(**options)
        self.folder, self.peer, self.peers = Path(folder), peer, peers

    def meet(self, where: str) -> None:
        meet_at(self.folder, where, self.peer, self.peers, self.deadline)

    def at_start(self, trainer: pl.Trainer) -> None:
        # a peer that was known before it took the state of others takes no part in between, and
        # six rounds alone are over before the news that it is back
        for where in ("start", "ready"):
            assert trainer.optimizers[0].tracker.wait_for_peers(self.peers, 30)
            self.meet(where)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.optimizers[0].state_averager.step(wait_for_delayed_updates=True)
        self.meet("end")


def stay_in_rounds() -> None:
    """Let no pause of a busy machine count as a break or a loss in this process."""
    from rayhive.membership import progress_tracker

    progress_tracker.BREAK_S = progress_tracker.SILENCE_S = 60.0


def step_out(optimizer: Any) -> None:
    """Begin a break, whatever :func:`stay_in_rounds` said: this peer has done its rounds.

    Otherwise a peer that is still in a round waits for this one, until it counts as a straggler.
    """
    from rayhive.membership import progress_tracker

    progress_tracker.BREAK_S = 0.0
    optimizer.end_batch()


def share_address(strategy: Any, folder: Path) -> None:
    """Let the other peers of a test find the first one through a folder that they share."""
    _publish(strategy.addresses, folder)


def _publish(addresses: list[str], folder: Path) -> None:
    (folder / "part").write_text(json.dumps(addresses))
    (folder / "part").rename(folder / "address")


def address_in(folder: Path) -> Any:
    """Wait for the first peer of a test; return its addresses."""
    deadline = time.monotonic() + 60
    while not (folder / "address").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return json.loads((folder / "address").read_text())


def dht_of_peer(place: Path, peer: int, **options: Any) -> Any:
    """Return a running DHT of one peer of a test; the others find the first one's in a folder."""
    import hivemind

    dht = hivemind.DHT(
        start=True,
        host_maddrs=LOOPBACK,
        use_relay=False,
        initial_peers=[] if peer == 0 else address_in(place),
        **options,
    )
    if peer == 0:
        _publish([str(address) for address in dht.get_visible_maddrs()], place)
    return dht


def meet_at(place: Path, where: str, peer: int, peers: int, deadline: float | None = None) -> None:
    """Wait until all peers of a test have come to the same point."""
    (place / f"{where}-{peer}").touch()
    deadline = time.monotonic() + 120 if deadline is None else deadline
    while len(list(place.glob(f"{where}-*"))) < peers:
        assert time.monotonic() < deadline, f"nobody came to {where}"
        time.sleep(0.01)


def trainer(strategy: Any, *callbacks: pl.Callback, **options: Any) -> pl.Trainer:
    """Return a trainer that does nothing but train."""
    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "max_epochs": -1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    }
    return pl.Trainer(strategy=strategy, callbacks=list(callbacks), **{**settings, **options})


def fit_alone(strategy: dict[str, Any], module: Any, rounds: int = 4, **options: Any) -> Any:
    """Train as one peer for some rounds and return the trainer."""
    from rayhive import HivemindStrategy

    callback = UntilRound(rounds, at_round=options.pop("at_round", None))
    data = options.pop("data", None) or loader()
    fitted = trainer(HivemindStrategy(**{**ALONE, **strategy}), callback, **options)
    fitted.fit(module, data)
    return fitted


def flat(module: nn.Module) -> list[float]:
    """Return all parameters as plain numbers."""
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()]).tolist()


def left_behind() -> dict[str, list[str]]:
    """Return the children of this process that still run, and the files of hivemind and torch."""
    time.sleep(0.1)  # a child that has ended takes a moment to be gone
    children = psutil.Process().children(recursive=True)
    _, alive = psutil.wait_procs(children, timeout=3.0)
    return {
        "processes": [f"{child.pid} {child.name()}" for child in alive],
        "sockets": glob.glob(f"/tmp/hivemind-{os.getpid()}-*"),
        "memory": glob.glob(f"/dev/shm/torch_{os.getpid()}_*"),
    }


NOTHING: dict[str, list[str]] = {"processes": [], "sockets": [], "memory": []}
