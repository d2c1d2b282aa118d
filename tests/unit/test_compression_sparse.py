"""Chunked top-k: which elements are sent, in how many bits, and what is refused."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hivemind.compression import CompressionInfo
from hypothesis import given, settings
from hypothesis import strategies as st

from rayhive.averaging.parts import decode
from rayhive.compression.codecs.topk import Topk, index_bits, kept
from rayhive.compression.kernels.sparse import TopK
from rayhive.errors import ConfigError
from rayhive.spec.axes.top_k import CHUNK

densities = st.one_of(st.integers(1, CHUNK), st.sampled_from([1, 16, 64, 1024, CHUNK]))
sizes = st.one_of(st.integers(0, 300), st.integers(0, 3 * CHUNK), st.just(2 * CHUNK))


@settings(max_examples=200)
@given(size=sizes, top_k=densities, seed=st.integers(0, 50))
def test_the_largest_elements_of_each_chunk_are_sent(size: int, top_k: int, seed: int) -> None:
    """A receiver reads the density in the message."""
    values = torch.randn(size, generator=torch.Generator().manual_seed(seed))
    message = TopK(top_k).compress(values, CompressionInfo.from_tensor(values))
    assert len(message.buffer) == Topk(top_k).part_bytes(size, size)
    got = decode(message).numpy()
    for start in range(0, size, CHUNK):
        chunk, found = values.numpy()[start : start + CHUNK], got[start : start + CHUNK]
        count = math.ceil(top_k / CHUNK * len(chunk))
        order = np.argsort(-np.abs(chunk), kind="stable")[:count]
        assert {*np.flatnonzero(found)} == {*order}
        assert (np.sign(found[order]) == np.sign(chunk[order])).all()
        magnitudes = np.abs(chunk[order])
        large = magnitudes > magnitudes.mean()
        for side in (large, ~large):
            if side.any():
                mean = magnitudes[side].mean()
                np.testing.assert_allclose(np.abs(found[order][side]), mean, rtol=1e-5)


@given(size=st.integers(1, CHUNK), top_k=densities)
def test_indices_keep_the_bound_of_elias_and_fano(size: int, top_k: int) -> None:
    """No fewer bits than the choice of a set needs, and at most k (2 + ⌈log2 n/k⌉), or n."""
    count = kept(size, top_k)
    choice = math.log2(math.comb(size, count))
    bits = index_bits(size, count)
    assert choice <= bits
    if 4 * count <= size:
        assert bits <= count * (2 + math.ceil(math.log2(size / count)))
    else:
        assert bits == size


@given(size=st.integers(1, 2 * CHUNK), top_k=densities, seed=st.integers(0, 50))
def test_damaged_messages_decode_or_are_refused(size: int, top_k: int, seed: int) -> None:
    """Never an element outside of the tensor."""
    random = np.random.default_rng(seed)
    values = torch.from_numpy(random.normal(size=size)).float()
    message = TopK(top_k).compress(values, CompressionInfo.from_tensor(values))
    buffer = bytearray(message.buffer)
    buffer[random.integers(len(buffer))] ^= 1 << int(random.integers(8))
    message.buffer = bytes(buffer)
    try:
        assert decode(message).shape == (size,)
    except ValueError as error:
        assert "bytes" in str(error)


@pytest.mark.parametrize("top_k", [0, -1, CHUNK + 1])
def test_a_density_out_of_range_is_refused(top_k: int) -> None:
    with pytest.raises(ConfigError, match="from 1 to 4096"):
        Topk(top_k)


@given(sizes=st.lists(st.integers(0, 3 * CHUNK), max_size=5), top_k=st.integers(1, CHUNK - 1))
def test_the_elements_that_are_sent_never_fall_with_the_density(
    sizes: list[int], top_k: int
) -> None:
    """Equal numbers therefore mean equal messages, which the key of a configuration uses."""
    fewer, more = Topk(top_k).sent(sizes), Topk(top_k + 1).sent(sizes)
    chunks = {min(size - at, CHUNK) for size in sizes for at in range(0, size, CHUNK)}
    assert fewer <= more
    assert (fewer == more) == all(kept(n, top_k) == kept(n, top_k + 1) for n in chunks)
