"""Contract of every registered codec, tested from its registration on."""

from __future__ import annotations

import importlib.util
import math
import subprocess
import sys
from itertools import pairwise
from typing import Any

import pytest
import torch
from hivemind.compression import CompressionInfo, deserialize_torch_tensor
from hypothesis import given
from hypothesis import strategies as st

from rayhive.averaging.parts import decode as decode_part
from rayhive.compression.codecs.base import Codec
from rayhive.compression.kernels.decoders import DECODERS
from rayhive.errors import ConfigError
from rayhive.registry import CODECS
from rayhive.spec import AXES
from rayhive.strategy.arguments import check_options

HERE = [name for name, codec in CODECS.items() if codec.available()]
every = pytest.mark.parametrize("name", CODECS.names())
available = pytest.mark.parametrize("name", HERE)

#: Both sides of the adaptive codecs' threshold, block and part sizes and their neighbours.
SIZES = st.one_of(st.integers(0, 3000), st.sampled_from([4095, 4096, 4097, 8192, 70_001]))
THRESHOLD = 1000
#: Arguments of the strategy with a codec of parameters.
PARAMETERS = ("state_averaging_compression", "load_state_compression")


def made(name: str) -> tuple[Codec, int | None]:
    codec = CODECS.get(name)()
    return codec, THRESHOLD if codec.uses_threshold else None


def encode(name: str, part: torch.Tensor, tensor_elements: int | None = None) -> Any:
    """Encode a part as hivemind does: the info describes the whole tensor."""
    codec, threshold = made(name)
    whole = torch.empty(part.numel() if tensor_elements is None else tensor_elements)
    return codec.build(threshold).compress(part, CompressionInfo.from_tensor(whole))


def decode(message: Any) -> torch.Tensor:
    """Decode as a receiver does: a hivemind peer, but for wire types that hivemind lacks."""
    ours = message.compression in DECODERS
    return decode_part(message) if ours else deserialize_torch_tensor(message)


def normal(elements: int, seed: int = 0, scale: float = 1.0, shift: float = 0.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(elements, generator=generator) * scale + shift


@every
def test_a_codec_is_registered_under_its_name(name: str) -> None:
    codec = CODECS.get(name)
    assert codec.name == name
    assert issubclass(codec, Codec)
    assert codec.available() == (
        codec.requires is None or importlib.util.find_spec(codec.requires) is not None
    )


@every
def test_a_codec_requires_a_threshold_exactly_when_it_uses_one(name: str) -> None:
    codec, threshold = made(name)
    wrong: list[int | None] = [None, 0, -1] if codec.uses_threshold else [1, 1000]
    for value in wrong:
        for use in (
            lambda value=value: codec.build(value),
            lambda value=value: codec.bits(10, value),
            lambda value=value: codec.part_bytes(10, 10, value),
        ):
            with pytest.raises(ConfigError, match="threshold"):
                use()
    assert codec.bits(10, threshold) > 0


@every
def test_predicted_sizes_grow_with_the_part(name: str) -> None:
    codec, threshold = made(name)
    for whole in (10, 100_000):
        sizes = [codec.part_bytes(n, whole, threshold) for n in (0, 1, 100, 5000, 100_000)]
        assert sizes == sorted(set(sizes))
        assert codec.bits(whole, threshold) * 100_000 / 8 <= sizes[-1]


@available
@given(elements=SIZES, tensor_elements=SIZES, seed=st.integers(0, 3))
def test_a_part_has_exactly_the_predicted_bytes(
    name: str, elements: int, tensor_elements: int, seed: int
) -> None:
    codec, threshold = made(name)
    assert codec.exact_size, "an inexact codec needs a test of its own"
    message = encode(name, normal(elements, seed), tensor_elements)
    assert len(message.buffer) == codec.part_bytes(elements, tensor_elements, threshold)


@available
def test_only_codecs_of_gradients_have_a_wire_type_of_their_own(name: str) -> None:
    """A downloaded state is decoded by hivemind, and reducers of parameters answer by type."""
    codec, threshold = made(name)
    assert (encode(name, normal(2000)).compression in DECODERS) == codec.of_gradients
    assert getattr(codec.build(threshold), "of_gradients", False) == codec.of_gradients
    axis = next(axis for axis in AXES if axis.name == "state_codec")
    refused = list(axis.check("state_codec", name))
    assert bool(refused) == (codec.of_gradients or codec.uses_threshold)
    if codec.of_gradients:
        options = {key: codec.build() for key in PARAMETERS}
        assert [each.key for each in check_options(options)] == list(PARAMETERS)


@available
@given(elements=SIZES.filter(bool))
def test_hivemind_cuts_tensors_by_the_predicted_bits(name: str, elements: int) -> None:
    codec, threshold = made(name)
    info = CompressionInfo.from_tensor(torch.empty(elements))
    assert codec.bits(elements, threshold) == 32 * codec.build(
        threshold
    ).estimate_compression_ratio(info)


@available
@given(
    elements=st.sampled_from([300, 1024, 5000, 70_001]),
    seed=st.integers(0, 20),
    scale=st.sampled_from([1e-3, 1.0, 50.0]),
)
def test_receivers_decode_encoded_parts(name: str, elements: int, seed: int, scale: float) -> None:
    codec, _ = made(name)
    part = normal(elements, seed, scale)
    before = part.clone()
    message = encode(name, part)
    got = decode(message)
    assert torch.equal(part, before), "compress changed its input"
    assert (got.shape, got.dtype) == (part.shape, part.dtype)
    assert (got - part).norm() <= codec.relative_error * part.norm()
    assert torch.equal(got, part) or codec.relative_error
    built = codec.build(THRESHOLD if codec.uses_threshold else None)
    assert torch.equal(built.extract(message), got), "the codec and the table of decoders disagree"


@available
@pytest.mark.parametrize("elements", [1, 2, 3, 1500])
@pytest.mark.parametrize("value", [0.0, 1.0, -2.5, 1e-12, 3e4])
def test_constant_parts_stay_constant(name: str, elements: int, value: float) -> None:
    """Also a part of one element: biases of width one exist."""
    part = torch.full((elements,), value)
    got = decode(encode(name, part))
    if not CODECS.get(name).keeps:
        part, got = part[: int(got.count_nonzero())], got[got.nonzero()[:, 0]]
        assert len(got) >= bool(value)
    # Half precision, and its least step near zero; the others hold the mean in float32.
    torch.testing.assert_close(got, part, rtol=2.0**-11, atol=2.0**-25)
    assert not len(got) or (got == got[0]).all()


@available
def test_an_empty_part_stays_empty(name: str) -> None:
    got = decode(encode(name, torch.empty(0)))
    assert got.shape == (0,)


@available
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, between infinite quantiles
@pytest.mark.parametrize("elements", [5, 1500])
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite_stay_so(name: str, elements: int, poison: float) -> None:
    part = normal(elements)
    part[3] = poison
    assert not torch.isfinite(decode(encode(name, part))[3])


@available
@pytest.mark.parametrize("shape", [(6, 50), (2, 3, 400), (40, 1)])
def test_tensors_keep_their_shape(name: str, shape: tuple[int, ...]) -> None:
    """Averaging sends flat parts, but a downloaded state is encoded tensor by tensor."""
    codec, threshold = made(name)
    tensor = normal(2400)[: torch.Size(shape).numel()].reshape(shape)
    message = codec.build(threshold).compress(tensor, CompressionInfo.from_tensor(tensor))
    got = decode(message)
    assert got.shape == tensor.shape
    assert (got - tensor).norm() <= max(0.2, codec.relative_error) * tensor.norm()


@available
@given(
    shape=st.lists(st.integers(0, 9), max_size=4).map(tuple),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.float64]),
    seed=st.integers(0, 20),
)
def test_any_floating_point_tensor_is_encoded_without_a_change(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, seed: int
) -> None:
    """Scalars, empty tensors, every type, and views of every stride."""
    codec, threshold = made(name)
    tensor = normal(math.prod(shape), seed).reshape(shape).to(dtype)
    view = tensor.mT if tensor.ndim > 1 else tensor[None].expand(3, *shape)
    for each in (tensor, view):
        before = each.clone()
        message = codec.build(threshold).compress(each, CompressionInfo.from_tensor(each))
        got = decode(message)
        assert torch.equal(each, before)
        assert got.shape == each.shape and got.dtype.is_floating_point
        if each.numel() and codec.of_gradients:
            assert got.dtype == dtype
            assert (got - each).double().norm() <= 1.001 * each.double().norm()


@available
@given(
    size=st.integers(1, 20_000),
    places=st.lists(st.integers(0, 10**6), max_size=4),
    seed=st.integers(0, 100),
)
def test_an_encoding_does_not_depend_on_cuts_between_blocks(
    name: str, size: int, places: list[int], seed: int
) -> None:
    codec, _ = made(name)
    if codec.block == 1:
        return
    tensor = normal(size, seed)
    cuts = sorted({0, size, *(min(at % size // codec.block * codec.block, size) for at in places)})
    pieces = [decode(encode(name, tensor[a:b], size)) for a, b in pairwise(cuts)]
    assert torch.equal(torch.cat(pieces), decode(encode(name, tensor)))


@available
def test_a_buffer_of_another_length_is_refused(name: str) -> None:
    codec, threshold = made(name)
    if not codec.of_gradients:
        return
    message = encode(name, normal(5000))
    for wrong in (message.buffer[:-1], message.buffer + b"0", b""):
        bad = type(message)()
        bad.CopyFrom(message)
        bad.buffer = wrong
        with pytest.raises(ValueError, match="bytes"):
            codec.build(threshold).extract(bad)


def test_listing_and_predicting_load_neither_torch_nor_hivemind() -> None:
    code = (
        "import sys, rayhive.compression\n"
        "from rayhive.registry import CODECS\n"
        "from rayhive.compression.payload import payload\n"
        "names = [name for name, codec in CODECS.items() if codec.available() is not None]\n"
        "payload([(40, 30), (7,)], codec='uniform8', powersgd_rank=2)\n"
        "loaded = {'torch', 'hivemind', 'numpy'} & set(sys.modules)\n"
        "sys.exit(f'loaded {loaded}' if loaded or not names else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
