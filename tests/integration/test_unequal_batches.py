"""On real peers, the gradient of every round is the mean over samples, whatever the batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from tests.integration.swarm_helpers import call
from tests.integration.toy import (
    ALONE,
    FAST,
    LOOPBACK,
    Together,
    UntilRound,
    address_in,
    flat,
    share_address,
    stay_in_rounds,
)
from tests.integration.toy import trainer as make_trainer

pytestmark = [pytest.mark.swarm, pytest.mark.usefixtures("forks")]

ROUNDS = 5
#: Every point of the delay axis, with the optimizer on the module's tensors and on its own.
DELAYS: dict[str, dict[str, Any]] = {
    "none": {},
    "none, offloaded": {"offload_optimizer": True},
    "state": {"delay_state_averaging": True, "offload_optimizer": False},
    "state, offloaded": {"delay_state_averaging": True},
    "optimizer": {"delay_state_averaging": True, "delay_optimizer_step": True},
    "gradients": {"delay_state_averaging": True, "delay_grad_averaging": True},
}


class Recorder(torch.optim.SGD):
    """Keeps the gradient of every step."""

    applied: list[list[float]] = []  # noqa: RUF012 - replaced by each fit

    def step(self, closure: Any = None) -> Any:
        (parameter,) = self.param_groups[0]["params"]
        assert parameter.grad is not None
        type(self).applied.append(parameter.grad.flatten().tolist())
        return super().step(closure)


class Slope(pl.LightningModule):
    """Has the mean of its inputs for a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1, bias=False)
        torch.nn.init.zeros_(self.layer.weight)
        self.samples = 0
        self.total = torch.zeros(2)
        #: Samples of each round, and the sum of their inputs.
        self.rounds: list[tuple[int, list[float]]] = []

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        (inputs,) = batch
        self.samples, self.total = self.samples + len(inputs), self.total + inputs.sum(0)
        return self.layer(inputs).mean()

    def end_round(self, *_: Any) -> None:
        self.rounds.append((self.samples, self.total.tolist()))
        self.samples, self.total = 0, torch.zeros(2)

    def on_train_start(self) -> None:
        Recorder.applied = []  # from here on: there was a step that only made the state
        self.trainer.optimizers[0].before_round = self.end_round

    def configure_optimizers(self) -> Any:
        return Recorder(self.parameters(), lr=1.0)


def odd_data(samples: int, batch_size: int) -> DataLoader[Any]:
    """Return inputs of ones and of powers of two, whose last, short batch is unlike the others."""
    inputs = torch.ones(samples, 2)
    inputs[:, 1] = 2.0
    inputs[-(samples % batch_size) :, 1] = 64.0
    return DataLoader(TensorDataset(inputs), batch_size=batch_size)


def plugins(precision: str) -> dict[str, Any]:
    from lightning.pytorch.plugins.precision import MixedPrecision

    if precision == "16-mixed":  # on a CPU, Lightning has no scaler of its own
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        return {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)]}
    return {"precision": precision}


def one_peer(reuse: bool, precision: str) -> dict[str, Any]:
    """Train alone in every way to delay; return what was computed and applied in each."""
    from rayhive import HivemindStrategy

    found = {}
    for delay, flags in DELAYS.items():
        strategy = HivemindStrategy(
            **{**ALONE, "target_batch_size": 96, "reuse_grad_buffers": reuse, **flags}
        )
        module = Slope()
        fitted = make_trainer(strategy, UntilRound(ROUNDS), **plugins(precision))
        fitted.fit(module, odd_data(65, 32))
        found[delay] = [module.rounds, list(Recorder.applied)]
    return found


@pytest.mark.parametrize(
    ("reuse", "precision"),
    [
        (False, "32-true"),
        pytest.param(True, "16-mixed", marks=pytest.mark.slow),
        pytest.param(True, "32-true", marks=pytest.mark.slow),
        pytest.param(False, "16-mixed", marks=pytest.mark.slow),
        pytest.param(False, "bf16-mixed", marks=pytest.mark.slow),
        pytest.param(True, "bf16-mixed", marks=pytest.mark.slow),
    ],
)
def test_a_peer_alone_applies_the_mean_over_samples(reuse: bool, precision: str) -> None:
    close = 1e-5 if precision == "32-true" else 0.01
    for delay, (rounds, applied) in (
        call(one_peer, reuse=reuse, precision=precision).result().items()
    ):
        assert len(rounds) == len(applied) >= ROUNDS, delay
        assert {97, 98} >= {samples for samples, _ in rounds}, delay
        for (samples, total), gradient in zip(rounds, applied, strict=True):
            assert gradient == pytest.approx([each / samples for each in total], rel=close), delay


#: Ways in which two peers with batches of their own train together.
TOGETHER: dict[str, tuple[dict[str, Any], str]] = {
    "plain": ({}, "32-true"),
    "reused": ({"reuse_grad_buffers": True}, "32-true"),
    "reused, offloaded, 16-mixed": (
        {"reuse_grad_buffers": True, "offload_optimizer": True},
        "16-mixed",
    ),
    "state": (DELAYS["state"], "bf16-mixed"),
    "optimizer": (DELAYS["optimizer"], "16-mixed"),
    "gradients, reused": ({**DELAYS["gradients"], "reuse_grad_buffers": True}, "32-true"),
}


def two_peers(folder: str, peer: int) -> dict[str, Any]:
    """Train in company in each of the ways; return what was computed and applied in each."""
    from rayhive import HivemindStrategy

    stay_in_rounds()
    found = {}
    for number, (way, (flags, precision)) in enumerate(TOGETHER.items()):
        meeting = Path(folder) / str(number)
        meeting.mkdir(exist_ok=True)
        outcomes: list[str] = []

        def note(kind: str, fields: dict[str, Any], seen: list[str] = outcomes) -> None:
            if kind == "round":
                seen.append(fields["outcome"])

        strategy = HivemindStrategy(
            **{
                **FAST,
                "on_event": note,
                "target_batch_size": 150,
                "run_id": f"way{number}",
                "host_maddrs": LOOPBACK,
                "initial_peers": None if peer == 0 else address_in(meeting),
                **flags,
            }
        )
        if peer == 0:
            share_address(strategy, meeting)
        module = Slope()
        together = Together(str(meeting), peer, rounds=ROUNDS)
        fitted = make_trainer(strategy, together, **plugins(precision))
        fitted.fit(module, odd_data(65, 32) if peer == 0 else odd_data(20, 8))
        found[way] = [module.rounds, list(Recorder.applied), outcomes]
    return found


def test_two_peers_apply_the_mean_over_the_samples_of_both(tmp_path: Path) -> None:
    first, second = (call(two_peers, folder=str(tmp_path), peer=peer) for peer in (0, 1))
    pairs = [first.result(120), second.result(120)]
    for way, (_, precision) in TOGETHER.items():
        close = 1e-5 if precision == "32-true" else 0.01
        (ours, applied, outcomes), (theirs, other, _) = (found[way] for found in pairs)
        assert set(outcomes) == {"averaged"}, way
        assert len(applied) == len(other) >= ROUNDS
        assert len({samples for samples, _ in (*ours, *theirs)}) > 2, "their shares differ"
        for mine, yours, *gradients in zip(ours, theirs, applied, other, strict=True):
            samples = mine[0] + yours[0]
            mean = [(a + b) / samples for a, b in zip(mine[1], yours[1], strict=True)]
            for gradient in gradients:
                assert gradient == pytest.approx(mean, rel=close), way


def local_updates(folder: str, peer: int) -> dict[str, Any]:
    """Train with local updates; return samples and parameters before, and these after, a round."""
    from rayhive import HivemindStrategy

    class Local(Slope):
        def end_round(self, *args: Any) -> None:
            before.append((args[1].local_samples_accumulated, flat(self)))

    stay_in_rounds()
    meeting, module = Path(folder), Local()
    before: list[tuple[int, list[float]]] = []
    after: list[list[float]] = []
    outcomes: list[str] = []

    def note(kind: str, fields: dict[str, Any]) -> None:
        if kind == "round":
            outcomes.append(fields["outcome"])

    strategy = HivemindStrategy(
        **{
            **FAST,
            "on_event": note,
            "target_batch_size": 150,
            "use_local_updates": True,
            "host_maddrs": LOOPBACK,
            "initial_peers": None if peer == 0 else address_in(meeting),
        }
    )
    if peer == 0:
        share_address(strategy, meeting)

    together = Together(folder, peer, rounds=ROUNDS, at_round=lambda _: after.append(flat(module)))
    fitted = make_trainer(strategy, together)
    fitted.fit(module, odd_data(65, 32) if peer == 0 else odd_data(20, 8))
    rounds = [(*one, two) for one, two in zip(before, after, strict=True)]
    return {"rounds": rounds, "outcomes": outcomes}


def test_local_updates_end_in_the_mean_over_the_samples_of_both(tmp_path: Path) -> None:
    """Equal weights, as hivemind gives them, would favour the peer with fewer samples."""
    first, second = (call(local_updates, folder=str(tmp_path), peer=peer) for peer in (0, 1))
    peers = [first.result(120), second.result(120)]
    assert {outcome for each in peers for outcome in each["outcomes"]} == {"averaged"}
    found = list(zip(*(each["rounds"] for each in peers), strict=True))
    assert len(found) >= ROUNDS
    # not in every round: both may have done the same number of their epochs of three batches
    assert any(one[1] != two[1] for one, two in found)
    for (ours, mine, after), (theirs, yours, other) in found:
        assert ours != theirs
        mean = [(ours * a + theirs * b) / (ours + theirs) for a, b in zip(mine, yours, strict=True)]
        assert after == other == pytest.approx(mean, rel=1e-5)


def handed_over(reuse: bool) -> list[Any]:
    """End a round before it is due, as a peer that leaves does, with scaled gradients."""
    from rayhive import HivemindStrategy

    class Preemption(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
            if args[-1] == 2:
                strategy: Any = trainer.strategy
                strategy.optimizer.hand_over(getattr(trainer.precision_plugin, "scaler", None))
                trainer.should_stop = True

    module = Slope()
    strategy = HivemindStrategy(**{**ALONE, "target_batch_size": 1000, "reuse_grad_buffers": reuse})
    fitted = make_trainer(strategy, Preemption(), **plugins("16-mixed"))
    fitted.fit(module, odd_data(65, 32))
    return [module.rounds, list(Recorder.applied)]


@pytest.mark.parametrize("reuse", [False, True])
def test_a_round_that_is_handed_over_is_unscaled_once(reuse: bool) -> None:
    ((samples, total),), (gradient,) = call(handed_over, reuse=reuse).result()
    assert samples == 65
    assert gradient == pytest.approx([each / samples for each in total], rel=0.01)
