"""Copies of a model that an averager holds, counted in pages."""

from __future__ import annotations

import asyncio
import gc
import mmap
import os
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hivemind.compression import CompressionInfo, NoCompression

from rayhive.averaging.answers import Answers
from rayhive.averaging.gradient_averager import RayhiveGradientAverager, accumulated
from rayhive.averaging.state_averager import RayhiveStateAverager
from rayhive.averaging.tensor_memory import drop_inherited, empty_shared
from rayhive.averaging.tensor_parts import TensorParts, balanced_partition
from rayhive.averaging.tensor_summary import Sketcher
from rayhive.compression.powersgd.factors import Factors
from rayhive.compression.shares import reducer_shares
from rayhive.optim.gradient_rounds import OwnGradients
from tests.pages import held, whole_pages
from tests.unit.averaging_fakes import PEER, unstarted

#: Elements of the parameters: whole pages and a rest.
SIZES = (5000, 70_001)
MODEL = 4 * sum(SIZES)
DHT: Any = SimpleNamespace(client_mode=False, peer_id=PEER)


def size(tensors: Any) -> int:
    """Return the bytes of tensors that are distinct in memory."""
    found = {tensor.data_ptr(): tensor for tensor in tensors}
    return sum(tensor.numel() * tensor.element_size() for tensor in found.values())


def state_averager(**options: Any) -> Any:
    """Return a state averager of Adam without a process, after one step of the optimizer."""
    parameters = [torch.nn.Parameter(torch.ones(count)) for count in SIZES]
    optimizer = torch.optim.Adam(parameters, lr=0.1)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    options = {"optimizer": optimizer, "dht": DHT, "prefix": "run", "start": False, **options}
    return RayhiveStateAverager(**options)


def across_pages(count: int) -> torch.Tensor:
    """Return ones whose first and last element share their page with other objects."""
    page = mmap.PAGESIZE // 4
    ones = torch.ones(count + 2 * page)
    begin = -ones.data_ptr() // 4 % page + 16
    assert (begin + count) % page
    return ones[begin : begin + count]


def pages_of(averager: Any) -> list[range]:
    with averager.get_tensors() as tensors:
        return [whole_pages(tensor) for tensor in tensors]


class Averaging:
    """Averaging under way, which doubles the tensors of an averager.

    Args:
        averager: The averager.
    """

    triggered = False

    def __init__(self, averager: Any) -> None:
        self._averager = averager
        self.held = 0

    def done(self) -> bool:
        return False

    def cancel(self) -> None:
        pass

    def allow_allreduce(self) -> None:
        with torch.no_grad(), self._averager.get_tensors() as tensors:
            for tensor in tensors:
                tensor.mul_(2)
        self.held = held(pages_of(self._averager))

    def result(self, timeout: float | None = None) -> dict[Any, Any]:
        return {PEER: None}


def test_an_averager_of_parameters_holds_a_copy_of_parameters_and_statistics() -> None:
    """Two counters of steps have four bytes each."""
    with state_averager(all_statistics=True).get_tensors() as tensors:
        assert size(tensors) == 3 * MODEL + 2 * 4
        assert all(tensor.is_shared() for tensor in tensors)


def test_copies_of_parameters_take_memory_during_an_averaging_only() -> None:
    averager = state_averager(all_statistics=True)
    pages = pages_of(averager)
    assert held(pages) == 0
    averaging = Averaging(averager)
    before = [parameter.detach().clone() for parameter in averager.main_parameters]
    averager.step(averaging_round=True, averaging_control=averaging)
    assert averaging.held == sum(map(len, pages))
    assert held(pages) == 0
    for parameter, value in zip(averager.main_parameters, before, strict=True):
        assert torch.equal(parameter, 2 * value)


def test_copies_that_are_averaged_by_schedule_stay() -> None:
    averager = state_averager(all_statistics=False)
    pages = pages_of(averager)
    averager.step(averaging_round=True, averaging_control=Averaging(averager))
    assert held(pages) == sum(map(len, pages)) > 0


def test_a_step_that_fails_before_its_averaging_changes_no_parameter() -> None:
    averager = state_averager(all_statistics=True)
    expected = [parameter.detach().clone() for parameter in averager.main_parameters]

    def fail(*_: Any) -> None:
        raise ValueError("a hook of the user")

    averager.optimizer.register_step_pre_hook(fail)
    averager.step(optimizer_step=True, averaging_round=True, averaging_control=Averaging(averager))
    for parameter, value in zip(averager.main_parameters, expected, strict=True):
        assert torch.equal(parameter, value)


@pytest.mark.parametrize(("reuse", "copies"), [(False, 1), (True, 0)])
def test_an_averager_of_gradients_holds_one_copy_besides_its_accumulators(
    reuse: bool, copies: int
) -> None:
    averager = unstarted(
        RayhiveGradientAverager, [(count,) for count in SIZES], reuse_grad_buffers=reuse
    )
    sums, _ = accumulated(averager)
    gradients = [parameter.grad for parameter in averager.parameters]
    with averager.get_tensors() as tensors:
        assert size(tensors) == MODEL
        assert size([*sums, *gradients]) == (1 + copies) * MODEL


@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("delayed", [False, True])
def test_own_gradients_are_copied_where_accumulators_change_in_the_round(
    delayed: bool, reuse: bool
) -> None:
    averager = unstarted(
        RayhiveGradientAverager, [(count,) for count in SIZES], reuse_grad_buffers=reuse
    )
    averager.expect_batch(4)
    for parameter in averager.parameters:
        parameter.grad.fill_(3.0)
    averager.accumulate_grads_(4)
    sums, _ = accumulated(averager)
    own = OwnGradients.of(averager, delayed)
    assert size([*own.sums, *sums]) == (2 if delayed or reuse else 1) * MODEL
    averager.reset_accumulated_grads_()
    if delayed:
        averager.accumulate_grads_(4)
        averager.accumulate_grads_(4)
    with averager.get_tensors() as tensors:
        own.load(tensors)
        assert all(bool((tensor == 3.0).all()) for tensor in tensors)


def test_an_average_is_dropped_when_every_sender_has_it() -> None:
    async def ask() -> None:
        tensors = [torch.ones(8)]
        infos, codec = [CompressionInfo.from_tensor(tensors[0])], NoCompression()
        partition = balanced_partition(tensors, infos, codec, reducer_shares([None]))
        parts = TensorParts(tensors, partition, compression=codec, infos=infos)
        answers = Answers(parts, 0, [2.0], senders=2)
        average = torch.ones(8)
        gone = weakref.ref(average)
        first = await answers.encoded(0, average)
        assert first is await answers.encoded(0, average)
        del average, first
        gc.collect()
        assert gone() is None

    asyncio.run(ask())


def test_a_child_gives_back_pages_of_its_parents_tensors() -> None:
    """The pages at both ends are shared with other objects and stay."""
    tensor, shared = across_pages(SIZES[1]), torch.ones(SIZES[1]).share_memory_()
    pages, common = whole_pages(tensor), whole_pages(shared)
    assert held([pages]) == len(pages)
    child = os.fork()
    if not child:
        drop_inherited([tensor, shared])
        left = held([pages])
        kept, rest = shared.numpy(), tensor.numpy()  # threads of torch do not survive a fork
        os._exit(0 if kept.all() and rest[0] == 1 == rest[-1] and not left else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert held([pages]) == len(pages)
    assert held([common]) == len(common)
    assert bool((tensor == 1).all())


def test_a_child_averages_in_32_bits_whatever_the_default_of_its_parent() -> None:
    """With 64 bits, scales of codes had 8 bytes, and no part could be decoded."""
    torch.set_default_dtype(torch.float64)
    try:
        child = os.fork()
        if not child:
            drop_inherited([])
            os._exit(torch.get_default_dtype() != torch.float32)
        assert os.waitpid(child, 0)[1] == 0
        summary = Sketcher([8])([torch.ones(8)])
        grads = [torch.zeros(8, 8)]
        stack = Factors(grads, 1, seed=0, orthogonalise=lambda p: p, device=torch.device("cpu"))
        assert summary.dtype == torch.float32
        assert {q.dtype for q in stack.qs} == {torch.float32}
    finally:
        torch.set_default_dtype(torch.float32)


def test_shared_tensors_are_empty_until_they_are_written_to() -> None:
    shared, private = torch.ones(SIZES[1]).share_memory_(), torch.ones(SIZES[1])
    pages = whole_pages(shared)
    empty_shared([shared, private, torch.ones(3).share_memory_()])
    assert held([pages]) == 0
    assert bool((private == 1).all())
    assert not shared[2000:-2000].any()
    shared.fill_(2)
    assert held([pages]) == len(pages)
    assert bool((shared == 2).all())
