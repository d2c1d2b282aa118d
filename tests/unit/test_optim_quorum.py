"""Rounds that begin without a late peer, against an oracle in one process.

The oracle is written from the definition: a round applies the mean over the samples of all
gradients that its members hold, and a peer that is not a member holds its gradients for the next
round that it is in. A gradient is that of the parameters with which its batch began.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from rayhive.averaging.group_formation import RoundIsOver
from rayhive.averaging.round_result import RoundResult
from rayhive.optim.gradient_rounds import OwnGradients
from rayhive.optim.replica_check import Announcement
from tests.unit.averaging_fakes import OTHER, PEER
from tests.unit.optim_fakes import ROUND, Peer
from tests.unit.test_optim_rounds import COMPLETE, ended

LR = 0.1
ROUNDS = 50


class Replica(Peer):
    """A peer that trains two parameters, with a gradient that pulls them to a point of its own."""

    def __init__(self, pull: float, quorum: bool) -> None:
        super().__init__(on_failure="skip")
        self.tracker.quorum, self.pull = quorum, torch.full((2,), pull)
        self.computed_at = self.weights.clone()
        self.taken = 0
        self.sync.note_batch()

    @property
    def weights(self) -> torch.Tensor:
        return self.state_averager.parameter.data

    def compute(self, samples: int) -> None:
        """Accumulate a batch, of the weights with which it began."""
        (parameter,) = self.grad_averager.parameters
        parameter.grad = self.computed_at - self.pull
        self.grad_averager.accumulate_grads_(samples)

    def mean(self) -> torch.Tensor:
        """Return what an all-reduce would take from this peer."""
        self.grad_averager.load_accumulators_into_averager_()
        with self.grad_averager.get_tensors() as tensors:
            return tensors[0].clone()

    def begin(self) -> Any:
        number = self.state_averager.local_epoch + 1
        return self.gradient_rounds.open(number, accumulating_s=0.0, background_s=0.0)

    def apply(self, average: torch.Tensor) -> None:
        """Finish a round with an average, and step."""
        round_ = self.begin()
        self.taken += round_.samples
        with self.grad_averager.get_tensors() as tensors:
            tensors[0].copy_(average)
        number = round_.number
        gathered = {name: Announcement(number).packed() for name in (PEER, OTHER)}
        self.gradient_rounds.finish(ended(RoundResult(gathered, phases=(COMPLETE,))), round_)
        self.step(number)

    def average(self, number: int, weights: np.ndarray) -> None:
        """Average the parameters after a round if this peer asked for it."""
        if self.state.averaging_reason == "joined":
            self.weights.copy_(torch.as_tensor(weights))
            self.consistency.note_averaged(number)

    def fail(self) -> None:
        """Fail to average a round, whose gradients are lost then."""
        round_ = self.begin()
        round_.own_gradients = OwnGradients.of(self.grad_averager, delayed=False)
        self.taken += round_.samples
        self.gradient_rounds.finish(ended(ConnectionError()), round_)
        assert round_.skipped and not round_.missed
        self.step(round_.number, moves=False)

    def step(self, number: int, moves: bool = True) -> None:
        if moves:
            self.weights.sub_(LR * self.state_averager.parameter.grad)
        self.grad_averager.reset_accumulated_grads_()
        self.state_averager.local_epoch = number
        self.tracker.update_epoch(number)

    def miss(self, number: int, weights: torch.Tensor) -> None:
        """Come too late for a round that the others have averaged, and catch up."""
        self.consistency.returned = not self.tracker.quorum
        round_ = self.begin()
        self.gradient_rounds._start(round_)  # loads the averager; its step is not sent
        self.hear(round=number, averaged=number, met_averaged=number)
        self.gradient_rounds.finish(ended(RoundIsOver("over")), round_)
        assert round_.missed
        self.state_averager.newest = number

        def download(**_: Any) -> None:
            self.weights.copy_(weights)
            self.state_averager.local_epoch = number

        self.state_averager.load_state_from_peers = download  # type: ignore[method-assign]
        self.tracker.hurry(number + 1)  # the next round is due: no wait for real peers
        assert self.sync.catch_up() is self.tracker.quorum
        assert self.state_averager.local_epoch == number


def plan(peers: int, seed: int) -> Iterator[tuple[list[int], list[bool]]]:
    """Yield the batch sizes and the presence of each peer, with a quorum in every round."""
    rng = np.random.default_rng(seed)
    for _ in range(ROUNDS):
        here = [bool(rng.random() < 0.7) for _ in range(peers)]
        if sum(here) <= peers // 2:
            here = [True] * peers
        yield [int(n) for n in rng.integers(1, 40, peers)], here


@pytest.mark.parametrize("quorum", [True, False])
@pytest.mark.parametrize("peers", [3, 4])
@pytest.mark.parametrize("seed", range(3))
def test_late_gradients_enter_the_next_round_of_their_peer_once(
    peers: int, seed: int, quorum: bool
) -> None:
    """Without a quorum, peers are late that come back when the others have begun a round."""
    replicas = [Replica(pull, quorum) for pull in np.linspace(-1, 2, peers)]
    # the oracle: parameters, and for each peer the held samples and the sum over them
    weights = np.zeros(2)
    held, sums = [0] * peers, [np.zeros(2) for _ in range(peers)]
    began_at = [weights.copy() for _ in range(peers)]
    total = failed = 0
    for number, (sizes, here) in enumerate(plan(peers, seed), ROUND + 1):
        total += sum(sizes)
        for i, (replica, size) in enumerate(zip(replicas, sizes, strict=True)):
            replica.compute(size)
            sums[i] = sums[i] + size * (began_at[i] - replica.pull.numpy())
            held[i] += size
        members = [i for i in range(peers) if here[i]]
        fails = number % 7 == 0 and len(members) == peers
        failed += fails
        if fails:
            for i, replica in enumerate(replicas):
                held[i], sums[i] = 0, np.zeros(2)
                replica.fail()
            continue
        samples = sum(held[i] for i in members)
        weights = weights - LR * sum(sums[i] for i in members) / samples
        parts = [
            (replicas[i].grad_averager.local_samples_accumulated, replicas[i].mean())
            for i in members
        ]
        average = sum(n * mean for n, mean in parts) / sum(n for n, _ in parts)
        for i in members:
            held[i], sums[i] = 0, np.zeros(2)
            replicas[i].apply(average)
            replicas[i].average(number, weights)
        for i, replica in enumerate(replicas):
            if not here[i]:
                replica.miss(number, replicas[members[0]].weights)
                assert replica.grad_averager.local_samples_accumulated == held[i]
            replica.computed_at, began_at[i] = replica.weights.clone(), weights.copy()
            if replica.consistency.stale:  # until its next round, which averages parameters
                assert not (quorum or here[i])
                began_at[i] = replica.weights.numpy().astype(float)
            else:
                np.testing.assert_allclose(replica.weights.numpy(), weights, rtol=1e-4, atol=1e-5)
            replica.sync.note_batch()
    assert failed
    assert sum(replica.taken for replica in replicas) + sum(held) == total
