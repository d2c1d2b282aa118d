"""Each documented way to use the strategy, on two real peers.

The second peer joins with the line that the first one prints.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.integration.swarm_helpers import call
from tests.integration.toy import (
    FAST,
    NOTHING,
    Regression,
    Together,
    flat,
    left_behind,
    loader,
    stay_in_rounds,
)
from tests.integration.toy import trainer as make_trainer

pytestmark = [pytest.mark.swarm, pytest.mark.usefixtures("forks")]

TARGET, ROUNDS = 64, 6


def plain(run: dict[str, Any]) -> Any:
    from rayhive import HivemindStrategy

    return HivemindStrategy(target_batch_size=TARGET, **run)


def size_adaptive(run: dict[str, Any]) -> Any:
    from hivemind.compression import (
        Float16Compression,
        SizeAdaptiveCompression,
        Uniform8BitQuantization,
    )

    from rayhive import HivemindStrategy

    compression = SizeAdaptiveCompression(
        threshold=2**8 + 1, less=Float16Compression(), greater_equal=Uniform8BitQuantization()
    )
    return HivemindStrategy(
        target_batch_size=TARGET,
        grad_compression=compression,
        state_averaging_compression=compression,
        **run,
    )


def powersgd(run: dict[str, Any]) -> Any:
    from hivemind.optim.power_sgd_averager import PowerSGDGradientAverager

    from rayhive import HivemindStrategy

    return HivemindStrategy(
        target_batch_size=TARGET,
        grad_averager_factory=partial(
            PowerSGDGradientAverager, averager_rank=2, min_compression_ratio=0.5
        ),
        **run,
    )


def overlap(run: dict[str, Any]) -> Any:
    import torch

    from rayhive import HivemindStrategy

    return HivemindStrategy(
        target_batch_size=TARGET,
        delay_state_averaging=True,
        delay_grad_averaging=True,
        delay_optimizer_step=True,
        offload_optimizer=True,  # required to delay averaging
        scheduler_fn=partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.9),
        **run,
    )


def delayed_state(run: dict[str, Any]) -> Any:
    import torch

    from rayhive import HivemindStrategy

    return HivemindStrategy(
        target_batch_size=TARGET,
        delay_state_averaging=True,
        scheduler_fn=partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.9),
        **run,
    )


def offload(run: dict[str, Any]) -> Any:
    import torch

    from rayhive import HivemindStrategy

    return HivemindStrategy(
        target_batch_size=TARGET,
        offload_optimizer=True,
        scheduler_fn=partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.9),
        **run,
    )


def reused_buffers(run: dict[str, Any]) -> Any:
    from rayhive import HivemindStrategy

    return HivemindStrategy(target_batch_size=TARGET, reuse_grad_buffers=True, **run)


USAGES = {
    function.__name__: function
    for function in (
        plain,
        size_adaptive,
        powersgd,
        overlap,
        delayed_state,
        offload,
        reused_buffers,
    )
}
#: Usages whose tests are not slow.
NOT_SLOW = ("plain", "powersgd")
#: Relative difference of the weights at the end that the codec of the state explains.
TOLERANCE = {"size_adaptive": 0.05}


def run_peer(usage: str, peer: int, folder: str) -> dict[str, Any]:
    import torch
    from torch.nn.functional import mse_loss

    stay_in_rounds()
    events: list[tuple[str, dict[str, Any]]] = []
    strategy = USAGES[usage](
        {**FAST, "on_event": lambda kind, fields: events.append((kind, fields))}
    )
    module = Regression(seed=peer)
    inputs, targets = next(iter(loader(seed=99, batch_size=512)))

    def held_out() -> float:
        with torch.no_grad():
            return float(mse_loss(module.net(inputs), targets))

    callback = Together(folder, peer, rounds=ROUNDS)
    before = held_out()
    make_trainer(strategy, callback).fit(module, loader(seed=peer))
    return {
        "rounds": [fields for kind, fields in events if kind == "round"],
        "events": [each for each in events if each[0] != "weights"],
        "round": strategy.optimizer.local_epoch,
        "rates": callback.rates,
        "rate": strategy.optimizer.param_groups[0]["lr"],
        "most_peers": callback.most_peers,
        "before": before,
        "after": held_out(),
        "weights": flat(module),
        "class": type(strategy.optimizer.opt).__name__,
        "left_behind": left_behind(),
    }


@pytest.mark.parametrize(
    "usage",
    [
        usage if usage in NOT_SLOW else pytest.param(usage, marks=pytest.mark.slow)
        for usage in USAGES
    ],
)
def test_two_peers_train_together(usage: str, tmp_path: Path) -> None:
    first = call(run_peer, usage=usage, peer=0, folder=str(tmp_path))
    second = call(run_peer, env=first.invitation(), usage=usage, peer=1, folder=str(tmp_path))
    peers = [child.result() for child in (first, second)]
    story = "\n".join(child.log() for child in (first, second))
    story += "\n".join(f"peer {number}: {peer['events']}" for number, peer in enumerate(peers))
    for peer in peers:
        together = [e for e in peer["rounds"] if e.get("group_size") == 2]
        assert len(together) >= 3, story
        assert peer["most_peers"] == 2
        assert peer["round"] >= ROUNDS
        assert peer["after"] < 0.9 * peer["before"], story
        assert peer["left_behind"] == NOTHING
        assert peer["class"] == "SGD"
        if usage in ("overlap", "offload", "delayed_state"):
            assert peer["rate"] == pytest.approx(0.05 * 0.9 ** peer["round"])
    difference = max(abs(a - b) for a, b in zip(*(p["weights"] for p in peers), strict=True))
    scale = max(abs(value) for value in peers[0]["weights"])
    assert difference <= TOLERANCE.get(usage, 1e-4) * scale, story
