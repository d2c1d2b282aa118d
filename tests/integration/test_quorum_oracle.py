"""Rounds that begin with a quorum, against an oracle: every gradient enters one mean, by samples.

The oracle is one process in float64, without torch. It takes from the peers only the course of
events: the round whose parameters each batch had, and the rounds that each peer took part in.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.integration.swarm_helpers import call
from tests.integration.test_local_steps import BATCHES, batch, start, values
from tests.integration.toy import FAST, dht_of_peer, meet_at, stay_in_rounds

pytestmark = [pytest.mark.swarm, pytest.mark.usefixtures("forks")]

ROUNDS = 50
#: Rounds of which the averaging fails for every peer that begins them.
FAILING = (7, 20, 33)
TARGET, LR, MOMENTUM = 48, 0.05, 0.9
#: Largest error of a parameter; the largest one is near 2.
CLOSE = 5e-5
#: Number of the late peer, and the time of its batches and of the others' [s].
LATE, LATE_S, FAST_S = 1, 1.0, 0.03


def train(folder: str, peer: int, peers: int) -> dict[str, Any]:
    """Train in company; return the rounds, and the parameters before each batch and after it."""
    import torch

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
            used = fields["samples"] or fields["lost"]
            rounds.append((fields["round"], fields["outcome"], used, len(batches)))
        elif kind == "state_loaded" and fields["kept"]:
            kept.append(fields["kept"])

    optimizer = RayhiveOptimizer(
        dht=dht,
        run_id="quorum",
        target_batch_size=TARGET,
        optimizer=torch.optim.SGD(parameters, lr=LR, momentum=MOMENTUM),
        on_event=note,
        on_failure="skip",
        delay_state_averaging=False,
        min_peers=peers - 1,
        grace_s=0.05,
        **{**FAST, "averaging_timeout": 60.0},
    )
    averager, begun = optimizer.grad_averager, [0]
    schedule = averager.schedule_step

    def may_fail(*args: Any, **kwargs: Any) -> Any:
        if begun[0] in FAILING:
            raise RuntimeError("planned failure")
        return schedule(*args, **kwargs)

    averager.schedule_step = may_fail
    optimizer.before_round = lambda number, _: begun.__setitem__(0, number)
    assert optimizer.tracker.wait_for_peers(peers, 60)
    meet_at(place, "start", peer, peers)
    trace = []
    while optimizer.local_epoch < ROUNDS:
        optimizer.begin_batch()
        inputs, wanted = (torch.tensor(a, dtype=torch.float32) for a in batch(peer, len(batches)))
        batches.append(values(parameters))
        for parameter in parameters:
            parameter.grad = None
        ((inputs @ parameters[0] + parameters[1] - wanted) ** 2).mean().backward()
        time.sleep(LATE_S if peer == LATE else FAST_S)
        optimizer.step(batch_size=BATCHES[peer])
        trace.append((optimizer.local_epoch, values(parameters)))
    meet_at(place, "end", peer, peers)
    optimizer.shutdown()
    dht.shutdown()
    return {"batches": batches, "rounds": rounds, "kept": kept, "trace": trace}


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


def oracle(logs: list[dict[str, Any]]) -> list[list[Any]]:
    """Return the parameters after each round; the gradients of a peer wait until its next one."""
    found, momentum = [start()], [0.0, 0.0]
    used = [0 for _ in logs]
    taken = [{number: entry for number, *entry in log["rounds"]} for log in logs]
    for round_ in range(1, ROUNDS + 1):
        total, samples = [0.0, 0.0], 0
        for peer, log in enumerate(logs):
            if round_ not in taken[peer]:
                continue
            outcome, count, known = taken[peer][round_]
            assert outcome == ("skipped" if round_ in FAILING else "averaged"), (peer, round_)
            assert count == (known - used[peer]) * BATCHES[peer], (peer, round_)
            if outcome == "averaged":
                samples += count
                for number in range(used[peer], known):
                    begun = latest(found, log["batches"][number])
                    each = gradient(peer, number, found[begun])
                    total = [a + BATCHES[peer] * b for a, b in zip(total, each, strict=True)]
            used[peer] = known
        after = found[-1]
        if samples:
            mean = [value / samples for value in total]
            momentum = [MOMENTUM * m + g for m, g in zip(momentum, mean, strict=True)]
            after = [p - LR * m for p, m in zip(after, momentum, strict=True)]
        found.append(after)
    return found


@pytest.mark.parametrize("peers", [3, pytest.param(4, marks=pytest.mark.slow)])
def test_every_gradient_enters_one_mean_by_samples(tmp_path: Path, peers: int) -> None:
    children = [call(train, folder=str(tmp_path), peer=peer, peers=peers) for peer in range(peers)]
    logs = [child.result(400) for child in children]
    wanted = oracle(logs)
    late = [entry[0] for entry in logs[LATE]["rounds"]]
    assert 5 < len(late) < ROUNDS / 2, "the late peer was in most rounds, or in none"
    assert len(logs[LATE]["kept"]) > 5, "no gradient of the late peer waited for a round"
    for peer, log in enumerate(logs):
        for round_, seen in log["trace"]:
            known = latest(wanted[: round_ + 1], seen)
            # what a peer downloaded may be older than the round until the next average
            assert known == round_ or (peer == LATE and round_ in FAILING), (peer, round_, known)
