"""Rounds that begin with a quorum, against an oracle: all that peers compute enters one mean.

The oracle is one process in float64, without torch. It takes from the peers only the course of
events: the round whose parameters each batch had, and the rounds that each peer took part in.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.integration.swarm_helpers import call
from tests.integration.test_local_steps import BATCHES, batch, start, values
from tests.integration.toy import FAST, dht_of_peer, meet_at, stay_in_rounds, step_out

pytestmark = [pytest.mark.swarm, pytest.mark.usefixtures("forks")]

ROUNDS = 50
#: Rounds of which the averaging fails for every peer that begins them.
FAILING = (7, 20, 33)
TARGET, LR, MOMENTUM = 48, 0.05, 0.9
#: Largest error of a parameter; the largest one is near 2.
CLOSE = 5e-5
#: Number of the late peer, and the time of its batches and of the others' [s].
LATE, LATE_S, FAST_S = 1, 0.6, 0.03
#: Factor of all that the late peer contributes.
HALF = 0.5
#: Rounds of gradients, and those of local steps with all parameters and with two fragments.
GRADIENTS: dict[str, Any] = {}
LOCAL = {"local_steps": 1, "outer_lr": 0.7, "outer_momentum": MOMENTUM}
FRAGMENTS = {**LOCAL, "local_steps": 2, "fragments": 2}


def train(folder: str, peer: int, peers: int, options: dict[str, Any]) -> dict[str, Any]:
    """Train in company; return the rounds, and the parameters before each batch and after it.

    With local steps they are the outer ones.
    """
    import torch

    from rayhive.averaging.gradient_averager import accumulated
    from rayhive.optim.local_steps import common_parameters
    from rayhive.optim.optimizer import RayhiveOptimizer

    stay_in_rounds()
    place = Path(folder)
    dht = dht_of_peer(place, peer)
    parameters = [torch.nn.Parameter(torch.tensor(v, dtype=torch.float32)) for v in start()]
    batches: list[list[float]] = []
    rounds: list[tuple[int, str, int, int]] = []
    kept: list[int] = []

    def note(kind: str, fields: dict[str, Any]) -> None:
        if kind == "round":
            rounds.append((fields["round"], fields["outcome"], fields["samples"], len(batches)))
        elif kind == "state_loaded" and fields["kept"]:
            kept.append(fields["kept"])

    optimizer = RayhiveOptimizer(
        dht=dht,
        run_id="quorum",
        target_batch_size=TARGET,
        optimizer=torch.optim.SGD(parameters, lr=LR, momentum=0.0 if options else MOMENTUM),
        on_event=note,
        on_failure="skip",
        delay_state_averaging=False,
        min_peers=peers - 1,
        grace_s=0.05,
        **{**FAST, "averaging_timeout": 60.0, **options},
    )
    averager, begun = optimizer.grad_averager, [0]
    schedule = averager.schedule_step

    def may_fail(*args: Any, **kwargs: Any) -> Any:
        if begun[0] in FAILING:
            raise RuntimeError("planned failure")
        return schedule(*args, **kwargs)

    averager.schedule_step = may_fail  # type: ignore[method-assign]

    def halve(number: int, averager: Any) -> Callable[[], None] | None:
        """Halve what the late peer contributes; undone when a round begins without it."""
        begun[0] = number
        if peer != LATE:
            return None
        sums = accumulated(averager)[0]
        scale(sums, HALF)
        return partial(scale, sums, 1 / HALF)

    optimizer.before_round = halve
    assert optimizer.tracker.wait_for_peers(peers, 60)
    meet_at(place, "start", peer, peers)
    trace = []
    while optimizer.local_epoch < ROUNDS:
        optimizer.begin_batch()
        inputs, wanted = (torch.tensor(a, dtype=torch.float32) for a in batch(peer, len(batches)))
        batches.append(values(common_parameters(optimizer)))
        for parameter in parameters:
            parameter.grad = None
        ((inputs @ parameters[0] + parameters[1] - wanted) ** 2).mean().backward()
        time.sleep(LATE_S if peer == LATE else FAST_S)
        optimizer.step(batch_size=BATCHES[peer])
        trace.append((optimizer.local_epoch, values(common_parameters(optimizer))))
    step_out(optimizer)
    meet_at(place, "end", peer, peers)
    optimizer.shutdown()
    dht.shutdown()
    return {"batches": batches, "rounds": rounds, "kept": kept, "trace": trace}


def scale(tensors: list[Any], factor: float) -> None:
    for tensor in tensors:
        tensor.mul_(factor)


def gradient(peer: int, number: int, at: list[Any]) -> list[Any]:
    """Return the gradient of a peer's mean squared error on one of its batches."""
    inputs, wanted = batch(peer, number)
    error = 2 * (inputs @ at[0] + at[1] - wanted) / wanted.size
    return [inputs.T @ error, error.sum(axis=0)]


def flat(tensors: list[Any]) -> Any:
    return np.concatenate([np.ravel(value) for value in tensors])


def latest(found: list[list[Any]], seen: list[float]) -> int:
    """Return the last round after which the parameters were these."""
    same = [n for n, each in enumerate(found) if np.allclose(flat(each), seen, rtol=0, atol=CLOSE)]
    assert same, "these are the parameters of no round"
    return same[-1]


class Contribution:
    """What one peer has computed and no round has used, for each of the two tensors."""

    def __init__(self, peer: int, log: dict[str, Any], local: bool) -> None:
        self.peer, self.batches, self.local = peer, log["batches"], local
        self.rounds = {number: entry for number, *entry in log["rounds"]}
        self.done, self.sums, self.samples = 0, [0.0, 0.0], [0, 0]

    def compute(self, until: int, found: list[list[Any]]) -> int:
        """Compute the batches up to one; return their samples."""
        size, before = BATCHES[self.peer], self.done
        for number in range(before, until):
            at = found[latest(found, self.batches[number])]
            if self.local:  # sums of steps, on the parameters that they have moved
                at = [outer - moved for outer, moved in zip(at, self.sums, strict=True)]
            new = gradient(self.peer, number, at)
            scale = LR if self.local else size
            self.sums = [old + scale * each for old, each in zip(self.sums, new, strict=True)]
            self.samples = [count + size for count in self.samples]
        self.done = until
        return (until - before) * size

    def take(self, at: int) -> tuple[Any, int]:
        """Return the sum over samples that enters a mean, and their number."""
        found, samples = self.sums[at], self.samples[at]
        self.sums[at], self.samples[at] = 0.0, 0
        return (samples * found if self.local else found), samples


def oracle(logs: list[dict[str, Any]], options: dict[str, Any]) -> list[list[Any]]:
    """Return the parameters after each round; what a peer computed waits until its next one."""
    local = bool(options)
    peers = [Contribution(peer, log, local) for peer, log in enumerate(logs)]
    found, momentum = [start()], [0.0, 0.0]
    for round_ in range(1, ROUNDS + 1):
        members, after = [], list(found[-1])
        for each in peers:
            if round_ in each.rounds:
                outcome, count, known = each.rounds[round_]
                assert outcome == ("skipped" if round_ in FAILING else "averaged")
                samples = each.compute(known, found)
                assert count == samples, (each.peer, round_)
                members.append(each)
        for at in (round_ % 2,) if options.get("fragments") else (0, 1):
            if round_ in FAILING:
                if not local:  # the gradients of a round that is skipped are lost
                    for each in members:
                        each.take(at)
                continue
            parts = [each.take(at) for each in members]
            weights = [HALF if each.peer == LATE else 1.0 for each in members]
            total = sum(w * part for w, (part, _) in zip(weights, parts, strict=True))
            mean = total / sum(samples for _, samples in parts)
            momentum[at] = MOMENTUM * momentum[at] + mean
            if local:  # Nesterov's
                after[at] = after[at] - options["outer_lr"] * (mean + MOMENTUM * momentum[at])
            else:
                after[at] = after[at] - LR * momentum[at]
        found.append(after)
    return found


@pytest.mark.parametrize(
    ("peers", "options"),
    [
        pytest.param(3, GRADIENTS, id="3, gradients"),
        pytest.param(4, GRADIENTS, id="4, gradients", marks=pytest.mark.slow),
        pytest.param(3, LOCAL, id="3, local steps", marks=pytest.mark.slow),
        pytest.param(4, FRAGMENTS, id="4, fragments", marks=pytest.mark.slow),
    ],
)
def test_all_that_peers_compute_enters_one_mean_by_samples(
    tmp_path: Path, peers: int, options: dict[str, Any]
) -> None:
    children = [
        call(train, folder=str(tmp_path), peer=peer, peers=peers, options=options)
        for peer in range(peers)
    ]
    logs = [child.result(400) for child in children]
    wanted = oracle(logs, options)
    late = [entry[0] for entry in logs[LATE]["rounds"]]
    assert 5 < len(late) < ROUNDS / 2, "the late peer was in most rounds, or in none"
    assert len(logs[LATE]["kept"]) > 5, "nothing of the late peer waited for a round"
    for peer, log in enumerate(logs):
        averaged = {number for number, outcome, *_ in log["rounds"] if outcome == "averaged"}
        for round_, seen in log["trace"]:
            known = latest(wanted[: round_ + 1], seen)
            # what a peer downloaded may be older than the round until the next average
            assert known == round_ or (peer == LATE and round_ not in averaged), (peer, round_)
