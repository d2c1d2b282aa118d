"""Real swarms with peers that compute for long, and peers that take a break.

Rounds wait for a peer that computes, whatever the matchmaking window. They do not wait for a peer
that validates, saves or loads data; it takes part again in the next round.
"""

from __future__ import annotations

import tempfile
import time
from typing import Any

import pytest

from rayhive.events import Weights
from tests.integration.swarm_helpers import call
from tests.integration.toy import LOOPBACK, Regression, loader
from tests.integration.toy import trainer as make_trainer

pytestmark = [pytest.mark.swarm, pytest.mark.usefixtures("forks")]

#: Samples of a batch.
BATCH = 16


def peer_that_trains(
    folder: str,
    peer: int,
    peers: int,
    seconds: float,
    rounds: int,
    batch_s: float,
    busy: str = "",
    busy_s: float = 0.0,
    busy_at: int = 0,
    target: int | None = None,
    **strategy: Any,
) -> dict[str, Any]:
    """Train on batches that take ``batch_s``; once, do something else for ``busy_s``.

    Args:
        folder: A folder that the peers share.
        peer: Its number; the others wait for the first one's invitation.
        peers: How many there are.
        seconds: How long it trains at most.
        rounds: After how many rounds it ends.
        batch_s: How long a batch takes; peers begin their first ones evenly spread over it.
        busy: ``validation``, ``checkpoint``, ``loader``, or ``batch`` for a batch that long.
        busy_s: How long that takes.
        busy_at: After which of its batches.
        target: Samples of a round; default one batch of each peer.
        strategy: Further arguments of the strategy.
    """
    import lightning.pytorch as pl
    import torch

    from rayhive import HivemindStrategy
    from rayhive.peer.measurements import WeightsSketch
    from tests.integration.toy import Together

    events: list[dict[str, Any]] = []
    busy_window: list[float] = []
    computed = 0

    def do_something_else() -> None:
        if busy_window:
            return
        busy_window.append(time.time())
        time.sleep(busy_s)
        busy_window.append(time.time())

    class Slow(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            time.sleep(batch_s)
            nonlocal computed
            computed += len(batch[0])
            if busy == "batch" and self.trainer.global_step == busy_at:
                do_something_else()
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            do_something_else()

        def on_save_checkpoint(self, checkpoint: Any) -> None:
            do_something_else()

    class Data(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            for number, item in enumerate(loader(seed=peer)):
                if busy == "loader" and number == busy_at:
                    do_something_else()
                yield item

    class Ends(Together):
        def at_start(self, trainer: pl.Trainer) -> None:
            super().at_start(trainer)
            time.sleep(batch_s * peer / peers)

        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            super().on_train_batch_end(trainer, *_)
            if busy == "checkpoint" and trainer.global_step == busy_at:
                trainer.save_checkpoint("here.ckpt")

        def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            optimizer = trainer.optimizers[0]
            optimizer.state_averager.step(wait_for_delayed_updates=True)
            optimizer.tracker.take_part(False)
            self.meet("end")

    def on_event(kind: str, fields: dict[str, Any]) -> None:
        event = {"kind": kind, "t": time.time(), **fields}
        if kind == "transition":
            parameters = list(optimizer().state_averager.main_parameters)
            weights = WeightsSketch(parameters)(fields["round"], parameters)
            event.update(weights=weights.model_dump(), computed=computed)
        events.append(event)

    settings: dict[str, Any] = {
        "target_batch_size": target or peers * BATCH,
        "host_maddrs": LOOPBACK,
        "matchmaking_time": 5.0,
        "averaging_timeout": 30.0,
        "on_event": on_event,
        **strategy,
    }
    made = HivemindStrategy(**settings)

    def optimizer() -> Any:
        return made.optimizer

    callback = Ends(folder, peer, peers, rounds=rounds)
    callback.deadline = time.monotonic() + seconds
    module = Slow()
    fitted = make_trainer(
        made,
        callback,
        val_check_interval=busy_at if busy == "validation" else 10**6,
        check_val_every_n_epoch=None,
        limit_val_batches=1 if busy == "validation" else 0,
    )
    data = torch.utils.data.DataLoader(Data(), batch_size=None)
    fitted.fit(module, data, loader(samples=16))
    return {"events": events, "busy": busy_window, "computed": computed}


def swarm(peers: list[dict[str, Any]], **common: Any) -> list[dict[str, Any]]:
    """Run peers of one swarm; return what each of them tells."""
    with tempfile.TemporaryDirectory() as folder:
        settings = {"folder": folder, "peers": len(peers), "seconds": 120.0, **common}
        first = call(peer_that_trains, peer=0, **{**settings, **peers[0]})
        env = first.invitation()
        others = [
            call(peer_that_trains, env=env, peer=number, **{**settings, **own})
            for number, own in enumerate(peers[1:], 1)
        ]
        return [child.result(200) for child in [first, *others]]


def of(told: dict[str, Any], *kinds: str) -> list[dict[str, Any]]:
    return [event for event in told["events"] if event["kind"] in kinds]


def story(told: list[dict[str, Any]]) -> str:
    """Return what happened, for a failure's message."""
    begin = min(peer["events"][0]["t"] for peer in told)
    lines = [
        (event["t"] - begin, number, event["kind"], {
            key: event.get(key)
            for key in ("round", "outcome", "group_size", "samples", "seconds", "kept", "error")
            if key in event
        })
        for number, peer in enumerate(told)
        for event in peer["events"]
    ]  # fmt: skip
    busy = [[round(t - begin, 2) for t in peer["busy"]] for peer in told]
    lines.sort(key=lambda line: line[0])
    return "\n".join([f"busy {busy}", *(f"{t:7.2f} peer {n}: {k} {f}" for t, n, k, f in lines)])


def rounds_within(told: dict[str, Any], begin: float, end: float) -> list[dict[str, Any]]:
    return [event for event in of(told, "round") if begin < event["t"] < end]


def assert_equal_parameters(told: list[dict[str, Any]], after: float) -> None:
    """Hold the parameters of all peers against each other after rounds that all have done."""
    sketches = [{e["round"]: e for e in of(peer, "transition") if e["t"] > after} for peer in told]
    common = set(sketches[0]).intersection(*sketches[1:])
    assert len(common) >= 2, story(told)
    for round_ in common:
        first, *others = (Weights(**peer[round_]["weights"]) for peer in sketches)
        for other in others:
            assert first.distance(other) < 1e-5, f"round {round_}\n{story(told)}"


def assert_samples_conserved(told: list[dict[str, Any]]) -> None:
    """No sample entered twice or was lost: of each peer all that it computed has entered a round.

    Compared at the end of its last round, where nothing is pending.
    """
    for peer in told:
        entered = sum(event["samples"] for event in of(peer, "round"))
        assert entered == of(peer, "transition")[-1]["computed"], story(told)


@pytest.mark.slow
def test_a_peer_that_computes_is_waited_for_whatever_the_window() -> None:
    told = swarm(
        [{"batch_s": 1.0}, {"batch_s": 1.1}, {"batch_s": 1.2}],
        rounds=4,
        matchmaking_time=0.5,
        averaging_timeout=2.0,
    )
    for peer in told:
        done = [(event["outcome"], event.get("group_size")) for event in of(peer, "round")]
        assert done == [("averaged", 3)] * 4, story(told)
    assert_samples_conserved(told)


@pytest.mark.slow
def test_batches_of_eight_seconds_with_a_window_of_five() -> None:
    told = swarm([{}, {}, {}], rounds=4, batch_s=8.0)
    for peer in told:
        done = [(event["outcome"], event.get("group_size")) for event in of(peer, "round")]
        assert done == [("averaged", 3)] * 4, story(told)


DELAYED: dict[str, Any] = {
    "delay_state_averaging": True,
    "delay_optimizer_step": True,
    "delay_grad_averaging": True,
    "offload_optimizer": True,
}


@pytest.mark.parametrize(
    ("busy", "peers", "options"),
    [
        pytest.param("validation", 2, {}, marks=pytest.mark.slow),
        ("validation", 3, {}),
        pytest.param("checkpoint", 2, {"reuse_grad_buffers": True}, marks=pytest.mark.slow),
        pytest.param("loader", 3, {"average_state_every": 3}, marks=pytest.mark.slow),
        pytest.param("loader", 2, DELAYED, marks=pytest.mark.slow),
    ],
    ids=["validation-2", "validation-3", "checkpoint", "loader", "loader-delayed"],
)
def test_a_peer_that_does_something_else_steps_out_and_comes_back_at_once(
    busy: str, peers: int, options: dict[str, Any]
) -> None:
    """The other peers go on; its accumulated samples enter the first round that it is in."""
    common = {"rounds": 24, "batch_s": 0.1, "target": 3 * peers * BATCH, **options}
    away: dict[str, Any] = {"busy": busy, "busy_s": 4.0, "busy_at": 5}
    told = swarm([{}] * (peers - 1) + [away], **common)
    begin, end = told[-1]["busy"]
    for other in told[:-1]:
        assert len(rounds_within(other, begin, end)) >= 4, story(told)
    assert not rounds_within(told[-1], begin + 1.0, end), story(told)
    back = [event for event in of(told[-1], "round") if event["t"] > end]
    assert [event["outcome"] for event in back[:3]] == ["averaged"] * 3, story(told)
    assert {event["group_size"] for event in back[:3]} == {peers}, story(told)
    loaded = next(event for event in of(told[-1], "state_loaded") if event["t"] > end)
    assert loaded["kept"] > 0, story(told)
    if not options.get("delay_grad_averaging"):  # there a round is reported after its transition
        assert_samples_conserved(told)
    if "average_state_every" not in options and not options.get("delay_grad_averaging"):
        assert_equal_parameters(told, after=back[0]["t"])


@pytest.mark.slow
def test_a_trainer_that_is_stuck_is_waited_for_once_and_up_to_the_timeout() -> None:
    """Its heartbeat goes on; when it computes again it takes part again."""
    stuck: dict[str, Any] = {"busy": "batch", "busy_s": 8.0, "busy_at": 4}
    told = swarm([stuck, {}, {}], rounds=60, batch_s=0.1, straggler_timeout=2.5)
    begin, end = told[0]["busy"]
    for other in told[1:]:
        assert len(rounds_within(other, begin, end)) >= 6, story(told)
    late = [event for event in of(told[0], "round") if event["t"] > end + 2.0]
    assert late and {event.get("group_size") for event in late} == {3}, story(told)
