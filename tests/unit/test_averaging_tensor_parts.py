"""Parts of one peer's tensors: cut, encoded, decoded and replaced by averages."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hivemind.averaging.partition import AllreduceException, TensorPartContainer
from hivemind.compression import CompressionInfo
from hypothesis import given, settings
from hypothesis import strategies as st

from rayhive.averaging.tensor_parts import TensorParts, balanced_partition, partition_of
from rayhive.compression.kernels import install
from rayhive.compression.shares import reducer_shares
from rayhive.registry import CODECS

SHAPES = [(64, 50), (7,), (0,), (), (3, 0), (12_000,), (1,), (40, 3)]
PEERS = 3
CODEC_NAMES = [name for name in CODECS.names() if CODECS.get(name).available()]


def codec(name: str) -> Any:
    kind = CODECS.get(name)()
    return kind.build(1000 if kind.uses_threshold else None)


def made(
    shapes: list[tuple[int, ...]] = SHAPES,
    name: str = "none",
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> TensorParts:
    generator = torch.Generator().manual_seed(1)
    tensors = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    infos = [CompressionInfo.from_tensor(each, key=at) for at, each in enumerate(tensors)]
    built = codec(name)
    found = balanced_partition(tensors, infos, built, reducer_shares([None] * PEERS))
    return TensorParts(tensors, found, compression=built, infos=infos, **options)


def indices(parts: TensorParts) -> list[tuple[int, int]]:
    return [(peer, at) for peer, count in enumerate(parts.num_parts_by_peer) for at in range(count)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", CODEC_NAMES)
def test_a_message_holds_the_value_of_its_part(name: str, dtype: torch.dtype) -> None:
    parts = made(name=name, dtype=dtype)
    error = norm = 0.0
    for peer, index in indices(parts):
        part = parts.part(peer, index).float()
        got = parts.decoded(peer, index, parts.encoded(peer, index, part.to(dtype)))
        assert got.shape == part.shape == (parts.elements(peer)[index],)
        error += float((got.float() - part).square().sum())
        norm += float(part.square().sum())
    assert error**0.5 <= (CODECS.get(name).relative_error + 1e-6) * norm**0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", CODEC_NAMES)
def test_the_error_of_each_part_that_leaves_is_owed(
    monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype
) -> None:
    for key, kind in install.table().items():  # a decoder of hivemind changes the message
        monkeypatch.setitem(install.KNOWN, key, kind)
    weight, owed = 3.0, [torch.zeros(shape) for shape in SHAPES]
    parts = made(name=name, dtype=dtype, owed=owed, weight=weight)
    before = [tensor.clone().float() for tensor in parts.local_tensors]

    async def body() -> None:
        for peer in range(PEERS):
            leaving = [part async for part in parts.iterate_input_parts_for(peer)]
            for index, part in enumerate(leaving):
                parts.register_processed_part(peer, index, parts.decoded(peer, index, part))

    asyncio.run(body())
    largest = max(float(tensor.abs().max()) for tensor in before if tensor.numel())
    rounding = weight * torch.finfo(dtype).eps * largest
    for debt, old, new in zip(owed, before, parts.local_tensors, strict=True):
        assert torch.allclose(debt, weight * (old - new.float()), rtol=0.0, atol=2 * rounding)
    is_lossy = CODECS.get(name).relative_error > 0
    if not is_lossy or dtype == torch.float32:
        assert any(bool(debt.any()) for debt in owed) == is_lossy


def test_each_segment_is_encoded_by_itself() -> None:
    """A small tensor beside one of another scale keeps its precision."""
    shapes = [(400,), (400,)]
    parts = made(shapes, "uniform8")
    large, small = parts.local_tensors
    large.mul_(1e6)
    ((peer, index),) = indices(parts)
    got = parts.decoded(peer, index, parts.encoded(peer, index, parts.part(peer, index)))
    assert (got[400:] - small).norm() <= 0.05 * small.norm()


def test_averages_replace_the_parts_and_a_failed_reducer_leaves_its_own() -> None:
    async def body() -> None:
        parts = made()
        before = [tensor.clone() for tensor in parts.local_tensors]
        averaged = torch.zeros(parts.total_size, dtype=torch.bool)
        for peer, index in indices(parts):
            if peer != 1:
                parts.register_processed_part(peer, index, parts.part(peer, index) + 1)
        with pytest.raises(ValueError, match="got the average of part"):
            parts.register_processed_part(1, 1, parts.part(1, 0))
        parts.register_failed_reducer(1)
        assert parts.failed_size == sum(parts.elements(1))
        shapes = [tensor.shape async for tensor in parts.iterate_output_tensors()]
        assert shapes == [tensor.shape for tensor in before]
        changed = torch.cat([t.flatten() for t in parts.local_tensors])
        averaged = changed == torch.cat([t.flatten() for t in before]) + 1
        assert int(averaged.sum()) == parts.total_size - parts.failed_size
        kept = changed == torch.cat([t.flatten() for t in before])
        assert bool((averaged | kept).all())

    asyncio.run(body())


def test_a_part_of_the_way_to_the_average() -> None:
    parts = made(alpha=0.25)
    before = parts.part(0, 0).clone()
    parts.register_processed_part(0, 0, before + 1)
    torch.testing.assert_close(parts.part(0, 0), before + 0.25)


def test_the_end_of_an_all_reduce_ends_the_wait_for_averages() -> None:
    async def body() -> None:
        parts = made()
        waiting = asyncio.ensure_future(anext(parts.iterate_output_tensors()))
        await asyncio.sleep(0)
        parts.finalize()
        with pytest.raises(AllreduceException, match="ended"):
            await waiting
        before = parts.part(0, 0).clone()
        parts.register_processed_part(0, 0, before + 1)
        assert torch.equal(parts.part(0, 0), before), "too late"

    asyncio.run(body())


def test_a_message_that_does_not_fit_is_refused() -> None:
    parts = made([(40,), (50,), (30_000,)])
    small = next(at for at in indices(parts) if parts.elements(at[0])[at[1]] >= 90)
    message = parts.encoded(*small, parts.part(*small))
    for wrong in (
        replace(message, size=(*message.size, 0)),
        replace(message, buffer=message.buffer[:-4]),
        replace(message, dtype="0:float32"),
    ):
        with pytest.raises((AllreduceException, ValueError)):
            parts.decoded(*small, wrong)
    large = next(at for at in indices(parts) if parts.elements(at[0])[at[1]] > 1000)
    message = parts.encoded(*large, parts.part(*large))
    for wrong in (
        replace(message, size=(1, *message.size)),  # it would be added by broadcasting
        replace(message, size=(10**12,)),  # memory of that size
        replace(message, dtype="int32"),
    ):
        with pytest.raises((AllreduceException, ValueError)):
            parts.decoded(*large, wrong)
    with pytest.raises(AllreduceException, match="got part 99"):
        parts.decoded(0, 99, message)


@settings(max_examples=50)
@given(
    shapes=st.lists(
        st.lists(st.integers(0, 40), max_size=3).map(tuple).filter(lambda s: math.prod(s) < 9000),
        min_size=1,
        max_size=8,
    ),
    fractions=st.lists(st.sampled_from([0.0, 0.2, 1.0]), min_size=1, max_size=4).filter(any),
    part_size=st.sampled_from([64, 1000, 2**19]),
    name=st.sampled_from(["none", "uniform8"]),
)
def test_a_group_with_members_of_hivemind_has_hiveminds_parts(
    shapes: list[tuple[int, ...]], fractions: list[float], part_size: int, name: str
) -> None:
    tensors = [torch.arange(float(math.prod(shape))).reshape(shape) for shape in shapes]
    infos = [CompressionInfo.from_tensor(each, key=at) for at, each in enumerate(tensors)]
    theirs = TensorPartContainer(
        tensors, fractions, compression=codec(name), tensor_infos=infos, part_size_bytes=part_size
    )
    ours = TensorParts(tensors, partition_of(theirs), compression=codec(name), infos=infos)

    async def messages(container: Any) -> list[bytes]:
        peers = [container.iterate_input_parts_for(peer) for peer in range(len(fractions))]
        return [bytes(message.buffer) for each in peers async for message in each]

    assert ours.num_parts_by_peer == theirs.num_parts_by_peer
    assert asyncio.run(messages(ours)) == asyncio.run(messages(theirs))
    theirs.finalize()
