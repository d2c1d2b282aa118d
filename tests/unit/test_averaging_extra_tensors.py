"""Extra tensors: averaged ones, those of each peer alone, and those of a joining peer."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hivemind.compression import (
    CompressionInfo,
    Float16Compression,
    TensorRole,
    Uniform8BitQuantization,
    deserialize_torch_tensor,
)
from hivemind.proto import runtime_pb2
from hivemind.utils import MSGPackSerializer

from rayhive.averaging.averager import MeasuredAverager
from rayhive.averaging.extra_tensors import ExtraTensors, FloatsOnly
from rayhive.averaging.round_filter import detached
from rayhive.averaging.state_averager import RayhiveStateAverager
from tests.unit.averaging_fakes import PEER

#: What the others have on average.
THEIRS = 5.0
OWN = [torch.tensor(7), torch.tensor([True, False]), torch.arange(3, dtype=torch.int32)]


def module() -> Any:
    """Return a module with buffers of many kinds; batch norm alone has three."""
    made = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    for number, tensor in enumerate(OWN):
        made.register_buffer(f"own{number}", tensor.clone())
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        made.register_buffer("of_" + str(dtype)[6:], torch.ones(2, 2, dtype=dtype).T)
    made.register_buffer("scalar", torch.tensor(1.0))
    return made


def averager(parts: Any, offload: bool, **options: Any) -> Any:
    def optimizer(groups: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(groups, lr=1.0)

    parameters = list(parts.parameters())
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    made = RayhiveStateAverager(
        dht=SimpleNamespace(client_mode=False, peer_id=PEER),
        prefix="run",
        optimizer=optimizer if offload else optimizer(parameters),
        params=parameters if offload else None,
        extra_tensors=list(parts.buffers()),
        initialize_optimizer=False,
        offload_optimizer=offload,
        custom_gradients=offload,
        start=False,
        **options,
    )
    made.get_group_bits = lambda: ""  # its process, which does not run here, is asked for them
    return made


class Control(Future):  # type: ignore[type-arg]
    """A round with others, whose averages are there as soon as it begins."""

    triggered = False

    def __init__(self, of: Any, error: Exception | None) -> None:
        super().__init__()
        self._of, self._error = of, error

    def allow_allreduce(self) -> None:
        with torch.no_grad(), self._of.get_tensors() as tensors:
            for tensor in tensors:
                assert (tensor.dtype, tensor.device.type) == (torch.float32, "cpu")
                tensor.fill_(THEIRS)
        if self._error is None:
            self.set_result({})
        else:
            self.set_exception(self._error)


def run_round(made: Any, delayed: bool, error: Exception | None = None) -> None:
    made.step(
        increment_epoch=True,
        optimizer_step=True,
        averaging_round=True,
        delay_averaging=delayed,
        averaging_control=Control(made, error),
    )
    made.step(wait_for_delayed_updates=True)


@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("offload", [False, True])
def test_only_floating_point_extra_tensors_are_averaged(offload: bool, delayed: bool) -> None:
    parts = module()
    made = averager(parts, offload)
    for _ in range(2):
        parts(torch.randn(4, 2))
        run_round(made, delayed)
        for name, buffer in parts.named_buffers():
            if buffer.is_floating_point():
                assert bool((buffer == THEIRS).all()), name
    assert all(map(torch.equal, (parts.own0, parts.own1, parts.own2), OWN))
    assert int(parts[1].num_batches_tracked) == 2
    assert all(bool((parameter == THEIRS).all()) for parameter in parts.parameters())
    made.step_executor.shutdown()


@pytest.mark.parametrize("offload", [False, True])
def test_extra_tensors_that_are_averaged_elsewhere_are_only_served(offload: bool) -> None:
    parts = module()
    floats = [buffer for buffer in parts.buffers() if buffer.is_floating_point()]
    before = {name: buffer.clone() for name, buffer in parts.named_buffers()}
    made = averager(parts, offload, elsewhere=floats[1:])
    run_round(made, delayed=False)
    for name, buffer in parts.named_buffers():
        if buffer is floats[0]:
            assert bool((buffer == THEIRS).all()), name
        else:
            assert torch.equal(buffer, before[name]), name
    assert len(made.get_current_state()[1]) == len(list(parts.parameters())) + len(before)
    made.step_executor.shutdown()


def test_a_failed_round_leaves_the_extra_tensors_of_an_offloaded_optimizer() -> None:
    parts = module()
    before = {name: buffer.clone() for name, buffer in parts.named_buffers()}
    run_round(averager(parts, offload=True), delayed=False, error=RuntimeError("no network"))
    assert all(torch.equal(buffer, before[name]) for name, buffer in parts.named_buffers())


@pytest.mark.parametrize("offload", [False, True])
def test_a_joining_peer_takes_over_all_extra_tensors(
    offload: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, joiner = module(), module()
    with torch.no_grad():
        for buffer in source.buffers():
            buffer.copy_(torch.ones_like(buffer) * 3)
    source.own0.fill_(2**40 + 1)  # float32 has no such number
    metadata, tensors, infos = averager(source, offload).get_current_state()
    taking = averager(joiner, offload, state_compression=Float16Compression())
    sent = [
        taking.state_compression.compress(tensor, info)
        for tensor, info in zip(tensors, infos, strict=True)
    ]
    state = ({**metadata, "epoch": 1}, [deserialize_torch_tensor(each) for each in sent])
    monkeypatch.setattr(MeasuredAverager, "load_state_from_peers", lambda *_, **__: state)
    taking.load_state_from_peers()
    for (name, theirs), ours in zip(source.named_buffers(), joiner.buffers(), strict=True):
        assert torch.equal(theirs, ours) and theirs.dtype == ours.dtype, name


@pytest.mark.parametrize("tensor", [*OWN, torch.ones(3, dtype=torch.bfloat16)], ids=str)
def test_a_lossy_codec_gets_only_types_that_it_accepts(tensor: torch.Tensor) -> None:
    codec = FloatsOnly(Float16Compression())
    info = CompressionInfo.from_tensor(tensor, role=TensorRole.PARAMETER)
    assert torch.equal(deserialize_torch_tensor(codec.compress(tensor, info)), tensor)
    floats = torch.randn(8)
    info = CompressionInfo.from_tensor(floats, role=TensorRole.PARAMETER)
    assert len(codec.compress(floats, info).buffer) == 16


@pytest.mark.parametrize("role", [TensorRole.OPTIMIZER, TensorRole.UNSPECIFIED])
def test_a_downloaded_state_has_its_statistics_without_loss(role: TensorRole) -> None:
    """A second moment below 3e-8 became 0, so that the first step was 30 times too long."""
    variance = torch.full((4,), 1e-9)
    info = CompressionInfo.from_tensor(variance, role=role)
    made = averager(module(), offload=False, state_compression=Float16Compression())
    sent = made.state_compression.compress(variance, info)
    assert torch.equal(deserialize_torch_tensor(sent), variance)
    made.step_executor.shutdown()


def test_extra_tensors_are_averaged_without_loss_and_do_not_count_in_the_norm() -> None:
    """In 8 bits, the variance of a dead channel beside larger ones could become negative."""
    parts = module()
    parts[1].running_var[:] = torch.tensor([1e-4, 1e18])
    made = averager(parts, offload=False, compression=Uniform8BitQuantization())
    compression = made.allreduce_kwargs["compression"]
    with made.get_tensors() as tensors:
        for tensor, info in zip(tensors, made.tensor_infos, strict=True):
            message = compression.compress(tensor.float(), info)
            as_it_is = message.compression == runtime_pb2.NONE
            assert as_it_is == (info.role != TensorRole.PARAMETER)
        norm = torch.cat([tensor.reshape(-1) for tensor in tensors[:4]]).norm()
    dumps, loads = MSGPackSerializer.dumps, MSGPackSerializer.loads
    data = asyncio.run(made.rounds.announced(dumps([None, 0, dumps([4])])))
    _, announcement = detached(loads(data)[2])
    assert announcement is not None
    assert announcement.norm == pytest.approx(float(norm), rel=1e-5)
    made.step_executor.shutdown()


def test_masks_are_counted_from_the_end_of_a_state() -> None:
    mask = torch.full((2, 2), -torch.inf)
    tensors = [torch.ones(2), mask, torch.tensor(3), torch.full((2,), 1e38)]
    assert ExtraTensors(tensors).masks() == {1, 3}
