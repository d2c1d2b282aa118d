"""The prediction against the parts of an all-reduce, and hivemind's merging and choosing."""

from __future__ import annotations

import asyncio
import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from hivemind.compression import CompressionInfo
from hivemind.optim.power_sgd_averager import PowerSGDGradientAverager
from hivemind.utils.math import get_flatten_greedy_dims
from hypothesis import given, settings
from hypothesis import strategies as st

from rayhive.averaging.tensor_parts import TensorParts, balanced_partition
from rayhive.compression.payload import (
    allreduce_bytes,
    averaged_sizes,
    payload,
)
from rayhive.compression.powersgd.shapes import compressed_tensors, matrix_dims
from rayhive.compression.shares import reducer_shares
from rayhive.errors import ConfigError
from rayhive.registry import CODECS
from rayhive.spec import Configuration, Space
from rayhive.spec.axes.threshold import deciding_range
from rayhive.sweep.space import SearchSpace
from tests.unit.averaging_fakes import unstarted

LOW = ("blockwise4", "blockwise2", "sign", "topk")
FIXED = ("none", "float16", "scaled_float16", "uniform8", "quantile8", "size_adaptive", *LOW)

shapes_of_any_rank = st.lists(st.integers(1, 40), min_size=0, max_size=5).map(tuple)
models = st.lists(
    shapes_of_any_rank.filter(lambda s: math.prod(s) < 50_000), min_size=1, max_size=8
)
ranks = st.one_of(st.none(), st.integers(1, 12))
ratios = st.one_of(st.none(), st.floats(0, 1.2))


def threshold_for(name: str, threshold: int) -> int | None:
    return threshold if CODECS.get(name).uses_threshold else None


@given(shape=st.lists(st.integers(1, 64), min_size=2, max_size=6))
def test_dimensions_merge_as_in_hivemind(shape: list[int]) -> None:
    meta = torch.empty(shape, device="meta")
    assert list(matrix_dims(shape)) == get_flatten_greedy_dims(meta)


@given(shapes=models, rank=st.integers(1, 12), ratio=st.floats(0, 1))
def test_the_factorised_set_follows_hiveminds_rule(
    shapes: list[tuple[int, ...]], rank: int, ratio: float
) -> None:
    """hivemind's rule, as written in its averager, on the same shapes."""
    theirs = []
    for index, shape in enumerate(shapes):
        grad = torch.empty(shape, device="meta")
        if (
            grad.ndim > 1
            and not (1 - rank * sum(get_flatten_greedy_dims(grad)) / grad.numel()) < ratio
        ):
            theirs.append(index)
    assert list(compressed_tensors(shapes, rank, ratio)) == theirs


def test_the_factorised_set_is_that_of_a_hivemind_averager() -> None:
    shapes = [(64, 27), (64,), (10, 512), (30, 4, 3, 3), (4, 4), (1,)]
    for rank in (1, 2, 4):
        for ratio in (0.0, 0.5, 0.9):
            averager = unstarted(
                PowerSGDGradientAverager, shapes, averager_rank=rank, min_compression_ratio=ratio
            )
            left = averager._uncompressed_gradients_indexes
            assert set(compressed_tensors(shapes, rank, ratio)) == set(range(len(shapes))) - left


@given(shapes=models, rank=st.integers(1, 12), ratio=st.floats(0, 1))
def test_the_rank_of_a_factorised_tensor_never_needs_clipping(
    shapes: list[tuple[int, ...]], rank: int, ratio: float
) -> None:
    """The paper clips the rank to min(n, m); a ratio of at least zero implies it."""
    for index in compressed_tensors(shapes, rank, ratio):
        assert rank < min(matrix_dims(shapes[index]))


@pytest.mark.parametrize("name", FIXED)
@settings(max_examples=40)
@given(
    shapes=models,
    threshold=st.integers(1, 3000),
    links=st.lists(st.sampled_from([None, 0.0, 20.0, 100.0]), min_size=1, max_size=5).filter(
        lambda links: links != [0.0] * len(links)
    ),
)
def test_the_parts_of_an_all_reduce_have_the_predicted_bytes(
    name: str, shapes: list[tuple[int, ...]], threshold: int, links: list[float | None]
) -> None:
    """Whatever the links, and the order of the members."""
    chosen = threshold_for(name, threshold)
    built = CODECS.get(name)().build(chosen)
    tensors = [torch.linspace(-1, 1, math.prod(shape)).reshape(shape) for shape in shapes]
    infos = [CompressionInfo.from_tensor(each, key=at) for at, each in enumerate(tensors)]
    found = balanced_partition(tensors, infos, built, reducer_shares(links[::-1]))
    parts = TensorParts(tensors, found, compression=built, infos=infos)

    async def sizes() -> list[int]:
        messages = [parts.iterate_input_parts_for(peer) for peer in range(len(links))]
        return [len(message.buffer) for each in messages async for message in each]

    predicted = payload(shapes, codec=name, threshold=chosen, rates=links)
    assert predicted.bytes_per_transfer == sum(asyncio.run(sizes()))


@given(shapes=models, rank=ranks, ratio=ratios, factor_codec=st.sampled_from(["none", "float16"]))
def test_powersgd_bytes_follow_the_formula(
    shapes: list[tuple[int, ...]], rank: int | None, ratio: float | None, factor_codec: str
) -> None:
    """4 [sum of min(r, n, m)(n + m) over compressed matrices + the rest], or 2 for factors."""
    options = {"powersgd_rank": rank, "min_compression_ratio": ratio}
    predicted = payload(shapes, **options, factor_codec=factor_codec)
    expected = 0
    size = 4 if factor_codec == "none" else 2
    for index, shape in enumerate(shapes):
        if index in predicted.compressed:
            assert rank is not None
            n, m = matrix_dims(shape)
            expected += min(rank, n, m) * size * (n + m)
        else:
            expected += 4 * math.prod(shape)
    assert predicted.bytes_per_transfer == expected
    assert predicted.dense_bytes == 4 * sum(map(math.prod, shapes))
    assert predicted.ratio == pytest.approx(predicted.dense_bytes / expected)
    assert [phase.name for phase in predicted.phases] == (["dense"] if rank is None else ["P", "Q"])
    scales = (
        payload(shapes, **options).bytes_per_transfer
        - payload(shapes, **options, factor_codec="float16").bytes_per_transfer
    )
    assert scales == 2 * 8 * len(predicted.compressed), "mean and deviation of each factor"


def test_the_share_of_a_peer_is_exact() -> None:
    assert allreduce_bytes(1000, 1) == 0
    assert allreduce_bytes(1000, 2) == 1000
    assert allreduce_bytes(1000, 3) == Fraction(4000, 3)
    assert allreduce_bytes(1000, 4) == 1500
    assert allreduce_bytes(1000, 4, groups=2) == 1000  # pairs
    assert allreduce_bytes(1000, 5, groups=2) == 1200  # a pair, and a group of three
    with pytest.raises(ValueError, match="at least one peer"):
        allreduce_bytes(1000, 0)


@pytest.mark.parametrize(
    ("options", "keys"),
    [
        ({"codec": "unifrom8"}, ["codec"]),
        ({"codec": "none", "threshold": 5}, ["threshold"]),
        ({"codec": "sign", "top_k": 5}, ["top_k"]),
        ({"codec": "topk", "top_k": 5000}, ["top_k"]),
        ({"codec": "size_adaptive"}, ["threshold"]),
        (
            {"powersgd_rank": 0, "min_compression_ratio": -0.5},
            ["powersgd_rank", "min_compression_ratio"],
        ),
        ({"powersgd_rank": 2, "min_compression_ratio": math.nan}, ["min_compression_ratio"]),
    ],
)
def test_bad_input_names_its_key(options: dict[str, Any], keys: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        payload([(20, 20)], **options)
    assert [problem.key for problem in caught.value.problems] == keys


def behaviour(shapes: list[tuple[int, ...]], configuration: Configuration) -> Any:
    """Return all observable effects: codec of every tensor sent, in order, and delay."""
    rank = configuration.powersgd_rank
    sent = payload(
        shapes,
        codec=configuration.codec,
        threshold=configuration.threshold,
        powersgd_rank=rank,
        min_compression_ratio=configuration.min_compression_ratio,
    )
    codec = CODECS.get(configuration.codec)()
    names = []
    for phase in sent.phases:
        for size in phase.elements:
            if configuration.codec == "size_adaptive":
                names.append((size, codec.choose(size, configuration.threshold).name))
            else:
                names.append((size, codec.name))
    return names, (rank, sent.compressed) if sent.compressed else None, configuration.delay


configurations = st.builds(
    lambda codec, threshold, rank, ratio, delay: Configuration(
        codec=codec,
        threshold=threshold_for(codec, threshold),
        powersgd_rank=rank,
        min_compression_ratio=ratio if rank is not None else None,
        delay=delay,
    ),
    st.sampled_from(["float16", "uniform8", "size_adaptive", "size_adaptive"]),
    st.integers(1, 2000),
    st.one_of(st.none(), st.integers(1, 3)),
    st.one_of(st.none(), st.floats(0, 1)),
    st.sampled_from(["none", "state"]),
)


@settings(max_examples=300)
@given(shapes=models, one=configurations, other=configurations)
def test_keys_are_equal_exactly_when_the_effects_are(
    shapes: list[tuple[int, ...]], one: Configuration, other: Configuration
) -> None:
    space = SearchSpace(Space(), shapes)
    assert (space.key(one) == space.key(other)) == (
        behaviour(shapes, one) == behaviour(shapes, other)
    )


def test_equivalent_configurations_have_one_key() -> None:
    shapes = [(64, 64), (64,), (64, 1000)]

    def key(**fields: Any) -> str:
        return SearchSpace(Space(), shapes).key(Configuration(**fields))

    adaptive = {"codec": "size_adaptive"}
    assert key(**adaptive, threshold=65) == key(**adaptive, threshold=4096)
    assert key(**adaptive, threshold=1) == key(codec="uniform8")
    assert key(**adaptive, threshold=64_001) == key(codec="float16")
    assert key(powersgd_rank=40, min_compression_ratio=0.9) == key()
    assert key(powersgd_rank=2, min_compression_ratio=0.1) == key(powersgd_rank=2)
    assert key(powersgd_rank=2) != key(powersgd_rank=2, min_compression_ratio=0.95)
    assert key(powersgd_rank=2) != key(powersgd_rank=3)
    assert key(delay="state") != key()
    sparse = {"codec": "topk"}
    assert key(**sparse) == key(**sparse, top_k=64)
    assert key(**sparse, top_k=65) != key(**sparse, top_k=64)
    assert key(**sparse, powersgd_rank=1, top_k=16) == key(**sparse, powersgd_rank=1, top_k=15)


@given(shapes=models, rank=ranks, ratio=ratios, threshold=st.integers(1, 60_000))
def test_thresholds_outside_the_range_act_like_its_ends(
    shapes: list[tuple[int, ...]], rank: int | None, ratio: float | None, threshold: int
) -> None:
    low, high = deciding_range(
        averaged_sizes(shapes, {"powersgd_rank": rank, "min_compression_ratio": ratio})
    )

    def key(value: int) -> str:
        return SearchSpace(Space(), shapes).key(
            Configuration(
                codec="size_adaptive",
                threshold=value,
                powersgd_rank=rank,
                min_compression_ratio=ratio,
            )
        )

    assert key(threshold) == key(min(max(threshold, low), high))
    assert key(low) != key(low + 1) and key(high) != key(high - 1)


def test_the_range_follows_the_factors() -> None:
    """ResNet-18's largest convolution is 512 by 4608: its Q at rank r has 4608 r elements."""
    shapes = [(512, 512, 3, 3), (512,)]
    assert deciding_range(averaged_sizes(shapes, {})) == (512, 512 * 4608 + 1)
    assert deciding_range(averaged_sizes(shapes, {"powersgd_rank": 2})) == (512, 2 * 4608 + 1)
    with pytest.raises(ConfigError):
        averaged_sizes([], {})
