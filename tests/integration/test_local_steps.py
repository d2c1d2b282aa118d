"""Local steps of real peers, against an oracle written from the equations of DiLoCo.

The oracle is one process in float64, without torch. It computes every inner and outer step from
algorithm 1 of arXiv:2311.08105, and takes from the peers only the course of events: how many inner
steps each peer did in each round, and which rounds failed.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.integration.swarm_helpers import call
from tests.integration.toy import FAST, dht_of_peer, meet_at, stay_in_rounds

pytestmark = [pytest.mark.swarm, pytest.mark.usefixtures("forks")]

ROUNDS = 50
#: Rounds of which the averaging fails for every peer.
FAILING = (7, 8, 20, 33)
INPUTS, OUTPUTS = 6, 3
#: Samples of each batch of a peer; unequal ones.
BATCHES = (16, 9, 5, 12)
H, TARGET = 4, 32
OUTER = {"outer_lr": 0.7, "outer_momentum": 0.9}
#: AdamW, which the paper has as its inner optimizer.
LR, BETAS, EPS, DECAY = 0.02, (0.9, 0.999), 1e-8, 0.1


def batch(peer: int, number: int) -> tuple[Any, Any]:
    """Return a batch of a peer: noisy values of a linear map, which differs between peers."""
    rng = np.random.default_rng([peer, number])
    inputs = rng.normal(size=(BATCHES[peer], INPUTS))
    mapping = np.random.default_rng(99).normal(size=(INPUTS, OUTPUTS)) + 0.3 * peer
    return inputs, inputs @ mapping + 0.1 * rng.normal(size=(BATCHES[peer], OUTPUTS))


def start() -> list[Any]:
    rng = np.random.default_rng(5)
    return [rng.normal(size=(INPUTS, OUTPUTS)), rng.normal(size=OUTPUTS)]


def values(tensors: Any) -> list[float]:
    return [value for tensor in tensors for value in tensor.detach().flatten().tolist()]


def digest(tensors: Any) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().contiguous().numpy().tobytes())
    return found.hexdigest()


def delay_heartbeats(seconds: float) -> None:
    """Let each heartbeat of this process take this time to its receiver."""
    from rayhive.membership.heartbeat import HeartbeatService

    call = HeartbeatService.call

    async def late(service: Any, peer: bytes, message: bytes) -> bytes:
        await asyncio.sleep(seconds)
        return await call(service, peer, message)

    HeartbeatService.call = late


def train(
    folder: str,
    peer: int,
    peers: int,
    rounds: int,
    failing: list[int],
    options: dict[str, Any],
    latency: float = 0.0,
) -> dict[str, Any]:
    """Train in company; return inner steps of each round, events, and parameters after each."""
    import torch

    from rayhive.optim.optimizer import RayhiveOptimizer
    from rayhive.spec.axes.delay import DELAY_FLAGS

    stay_in_rounds()
    delay_heartbeats(latency)
    flags = {"delay_state_averaging": False, **DELAY_FLAGS[options.pop("delay", "none")]}
    place = Path(folder)
    dht = dht_of_peer(place, peer)
    parameters = [torch.nn.Parameter(torch.tensor(v, dtype=torch.float32)) for v in start()]
    inner = torch.optim.AdamW(parameters, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY)
    events: list[tuple[str, dict[str, Any]]] = []
    optimizer = RayhiveOptimizer(
        dht=dht,
        run_id="local",
        target_batch_size=TARGET,
        optimizer=inner,
        local_steps=H,
        on_event=lambda kind, fields: events.append((kind, fields)),
        **{**FAST, "averaging_timeout": 60.0, **OUTER, **flags, **options},
    )
    assert optimizer.tracker.wait_for_peers(peers, 60)

    averager = optimizer.grad_averager
    schedule, begun = averager.schedule_step, [0]

    def may_fail(*args: Any, **kwargs: Any) -> Any:
        if begun[0] in failing:
            meet_at(place, f"failure-of-{begun[0]}-", peer, peers)
            raise RuntimeError("planned failure")
        return schedule(*args, **kwargs)

    averager.schedule_step = may_fail
    optimizer.before_round = lambda number, _: begun.__setitem__(0, number)
    meet_at(place, "start", peer, peers)
    averaged = optimizer.state_averager.optimizer
    steps, trace, number = Counter[int](), [], 0
    while optimizer.local_epoch < rounds:
        round_ = optimizer.local_epoch + 1
        inputs, wanted = (torch.tensor(a, dtype=torch.float32) for a in batch(peer, number))
        for parameter in parameters:
            parameter.grad = None
        loss = ((inputs @ parameters[0] + parameters[1] - wanted) ** 2).mean()
        loss.backward()
        optimizer.step(batch_size=BATCHES[peer])
        steps[round_] += 1
        number += 1
        if optimizer.local_epoch == round_:
            outer = averaged.param_groups[0]["params"]
            trace.append({"local": values(parameters), "outer": values(outer)})
        elif optimizer.local_epoch > round_:
            raise AssertionError("a round was missed")
    while optimizer.state_averager.pending_updates:
        optimizer.settle()
    meet_at(place, "end", peer, peers)
    state = [s["momentum_buffer"] for s in averaged.state.values() if "momentum_buffer" in s]
    result = {
        "steps": [steps[n] for n in range(1, rounds + 1)],
        "events": [
            (kind, {n: f.get(n) for n in ("round", "outcome", "samples", "reason")})
            for kind, f in events
            if kind in ("round", "state_round", "state_loaded")
        ],
        "trace": trace,
        "outer": digest([*averaged.param_groups[0]["params"], *state]),
    }
    optimizer.shutdown()
    dht.shutdown()
    return result


class Inner:
    """AdamW (Loshchilov and Hutter, 2019, algorithm 2) on the least-squares loss of a peer."""

    def __init__(self, peer: int) -> None:
        self.peer, self.number = peer, 0
        self.reset()

    def reset(self) -> None:
        self.t, self.m, self.v = 0, [0.0, 0.0], [0.0, 0.0]

    def step(self, theta: list[Any]) -> list[Any]:
        inputs, wanted = batch(self.peer, self.number)
        error = 2 * (inputs @ theta[0] + theta[1] - wanted) / wanted.size
        gradients = [inputs.T @ error, error.sum(axis=0)]
        self.number, self.t = self.number + 1, self.t + 1
        moved = []
        for at, (value, g) in enumerate(zip(theta, gradients, strict=True)):
            self.m[at] = BETAS[0] * self.m[at] + (1 - BETAS[0]) * g
            self.v[at] = BETAS[1] * self.v[at] + (1 - BETAS[1]) * g * g
            m, v = self.m[at] / (1 - BETAS[0] ** self.t), self.v[at] / (1 - BETAS[1] ** self.t)
            moved.append(value - LR * DECAY * value - LR * m / (np.sqrt(v) + EPS))
        return moved


def oracle(
    logs: list[dict[str, Any]],
    on_failure: str,
    reset: bool = False,
    fragments: int = 1,
    mixing: float | None = None,
) -> list[list[Any]]:
    """Return the outer parameters of every peer after each round, from the paper's equations.

    With two fragments, one is the matrix and the other one is the vector; round t averages number
    t mod 2 of them, as in arXiv:2501.18512, section 2.2.
    """
    everyone = range(len(logs))
    inner = [Inner(peer) for peer in everyone]
    outer = [start() for _ in everyone]
    local = [start() for _ in everyone]
    momentum = [[0.0, 0.0] for _ in everyone]
    samples = [[0, 0] for _ in everyone]  # since each of the two was averaged last
    averaged_in = {f["round"] for kind, f in logs[0]["events"] if kind == "state_round"}
    found = []
    mu, lr = OUTER["outer_momentum"], OUTER["outer_lr"]
    for round_ in range(1, len(logs[0]["steps"]) + 1):
        for i in everyone:
            steps = logs[i]["steps"][round_ - 1]
            samples[i] = [n + steps * BATCHES[i] for n in samples[i]]
            for _ in range(steps):
                local[i] = inner[i].step(local[i])  # lines 4 to 7
        failed, used = round_ in FAILING, []
        for at in (0, 1) if fragments == 1 else (round_ % 2,):
            deltas = [outer[i][at] - local[i][at] for i in everyone]
            if not failed:  # line 10, by samples
                total = sum(samples[i][at] for i in everyone)
                mean = sum(samples[i][at] / total * deltas[i] for i in everyone)
                deltas = [mean for _ in everyone]
            for i in everyone if not failed or on_failure == "local" else ():
                momentum[i][at] = mu * momentum[i][at] + deltas[i]  # line 11, Nesterov's
                outer[i][at] = outer[i][at] - lr * (deltas[i] + mu * momentum[i][at])
                used.append((i, at, local[i][at]))
                samples[i][at] = 0
        if round_ in averaged_in:
            for at in (0, 1):
                mean = sum(momentum[i][at] for i in everyone) / len(logs)
                mean_outer = sum(outer[i][at] for i in everyone) / len(logs)
                for i in everyone:  # progress that is in no round yet moves with the outer ones
                    local[i][at] = local[i][at] + mean_outer - outer[i][at]
                    outer[i][at], momentum[i][at] = mean_outer, mean
        for i, at, value in used:
            share = 0.0 if mixing is None else mixing
            local[i][at] = share * value + (1 - share) * outer[i][at]
        if reset:
            for each in inner:
                each.reset()
        found.append([np.concatenate([np.ravel(v) for v in each]) for each in outer])
    return found


def together(folder: Path, peers: int, **arguments: Any) -> list[dict[str, Any]]:
    children = [
        call(train, folder=str(folder), peer=peer, peers=peers, **arguments)
        for peer in range(peers)
    ]
    return [child.result(400) for child in children]


@pytest.mark.parametrize(
    ("peers", "on_failure", "inner_state", "latency"),
    [
        pytest.param(2, "local", "keep", 0.0, id="2, local"),
        pytest.param(2, "local", "keep", 0.2, id="2, local, rounds shorter than the latency"),
        pytest.param(4, "local", "reset", 0.0, id="4, local, reset", marks=pytest.mark.slow),
        pytest.param(2, "skip", "keep", 0.0, id="2, skip", marks=pytest.mark.slow),
        pytest.param(4, "skip", "keep", 0.0, id="4, skip", marks=pytest.mark.slow),
    ],
)
def test_updates_are_those_of_the_paper(
    tmp_path: Path, peers: int, on_failure: str, inner_state: str, latency: float
) -> None:
    options = {"on_failure": on_failure, "inner_state": inner_state}
    run = {"rounds": ROUNDS, "failing": list(FAILING), "latency": latency}
    logs = together(tmp_path, peers, options=options, **run)
    check_course(logs, on_failure)
    assert len({tuple(log["steps"]) for log in logs}) > 1, "all peers did the same number of steps"
    compare(logs, oracle(logs, on_failure, reset=inner_state == "reset"))
    for log in logs:
        used = [n for n in range(1, ROUNDS + 1) if on_failure == "local" or n not in FAILING]
        assert all(log["trace"][n - 1]["local"] == log["trace"][n - 1]["outer"] for n in used)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("peers", "on_failure", "mixing"),
    [
        pytest.param(2, "local", None, id="2, local"),
        pytest.param(4, "skip", None, id="4, skip"),
        pytest.param(2, "local", 0.5, id="2, mixed"),
        pytest.param(4, "local", 0.5, id="4, mixed"),
    ],
)
def test_fragments_are_updated_in_turn(
    tmp_path: Path, peers: int, on_failure: str, mixing: float | None
) -> None:
    options = {"on_failure": on_failure, "fragments": 2, "mixing": mixing}
    logs = together(tmp_path, peers, rounds=ROUNDS, failing=list(FAILING), options=options)
    check_course(logs, on_failure)
    compare(logs, oracle(logs, on_failure, fragments=2, mixing=mixing))


def check_course(logs: list[dict[str, Any]], on_failure: str) -> None:
    """Check that the planned rounds failed, and no other averaging."""
    failed = "local" if on_failure == "local" else "skipped"
    wanted = {n: failed if n in FAILING else "averaged" for n in range(1, ROUNDS + 1)}
    averagings = []
    for log in logs:
        outcomes = {f["round"]: f["outcome"] for kind, f in log["events"] if kind == "round"}
        assert outcomes == wanted
        averagings.append([f for kind, f in log["events"] if kind == "state_round"])
    assert all(f["outcome"] == "averaged" for found in averagings for f in found), averagings
    assert all(found == averagings[0] for found in averagings), averagings


def compare(logs: list[dict[str, Any]], expected: list[list[Any]]) -> None:
    """Compare the outer parameters after each round with those of an oracle."""
    for i, log in enumerate(logs):
        for round_, (seen, wanted_outer) in enumerate(zip(log["trace"], expected, strict=True), 1):
            scale = float(np.abs(wanted_outer[i]).max())
            where = f"peer {i}, round {round_}"
            np.testing.assert_allclose(
                seen["outer"], wanted_outer[i], atol=2e-5 * scale, err_msg=where
            )
    assert len({log["outer"] for log in logs}) == 1, "outer state differs between replicas"


@pytest.mark.parametrize("delay", [pytest.param("state", marks=pytest.mark.slow), "gradients"])
def test_outer_state_is_equal_to_the_bit_with_delays(tmp_path: Path, delay: str) -> None:
    logs = together(tmp_path, 2, rounds=8, failing=[], options={"delay": delay})
    for log in logs:
        assert {f["outcome"] for kind, f in log["events"] if kind == "round"} == {"averaged"}
    assert len({log["outer"] for log in logs}) == 1
