"""A peer that dies in the middle of an all-reduce costs the other peers at most that round."""

from __future__ import annotations

import os
import signal
import time
from itertools import pairwise
from typing import Any

import pytest

from rayhive.cluster.node.process_group import OwnedProcesses
from tests.integration.swarm_helpers import call

pytestmark = [pytest.mark.swarm, pytest.mark.usefixtures("forks")]

PEERS, BATCH, ROUNDS = 4, 8, 10
#: In this round the last peer dies, with some of its parts sent and the others not.
DEATH = 4
PARTS_SENT = 2
#: Width of the model: also its factors have several parts.
WIDTH = 4000
#: Every so many parameters are compared.
LOOKED_AT = 97

#: Memory that processes share vanishes with them, also when they are killed.
LEAVES_NOTHING = {"HIVEMIND_MEMORY_SHARING_STRATEGY": "file_descriptor"}
#: The all-reduce of gradients in which it does, counted from 1: PowerSGD has two a round.
ALL_REDUCES = {"dense": DEATH, "P": 2 * DEATH - 1, "Q": 2 * DEATH}


def die_in_all_reduce(number: int) -> None:
    """Let this process group be killed in the middle of averaging gradients."""
    from rayhive.averaging import averager

    class Dying(averager.MeasuredAllReduce):
        begun = 0

        def __init__(self, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            if "grad_averager" in str(self._prefix):
                type(self).begun += 1
            self.sent = 0

        async def _generate_input_for_peer(self, peer_index):  # type: ignore[no-untyped-def]
            async for message in super()._generate_input_for_peer(peer_index):
                yield message
                self.sent += 1
                if self.begun == number and self.sent == PARTS_SENT:
                    os.killpg(0, signal.SIGKILL)

    averager.MeasuredAllReduce = Dying  # type: ignore[misc]


def run_peer(peer: int, addresses: list[str], phase: str) -> dict[str, Any]:
    from functools import partial

    import hivemind
    import torch
    from hivemind.p2p import P2P

    from rayhive.averaging.gradient_averager import RayhiveGradientAverager, RayhivePowerSGDAverager
    from rayhive.optim.optimizer import RayhiveOptimizer

    # what a killed peer leaves is removed with the folder that it runs in
    P2P._UNIX_SOCKET_PREFIX = f"/unix{os.getcwd()}/"
    if peer == PEERS - 1:
        die_in_all_reduce(ALL_REDUCES[phase])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    module = torch.nn.Sequential(
        torch.nn.Linear(16, WIDTH),
        torch.nn.ReLU(),
        torch.nn.Linear(WIDTH, 40),
        torch.nn.Linear(40, 1),
    )
    dht = hivemind.DHT(
        initial_peers=addresses or None, host_maddrs=["/ip4/127.0.0.1/tcp/0"], start=True
    )
    print("ADDRESSES", *(str(address) for address in dht.get_visible_maddrs()), flush=True)
    factory = (
        partial(RayhivePowerSGDAverager, averager_rank=2, min_compression_ratio=0.1)
        if phase != "dense"
        else RayhiveGradientAverager
    )
    events: list[tuple[str, float, dict[str, Any]]] = []
    optimizer = RayhiveOptimizer(
        dht=dht,
        run_id="death",
        target_batch_size=BATCH * PEERS,
        batch_size_per_step=BATCH,
        optimizer=torch.optim.SGD(module.parameters(), lr=0.002),
        matchmaking_time=60.0,
        averaging_timeout=120.0,
        grad_averager_factory=factory,
        on_event=lambda kind, fields: events.append((kind, time.monotonic(), fields)),
        delay_state_averaging=False,
    )
    generator = torch.Generator().manual_seed(peer)
    weights: dict[int, list[float]] = {}
    assert optimizer.tracker.wait_for_peers(PEERS, 40)
    print("TOGETHER", flush=True)
    while (round_ := optimizer.local_epoch) < ROUNDS:
        inputs = torch.randn(BATCH, 16, generator=generator)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(module(inputs), inputs.sum(1, keepdim=True)).backward()
        optimizer.step()
        if optimizer.local_epoch > round_:
            weights[optimizer.local_epoch] = torch.cat(
                [p.detach().flatten() for p in module.parameters()]
            )[::LOOKED_AT].tolist()
    optimizer.shutdown()
    dht.shutdown()
    transitions = [t for kind, t, _ in events if kind == "transition"]
    return {
        "weights": weights,
        "rounds": {
            f["round"]: [f["outcome"], f.get("group_size"), f.get("retries")]
            for kind, _, f in events
            if kind == "round"
        },
        "averaged": [(f["round"], f["reason"]) for kind, _, f in events if kind == "state_round"],
        "slowest_s": max(b - a for a, b in pairwise(transitions)),
    }


@pytest.mark.parametrize(
    "phase",
    [
        pytest.param("dense", marks=pytest.mark.slow),
        "P",
        pytest.param("Q", marks=pytest.mark.slow),
    ],
)
def test_survivors_lose_one_round_at_most_and_agree_after_the_next(phase: str) -> None:
    first = call(run_peer, LEAVES_NOTHING, peer=0, addresses=[], phase=phase)
    _, *addresses = first.wait_for_line("ADDRESSES").split()
    *others, victim = [
        call(run_peer, LEAVES_NOTHING, peer=peer, addresses=addresses, phase=phase)
        for peer in range(1, PEERS)
    ]
    owned = OwnedProcesses(leader=victim.pid)
    victim.wait_for_line("TOGETHER")  # it has all of its processes
    owned.note()
    survivors = [child.result(100) for child in (first, *others)]
    assert victim.exit_code() == -signal.SIGKILL
    owned.remove()  # memory that it was about to unlink: the agent of a node does it
    for each in survivors:
        assert list(map(int, each["rounds"])) == list(range(1, ROUNDS + 1))
        for number, (outcome, size, _) in each["rounds"].items():
            if int(number) < DEATH:
                assert (outcome, size) == ("averaged", PEERS)
            elif int(number) > DEATH:
                assert (outcome, size) == ("averaged", PEERS - 1), survivors
    for round_ in range(DEATH + 1, ROUNDS + 1):
        one, *rest = (each["weights"][str(round_)] for each in survivors)
        worst = max(max(abs(a - b) for a, b in zip(one, other, strict=True)) for other in rest)
        assert worst == 0.0, round_
    for each in survivors:
        assert {number for number, _ in each["averaged"]} <= {DEATH + 1, DEATH + 2}, survivors
        # a peer that got every part learns of the others' loss, or of their other parameters; on a
        # busy machine survivors may lose sight of each other for a moment
        reasons = {reason for _, reason in each["averaged"]}
        assert reasons <= {"failed_round", "replicas_differ", "partition"}
    print(f"slowest round {max(each['slowest_s'] for each in survivors):.2f} s; the round of the "
          f"death: {[each['rounds'][str(DEATH)] for each in survivors]}")  # fmt: skip
