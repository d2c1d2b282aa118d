"""PowerSGD between real peers: iterations, dense rounds first, a joining peer, a plain one.

``python -m tests.integration.test_powersgd_rounds`` plays it and prints a report.
"""

from __future__ import annotations

import json
import threading
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch

from rayhive.compression.payload import payload
from tests.integration.averager_harness import MARK, SHAPES, run_module

pytestmark = pytest.mark.swarm

OPTIONS: dict[str, Any] = {"num_iters_per_step": 2, "start_compressing_after_num_steps": 2}
RANK: dict[str, Any] = {"averager_rank": 2, "min_compression_ratio": 0.3}


def play() -> dict[str, Any]:
    import hivemind.optim.power_sgd_averager as upstream

    from rayhive.averaging import powersgd_payload
    from rayhive.averaging.gradient_averager import RayhivePowerSGDAverager
    from rayhive.compression.powersgd.gpu_worker import ServedFactors
    from rayhive.membership.view import Member
    from tests.integration import averager_scenarios as scenes

    class PlainPowerSGD(scenes.Plain, upstream.PowerSGDGradientAverager):
        pass

    PlainPowerSGD.__name__ = upstream.PowerSGDGradientAverager.__name__  # its RPCs carry it

    def one_round(group: list[Any], number: int) -> list[dict[str, Any]]:
        done = number - 1
        ids = [averager.dht.peer_id.to_bytes() for averager in group]
        for averager in group:
            averager.set_members([Member(peer, False, done, done, done) for peer in ids])
        return [result.summary() for result in scenes.one_round(group, gather=number)]

    def apart(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
        pairs = zip(ours, theirs, strict=True)
        return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)

    def large(averager: Any) -> list[torch.Tensor]:
        with averager.get_tensors() as tensors:
            return [tensors[index].clone() for index in (0, 2, 4)]

    report: dict[str, Any] = {}
    options = {"prefix": "options", **OPTIONS, **RANK}
    with scenes.swarm(3) as dhts:
        with scenes.averagers(dhts[:2], RayhivePowerSGDAverager, **options) as first:
            report["rounds"] = [one_round(first, number) for number in (1, 2, 3)]
            with scenes.averagers(dhts[2:], RayhivePowerSGDAverager, **options) as late:
                report["q before"] = apart(first[0].payload.factors.qs, late[0].payload.factors.qs)
                report["loaded"] = late[0].load_state_from_peers(timeout=20)
                report["q after"] = apart(first[0].payload.factors.qs, late[0].payload.factors.qs)
                report["joined"] = one_round([*first, *late], 4)
                report["q together"] = apart(
                    first[0].payload.factors.qs, late[0].payload.factors.qs
                )
        options = {"prefix": "mixed", "min_matchmaking_time": 2.0, "target_group_size": 2, **RANK}
        with (
            scenes.averagers(dhts[:1], RayhivePowerSGDAverager, **options) as ours,
            scenes.averagers(dhts[1:2], PlainPowerSGD, **options, request_timeout=1.0) as theirs,
        ):
            report["plain"] = [len(r) for r in scenes.one_round([*ours, *theirs])]
            report["apart"] = apart(large(ours[0]), large(theirs[0]))
        averaged, owed = [], []
        # computed as on a GPU: by the trainer's process, for the averager's
        # without a codec, which would round the last bits
        options = {"prefix": "served", "factor_codec": "none", **RANK}
        served = mock.patch.object(powersgd_payload, "Factors", ServedFactors)
        for how in (nullcontext(), served):
            with (
                how,
                scenes.averagers(dhts[:2], RayhivePowerSGDAverager, **options) as group,
            ):
                for _ in range(3):
                    scenes.one_round(group)
                averaged.append([gradient for peer in group for gradient in large(peer)])
                owed.append(
                    sum(float(tensor.norm()) for tensor in group[1].payload.factors.error_feedback)
                )
        report["served"] = apart(*averaged)
        report["owed in the trainer's process"] = owed
        report["threads"] = [t.name for t in threading.enumerate() if t.name == "powersgd"]
    return report


@pytest.fixture(scope="module")
def report() -> Any:
    """Report of a process that leaves nothing behind."""
    output = run_module("tests.integration.test_powersgd_rounds", limit=150)
    (line,) = [line for line in output.splitlines() if line.startswith(MARK)]
    return json.loads(line.removeprefix(MARK))


def test_rounds_are_dense_at_first_and_iterate_later(report: Any) -> None:
    dense = payload(SHAPES)
    low_rank = payload(
        SHAPES,
        powersgd_rank=2,
        min_compression_ratio=0.3,
        num_iters_per_step=OPTIONS["num_iters_per_step"],
    )
    assert [phase.name for phase in low_rank.phases] == ["P", "Q", "P2", "Q2"]
    for results, predicted in zip(report["rounds"], (dense, dense, low_rank), strict=True):
        for result in results:
            names = [phase["name"] for phase in result["phases"]]
            assert names == [phase.name for phase in predicted.phases]
            assert result["sent_bytes"] == predicted.bytes_per_transfer
            assert result["fraction"] == 1.0


def test_a_joining_peer_has_the_q_of_the_group(report: Any) -> None:
    assert report["q before"] > 0.1, "they had moved on"
    assert report["loaded"] and report["q after"] < 1e-5
    for result in report["joined"]:
        assert [phase["name"] for phase in result["phases"]] == ["P", "Q", "P2", "Q2"]
        assert (result["group_size"], result["fraction"]) == (3, 1.0)
    assert report["q together"] < 1e-5


def test_a_plain_peer_factorises_with_ours(report: Any) -> None:
    """hivemind's own class, with a first Q of its own: both get the same matrices."""
    assert report["plain"] == [2, 2]
    assert report["apart"] < 1e-4


def test_the_trainer_multiplies_for_its_averager(report: Any) -> None:
    """As on a GPU; only the place of the dense matrices differs."""
    assert report["served"] < 1e-5
    elsewhere, here = report["owed in the trainer's process"]
    assert elsewhere == 0 < here
    assert report["threads"] == [], "they end with their averagers"


if __name__ == "__main__":
    print(MARK + json.dumps(play()), flush=True)
