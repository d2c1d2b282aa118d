"""Pairwise gossip of real peers, against an oracle written from the equations of NoLoCo.

The oracle is one process in float64, without torch. It keeps every pseudo-gradient, outer parameter
and momentum of arXiv:2506.10911, and takes from the peers only the course of events: the inner
steps of each peer in each round, the pairs, and the rounds that failed.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rayhive.averaging.pairing import Pairing
from tests.integration.swarm_helpers import call
from tests.integration.test_local_steps import BATCHES, FAILING, ROUNDS, Inner, check_course, start
from tests.integration.test_local_steps import train as train_locally

pytestmark = [pytest.mark.swarm, pytest.mark.usefixtures("forks")]

#: Outer learning rate and momentum of the paper, which are those of ``train`` otherwise.
OUTER = {"outer_lr": 0.7, "outer_momentum": 0.5}


def train(**arguments: Any) -> dict[str, Any]:
    """Train in company; return besides the id of the peer and its group of each round."""
    from rayhive.membership.progress_tracker import LiveProgressTracker

    found: dict[str, Any] = {"groups": {}}
    note = LiveProgressTracker.note_group

    def noted(tracker: Any, round_: int, peers: Any) -> None:
        members = list(peers)
        found["id"] = tracker.view.own.peer_id.hex()
        found["groups"][round_] = sorted(peer.hex() for peer in members)
        note(tracker, round_, members)

    LiveProgressTracker.note_group = noted  # type: ignore[method-assign]
    return {**train_locally(**arguments), **found}


def oracle(logs: list[dict[str, Any]], on_failure: str) -> list[list[Any]]:
    """Return the outer parameters of every peer after each round, from the paper's equations.

    With the outer gradient D = theta - phi, the momentum is delta <- alpha delta + beta mean(D) -
    gamma (phi - mean(phi)), and phi <- phi + delta. Means are over the group, by samples.
    """
    alpha, beta = OUTER["outer_momentum"], OUTER["outer_lr"]
    gamma = beta
    everyone = range(len(logs))
    numbers = {log["id"]: i for i, log in enumerate(logs)}
    inner = [Inner(i) for i in everyone]
    phi, theta = [start() for _ in everyone], [start() for _ in everyone]
    delta = [[0.0, 0.0] for _ in everyone]
    samples = [0 for _ in everyone]
    found = []
    for round_ in range(1, len(logs[0]["steps"]) + 1):
        for i in everyone:
            steps = logs[i]["steps"][round_ - 1]
            samples[i] += steps * BATCHES[i]
            for _ in range(steps):
                theta[i] = inner[i].step(theta[i])
        begun = [list(each) for each in phi]
        for i in everyone:
            group = [i]
            if round_ not in FAILING:
                group = [numbers[each] for each in logs[i]["groups"][str(round_)]]
            elif on_failure == "skip":
                continue
            share = [samples[j] / sum(samples[k] for k in group) for j in group]
            for at in (0, 1):
                outer = sum(
                    s * (theta[j][at] - begun[j][at]) for s, j in zip(share, group, strict=True)
                )
                mean = sum(s * begun[j][at] for s, j in zip(share, group, strict=True))
                pull = gamma * (begun[i][at] - mean)
                delta[i][at] = alpha * delta[i][at] + beta * outer - pull
                phi[i][at] = begun[i][at] + delta[i][at]
        if round_ not in FAILING or on_failure == "local":
            theta, samples = [list(each) for each in phi], [0 for _ in everyone]
        found.append([np.concatenate([np.ravel(v) for v in each]) for each in phi])
    return found


@pytest.mark.parametrize(
    ("peers", "on_failure"),
    [
        pytest.param(2, "local", id="2, local"),
        pytest.param(2, "skip", id="2, skip", marks=pytest.mark.slow),
        pytest.param(4, "local", id="4, local", marks=pytest.mark.slow),
        pytest.param(4, "skip", id="4, skip", marks=pytest.mark.slow),
    ],
)
def test_updates_are_those_of_the_paper(tmp_path: Path, peers: int, on_failure: str) -> None:
    options = {**OUTER, "on_failure": on_failure, "group_size": 2}
    given = {"folder": str(tmp_path), "peers": peers, "rounds": ROUNDS, "failing": list(FAILING)}
    children = [call(train, **given, peer=peer, options=options) for peer in range(peers)]
    logs = [child.result(400) for child in children]
    check_course(logs, on_failure)
    assert not [kind for log in logs for kind, _ in log["events"] if kind != "round"]
    check_pairs(logs)
    expected = oracle(logs, on_failure)
    for i, log in enumerate(logs):
        for round_, (seen, wanted) in enumerate(zip(log["trace"], expected, strict=True), 1):
            scale, where = float(np.abs(wanted[i]).max()), f"peer {i}, round {round_}"
            np.testing.assert_allclose(
                seen["outer"], wanted[i], atol=2e-5 * scale, rtol=0, err_msg=where
            )


def check_pairs(logs: list[dict[str, Any]]) -> None:
    """Check that the groups are the pairs of the shared view, and change from round to round."""
    peers = [bytes.fromhex(log["id"]) for log in logs]
    pairs = Counter[str]()
    for log in logs:
        for round_, group in log["groups"].items():
            wanted = Pairing("local_grad_averager").group(
                bytes.fromhex(log["id"]), peers, int(round_)
            )
            assert group == sorted(peer.hex() for peer in wanted), round_
            pairs["-".join(group)] += 1
    assert len(pairs) == len(peers) * (len(peers) - 1) // 2
