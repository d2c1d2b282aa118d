"""Codecs against hivemind's: the intended differences, and equal bytes otherwise."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from hivemind.compression import (
    CompressionBase,
    CompressionInfo,
    Float16Compression,
    Quantile8BitQuantization,
    ScaledFloat16Compression,
    Uniform8BitQuantization,
    deserialize_torch_tensor,
    quantization,
    serialize_torch_tensor,
)
from hivemind.proto import runtime_pb2
from hypothesis import given
from hypothesis import strategies as st

from rayhive.compression.kernels import eight_bit, half, install

pytestmark = pytest.mark.usefixtures("loops_of_both_kinds")

PAIRS = [
    (half.HalfPrecision, Float16Compression),
    (half.ScaledHalfPrecision, ScaledFloat16Compression),
    (eight_bit.UniformEightBit, Uniform8BitQuantization),
    (eight_bit.QuantileEightBit, Quantile8BitQuantization),
]
UNIFORM = eight_bit.UniformEightBit
pairs = pytest.mark.parametrize(("ours", "theirs"), PAIRS)


def encoded(codec: CompressionBase, tensor: torch.Tensor, **options: bool) -> runtime_pb2.Tensor:
    return codec.compress(tensor, CompressionInfo.from_tensor(tensor), **options)


def through(codec: CompressionBase, tensor: torch.Tensor, **options: bool) -> torch.Tensor:
    return deserialize_torch_tensor(encoded(codec, tensor, **options))


@pytest.fixture
def plain_table() -> Iterator[None]:
    """Restore hivemind's table and thread pool."""
    table, executor = dict(install.KNOWN), quantization.EXECUTOR
    yield
    install.KNOWN.update(table)
    quantization.EXECUTOR = executor


@pytest.mark.parametrize(("ours", "theirs"), [pair for pair in PAIRS if pair[0] is not UNIFORM])
@given(
    elements=st.integers(2, 4000),
    seed=st.integers(0, 1000),
    scale=st.sampled_from([1e-4, 1e-2, 1.0, 30.0]),
    power=st.sampled_from([1, 3]),
)
def test_ordinary_parts_have_hiveminds_bytes(
    ours: Callable[[], CompressionBase],
    theirs: Callable[[], CompressionBase],
    elements: int,
    seed: int,
    scale: float,
    power: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    part = (torch.randn(elements, generator=generator) ** power) * scale
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's quantiser, which theirs uses, is deprecated
        assert encoded(ours(), part) == encoded(theirs(), part)


@given(
    elements=st.integers(2, 4000),
    seed=st.integers(0, 1000),
    scale=st.sampled_from([1e-4, 1e-2, 1.0, 30.0]),
    power=st.sampled_from([1, 3]),
)
def test_uniform_parts_have_hiveminds_header_and_nearly_its_buckets(
    elements: int, seed: int, scale: float, power: int
) -> None:
    """Mean and deviation may differ in their last bits, and a bucket by one at a border."""
    generator = torch.Generator().manual_seed(seed)
    part = (torch.randn(elements, generator=generator) ** power) * scale
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        messages = [encoded(codec, part) for codec in (UNIFORM(), Uniform8BitQuantization())]
    buffers = [message.buffer for message in messages]
    assert len(buffers[0]) == len(buffers[1])
    assert buffers[0][:8] == buffers[1][:8]
    for message in messages:
        message.ClearField("buffer")
    assert messages[0] == messages[1]
    ours, theirs = (np.frombuffer(buffer, np.uint8, offset=1032).astype(int) for buffer in buffers)
    assert np.abs(ours - theirs).max() <= 1
    assert (ours != theirs).sum() <= 1 + elements // 1000


def test_infinities_stay_infinite_in_half_precision() -> None:
    part = torch.tensor([1.0, torch.inf, -torch.inf, 1e6, torch.nan])
    assert through(Float16Compression(), part)[1] == 65504
    got = through(half.HalfPrecision(), part)
    assert got[:4].tolist() == [1.0, torch.inf, -torch.inf, 65504.0]
    assert got[4].isnan()


@pytest.mark.parametrize("codec", [half.HalfPrecision, half.ScaledHalfPrecision])
def test_sixteen_bit_codecs_take_bfloat16(codec: Callable[[], CompressionBase]) -> None:
    part = torch.randn(100, generator=torch.Generator().manual_seed(0)).bfloat16()
    with pytest.raises(ValueError, match="bfloat16"):
        through(Float16Compression(), part)
    got = through(codec(), part)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, part.float(), rtol=1e-3, atol=1e-3)


def test_scalars_pass_the_scaled_codec() -> None:
    with pytest.raises(IndexError):
        through(ScaledFloat16Compression(), torch.tensor(3.0))
    assert through(half.ScaledHalfPrecision(), torch.tensor(3.0)).item() == 3.0


def test_tiny_values_survive_the_scaled_codec() -> None:
    part = torch.tensor([1.0, -2.0, 3.0, -1.0]) * 1e-16
    assert not through(ScaledFloat16Compression(), part).allclose(part, rtol=1e-2, atol=0)
    assert through(half.ScaledHalfPrecision(), part).allclose(part, rtol=1e-2, atol=0)


@pytest.mark.parametrize(("ours", "theirs"), PAIRS[2:])
def test_empty_parts_pass_the_eight_bit_codecs(
    ours: Callable[[], CompressionBase], theirs: Callable[[], CompressionBase]
) -> None:
    with pytest.raises((ValueError, IndexError)):
        through(theirs(), torch.empty(0))
    assert through(ours(), torch.empty(0)).shape == (0,)


def test_uniform_quantisation_ignores_inplace_and_keeps_the_mean() -> None:
    """hivemind subtracts the mean in place and then builds its codebook without it."""
    part = torch.randn(500, generator=torch.Generator().manual_seed(1)) + 3
    assert through(Uniform8BitQuantization(), part.clone(), allow_inplace=True).mean().abs() < 0.1
    got = through(eight_bit.UniformEightBit(), part.clone(), allow_inplace=True)
    torch.testing.assert_close(got.mean(), part.mean())


def test_a_spread_beyond_float32_is_not_averaged_away() -> None:
    part = torch.tensor([1e30, -1e30, 2e30])
    assert through(Uniform8BitQuantization(), part).isfinite().all()  # 6.7e29 thrice
    assert through(eight_bit.UniformEightBit(), part).isnan().all()


@pytest.mark.parametrize("codec", [ours for ours, _ in PAIRS])
def test_decoding_works_with_numpy_that_refuses_to_convert_arrays_to_int(
    codec: Callable[[], CompressionBase],
) -> None:
    """``int`` of an array of one element is an error from numpy 2.4 on."""
    message = encoded(UNIFORM(), torch.arange(20.0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if tuple(map(int, np.__version__.split(".")[:2])) < (2, 4):
            with pytest.raises(DeprecationWarning):
                Uniform8BitQuantization().extract(message)
        codec().extract(encoded(codec(), torch.arange(20.0)))


def test_replies_use_our_codecs_once_installed(plain_table: None) -> None:
    """A reducer answers through hivemind's table; an infinite difference must not look finite."""
    difference = torch.tensor([torch.inf, 1.0])
    kind = runtime_pb2.CompressionType.FLOAT16
    assert deserialize_torch_tensor(serialize_torch_tensor(difference, kind))[0] == 65504
    install.install()
    assert deserialize_torch_tensor(serialize_torch_tensor(difference, kind))[0] == torch.inf
    for name, codec in install.table().items():
        assert runtime_pb2.CompressionType.Name(codec.compression_type) == name


def test_quantiles_have_threads_of_their_own_process(plain_table: None) -> None:
    before = quantization.EXECUTOR
    install.install()
    assert quantization.EXECUTOR is not before


@pytest.mark.parametrize("codec", [eight_bit.UniformEightBit, eight_bit.QuantileEightBit])
def test_a_codebook_that_is_too_short_is_an_error(codec: Callable[[], CompressionBase]) -> None:
    """No memory beyond its end is read."""
    whole = encoded(codec(), torch.linspace(-1, 1, 5000) ** 7)  # up to the last bucket
    length, entry = 255, 4
    rest = whole.buffer[8 + 256 * entry :]
    whole.buffer = np.int64(length).tobytes() + whole.buffer[8 : 8 + length * entry] + rest
    with pytest.raises((IndexError, RuntimeError)):
        codec().extract(whole)
