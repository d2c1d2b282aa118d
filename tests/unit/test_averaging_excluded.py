"""Tensors of a peer that its group excluded, in rounds that succeed and rounds that fail."""

from __future__ import annotations

import asyncio
import math
import pickle
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rayhive.averaging.averager import MeasuredAverager
from rayhive.averaging.round_filter import ExcludedRoundFailed
from rayhive.averaging.state_averager import RayhiveStateAverager
from rayhive.averaging.steps import StepTrace
from tests.unit.averaging_fakes import PEER, announced_group

#: The average of the others.
THEIRS = 2.0


def offloaded(values: Iterable[float]) -> Any:
    """Return a state averager whose optimizer steps on the tensors that are averaged."""
    parameters = [torch.nn.Parameter(torch.full((3,), value)) for value in values]
    return RayhiveStateAverager(
        dht=SimpleNamespace(client_mode=False, peer_id=PEER),
        prefix="run",
        optimizer=lambda groups: torch.optim.SGD(groups, lr=1.0),
        params=parameters,
        initialize_optimizer=False,
        offload_optimizer=True,
        custom_gradients=True,
        start=False,
    )


def run_round(averager: Any, monkeypatch: Any, norm: float, trouble: str | None) -> Any:
    """Average with the other peer; the all-reduce may fail between two tensors, or miss one."""

    async def allreduce(
        self: Any, tensors: Any, group_info: Any, key: bytes, **options: Any
    ) -> None:
        assert options["weight"] == 0.0
        assert all(bool(tensor.isfinite().all()) for tensor in tensors), "they are sent"
        for number, tensor in enumerate(tensors):
            if number and trouble == "fails":
                raise RuntimeError("the network is gone")
            if not number or trouble != "partial":
                tensor.add_(THEIRS - tensor)
        self.groups.running[key] = future = asyncio.get_running_loop().create_future()
        future.set_result(SimpleNamespace(got_everything=trouble != "partial"))

    monkeypatch.setattr(MeasuredAverager, "_run_allreduce_inplace_", allreduce)
    averager.cancellations = SimpleNamespace(send=lambda *_: None)
    return asyncio.run(
        averager.rounds.run(averager, announced_group(norm, 1.0), StepTrace(), weight=1.0)
    )


def parameters_of(averager: Any) -> list[float]:
    (group_,) = averager.optimizer.param_groups
    return [float(parameter.detach()[0]) for parameter in group_["params"]]


@pytest.mark.parametrize("trouble", ["fails", "partial"])
@pytest.mark.parametrize("own", [math.nan, 1000.0])
def test_a_failed_round_leaves_the_parameters_of_an_excluded_peer(
    monkeypatch: pytest.MonkeyPatch, own: float, trouble: str
) -> None:
    averager = offloaded([own, own])
    with pytest.raises(ExcludedRoundFailed) as failed:
        run_round(averager, monkeypatch, norm=own, trouble=trouble)
    arrived = pickle.loads(pickle.dumps(failed.value))  # as in the trainer's process
    assert [refusal["offender"] for refusal in arrived.rejected] == [str(PEER)]
    # as they were: zeros would pass for parameters, and count in full in the next round
    assert parameters_of(averager) == pytest.approx([own, own], nan_ok=True)


@pytest.mark.parametrize("own", [math.nan, 1000.0])
def test_an_excluded_peer_takes_over_the_average_of_the_other_peers(
    monkeypatch: pytest.MonkeyPatch, own: float
) -> None:
    averager = offloaded([own, own])
    assert run_round(averager, monkeypatch, norm=own, trouble=None).excluded
    assert parameters_of(averager) == [THEIRS, THEIRS]
