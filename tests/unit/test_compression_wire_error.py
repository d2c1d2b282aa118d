"""Our codecs and hivemind's understand each other, and ours lose no more."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hivemind.compression import (
    CompressionBase,
    CompressionInfo,
    Float16Compression,
    Quantile8BitQuantization,
    ScaledFloat16Compression,
    Uniform8BitQuantization,
)
from hivemind.proto import runtime_pb2

from rayhive.compression.kernels import eight_bit, half
from rayhive.compression.kernels.eight_bit import CHUNK

Make = Callable[[], CompressionBase]
pairs = pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (half.HalfPrecision, Float16Compression),
        (half.ScaledHalfPrecision, ScaledFloat16Compression),
        (eight_bit.UniformEightBit, Uniform8BitQuantization),
        (eight_bit.QuantileEightBit, Quantile8BitQuantization),
    ],
)
#: torch's quantiser, which hivemind uses, is deprecated; its decoders warn of read-only arrays.
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning"),
    pytest.mark.usefixtures("loops_of_both_kinds"),
]

#: By name, what is made of normal values: gradients, weights and what training does to them.
KINDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "normal": lambda x: x,
    "off centre": lambda x: x + 5,
    "far from zero": lambda x: 1 + 1e-4 * x,
    "heavy tails": lambda x: x / x.roll(1),
    "skewed": lambda x: (3 * x).exp(),
    "half zeros": lambda x: x.relu(),
    "few values": lambda x: x.round(),
    "sparse": lambda x: x * (x.roll(1) > 2),
    "tiny": lambda x: 1e-15 * x,
    "vanishing": lambda x: 1e-23 * x,
    "huge": lambda x: 1e15 * x,
    "constant": lambda x: torch.full_like(x, 0.1),
    "zero": torch.zeros_like,
}


def encoded(codec: CompressionBase, part: torch.Tensor) -> runtime_pb2.Tensor:
    return codec.compress(part, CompressionInfo.from_tensor(part))


def normal(elements: int) -> torch.Tensor:
    return torch.randn(elements, generator=torch.Generator().manual_seed(elements))


def error(codec: CompressionBase, part: torch.Tensor) -> float:
    """Return the L2 error over the L2 norm, or the error itself if the norm is zero."""
    got = codec.extract(encoded(codec, part.clone())).double()
    return float((got - part.double()).norm() / (part.double().norm() or 1.0))


@pairs
@pytest.mark.parametrize("elements", [1000, 150_001])
@pytest.mark.parametrize("kind", KINDS)
def test_the_error_is_hiveminds_or_lower(
    ours: Make, theirs: Make, elements: int, kind: str
) -> None:
    """Up to a thousandth, which a value on the border of two buckets may cost or save."""
    part = KINDS[kind](normal(elements))
    hiveminds = error(theirs(), part)
    assert error(ours(), part) <= hiveminds * 1.001 + 2.0**-24 or hiveminds != hiveminds


@pairs
@pytest.mark.parametrize("elements", [2, 3, 1001, 2 * CHUNK + 1])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_each_side_decodes_the_other(
    ours: Make, theirs: Make, elements: int, dtype: torch.dtype
) -> None:
    part = normal(elements).to(dtype)
    for sender in (ours(), theirs()):
        message = encoded(sender, part)
        got, same = ours().extract(message), theirs().extract(message)
        assert got.dtype == same.dtype == dtype
        assert torch.equal(got, same)
    assert len(encoded(ours(), part).buffer) == len(encoded(theirs(), part).buffer)


@pytest.mark.parametrize("value", [0.1, -3e-7, 1e-30, 7e20])
def test_long_constant_parts_are_exact_in_uniform_buckets(value: float) -> None:
    """hivemind adds the values up one after another in float32, which drifts."""
    part = torch.full((300_000,), value)
    codec = eight_bit.UniformEightBit()
    assert torch.equal(codec.extract(encoded(codec, part)), part)
    if value == 0.1:
        assert error(Uniform8BitQuantization(), part) > 1e-3


def test_uniform_buckets_keep_values_far_from_zero() -> None:
    """Scales of normalisation layers are such: close to one, and close to each other."""
    part = KINDS["far from zero"](normal(150_001))
    assert error(eight_bit.UniformEightBit(), part) < error(Uniform8BitQuantization(), part) / 2


@pairs
def test_memory_order_changes_nothing(ours: Make, theirs: Make) -> None:
    tensor = normal(2 * 3 * 4 * 5).reshape(2, 3, 4, 5)
    turned = tensor.to(memory_format=torch.channels_last)
    assert not turned.is_contiguous()
    assert encoded(ours(), turned) == encoded(ours(), tensor)
    before = tensor.clone()
    message = ours().compress(tensor, CompressionInfo.from_tensor(tensor), allow_inplace=True)
    assert message == encoded(ours(), tensor)
    assert torch.equal(tensor, before)


@pairs
def test_integers_are_refused(ours: Make, theirs: Make) -> None:
    for codec in (ours(), theirs()):
        with pytest.raises(ValueError, match="int64"):
            encoded(codec, torch.arange(5))


@pytest.mark.parametrize("elements", [1, 2, 255, 5000, 250_001])
@pytest.mark.parametrize("kind", ["normal", "few values", "sparse"])
def test_quantile_buckets_are_hiveminds_bit_for_bit(elements: int, kind: str) -> None:
    part = KINDS[kind](normal(elements))
    ours, theirs = eight_bit.QuantileEightBit(), Quantile8BitQuantization()
    assert encoded(ours, part) == encoded(theirs, part)
