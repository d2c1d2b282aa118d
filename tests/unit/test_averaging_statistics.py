"""Optimizer statistics: which are averaged, how they are filtered, and how a state is loaded."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hivemind.compression import TensorRole, deserialize_torch_tensor
from hivemind.proto import runtime_pb2
from hivemind.utils import MSGPackSerializer

from rayhive.averaging.optimizer_statistics import averageable, kept_in_place
from rayhive.averaging.round_filter import detached
from rayhive.averaging.state_averager import RayhiveStateAverager
from rayhive.errors import ConfigError
from rayhive.optim.local_rule import LocalStepsRule
from rayhive.registry import CODECS
from tests.unit.averaging_fakes import PEER


def stepped(kind: Any, **options: Any) -> torch.optim.Optimizer:
    """Return an optimizer of two parameters after one step."""
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(2, 3)), torch.nn.Parameter(torch.randn(4))]
    optimizer: torch.optim.Optimizer = kind(parameters, lr=0.1, **options)
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize(
    ("kind", "options", "expected"),
    [
        (torch.optim.SGD, {}, ()),
        (torch.optim.SGD, {"momentum": 0.9}, ("momentum_buffer",)),
        (torch.optim.Adam, {}, ("exp_avg", "exp_avg_sq", "step")),
        (torch.optim.Adam, {"amsgrad": True}, ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step")),
        (torch.optim.Adagrad, {}, ("step", "sum")),
    ],
)
def test_floating_statistics_are_averaged(
    kind: Any, options: dict[str, Any], expected: tuple[str, ...]
) -> None:
    assert averageable(stepped(kind, **options)) == expected


def test_a_statistic_that_a_parameter_lacks_is_not_averaged() -> None:
    optimizer = stepped(torch.optim.Adam)
    del optimizer.state[optimizer.param_groups[0]["params"][1]]["exp_avg"]
    assert averageable(optimizer) == ("exp_avg_sq", "step")


def test_quantised_statistics_are_not_averaged() -> None:
    optimizer = stepped(torch.optim.SGD)
    for parameter in optimizer.param_groups[0]["params"]:
        codes = torch.zeros(parameter.shape, dtype=torch.uint8)
        optimizer.state[parameter] = {"codes": codes, "scale": torch.ones(1)}
    assert averageable(optimizer) == ()
    resumed: Any = optimizer.state
    resumed["local_epoch"] = 7  # of the checkpoint of a swarm
    assert averageable(optimizer) == ()
    rule = LocalStepsRule(4, 0.7, 0.9, inner_state="average")
    with pytest.raises(ConfigError, match=r"inner_state: 'average' .* of SGD are quantised"):
        rule.outer_arguments(optimizer=optimizer, target_batch_size=32)


def test_a_loaded_state_fills_the_tensors_that_are_there() -> None:
    optimizer, other = stepped(torch.optim.Adam), stepped(torch.optim.Adam)
    other.step()
    before = [state["exp_avg"] for state in optimizer.state.values()]
    with kept_in_place(optimizer):
        optimizer.load_state_dict(other.state_dict())
    after = list(optimizer.state.values())
    expected = list(other.state.values())
    for old, new, wanted in zip(before, after, expected, strict=True):
        assert new["exp_avg"] is old and torch.equal(old, wanted["exp_avg"])
        assert float(new["step"]) == 2.0


def averager(all_statistics: bool, **options: Any) -> Any:
    """Return a state averager of Adam without a process."""
    dht: Any = SimpleNamespace(client_mode=False, peer_id=PEER)
    return RayhiveStateAverager(
        dht=dht,
        prefix="test",
        start=False,
        optimizer=stepped(torch.optim.Adam),
        all_statistics=all_statistics,
        **options,
    )


@pytest.mark.parametrize(
    ("options", "statistics"),
    [
        ({"all_statistics": False}, 0),
        ({"all_statistics": True}, 6),
        ({"all_statistics": True, "average_opt_statistics": ("exp_avg",)}, 2),
    ],
)
def test_statistics_are_averaged_with_the_parameters(
    options: dict[str, Any], statistics: int
) -> None:
    made = averager(**options)
    roles = [info.role for info in made.tensor_infos]
    assert roles == [TensorRole.PARAMETER] * 2 + [TensorRole.OPTIMIZER] * statistics
    with made.get_tensors() as tensors:
        assert len(tensors) == len(roles)
    assert made.settled_parameters() == made.optimizer.param_groups[0]["params"]


@pytest.mark.parametrize("codec", ["float16", "uniform8"])
def test_statistics_are_sent_without_loss(codec: str) -> None:
    """Small second moments would become zero or negative."""
    made = averager(all_statistics=True, compression=CODECS.get(codec)().build())
    compression = made.allreduce_kwargs["compression"]
    types: dict[TensorRole, set[int]] = {}
    with made.get_tensors() as tensors:
        for tensor, info in zip(tensors, made.tensor_infos, strict=True):
            message = compression.compress(tensor, info)
            types.setdefault(info.role, set()).add(message.compression)
            if info.role == TensorRole.OPTIMIZER:
                assert torch.equal(deserialize_torch_tensor(message), tensor)
    assert types[TensorRole.OPTIMIZER] == {runtime_pb2.NONE}
    assert runtime_pb2.NONE not in types[TensorRole.PARAMETER]


@pytest.mark.parametrize(("value", "finite"), [(1e6, True), (float("nan"), False)])
def test_only_the_finiteness_of_statistics_is_judged(value: float, finite: bool) -> None:
    """A counter of steps may be much larger than all parameters."""
    made = averager(all_statistics=True)
    with made.get_tensors() as tensors:
        parameters = torch.cat([tensor.reshape(-1) for tensor in tensors[:2]]).norm()
        tensors[-1].fill_(value)
    dumps, loads = MSGPackSerializer.dumps, MSGPackSerializer.loads
    data = asyncio.run(made.rounds.announced(dumps([None, 0, dumps([4])])))
    _, announcement = detached(loads(data)[2])
    assert announcement is not None
    if finite:
        assert announcement.norm == pytest.approx(float(parameters), rel=1e-6)
    else:
        assert announcement.norm != announcement.norm
