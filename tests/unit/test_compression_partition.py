"""Partition of tensors among reducers: complete, even, cheap, and the same for all members."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayhive.compression.partition import (
    GRAINS,
    LARGEST_PART,
    LEAST_SHARE,
    Part,
    Partition,
    Price,
    partition,
)
from rayhive.compression.shares import reducer_shares, worthwhile
from rayhive.registry import CODECS

MILLION = 10**6
FIXED = (
    "none",
    "float16",
    "scaled_float16",
    "uniform8",
    "blockwise4",
    "blockwise2",
    "sign",
    "topk",
)

rates = st.lists(
    st.one_of(st.none(), st.just(0.0), st.floats(0.1, 1e4)), min_size=1, max_size=9
).filter(lambda links: any(rate is None or rate > 0 for rate in links))
codecs = st.sampled_from(FIXED)
#: From no element at all to more than a part.
sizes = st.lists(
    st.one_of(st.integers(0, 40), st.integers(0, 20_000), st.integers(0, 3 * MILLION)),
    min_size=1,
    max_size=12,
).map(tuple)


def price(name: str) -> Price:
    codec = CODECS.get(name)()
    return Price.of(lambda elements: codec.part_bytes(elements, elements, None), codec.block)


def cut(sizes: tuple[int, ...], name: str, links: list[float | None]) -> Partition:
    return partition(sizes, (price(name),) * len(sizes), reducer_shares(links))


def encoded(parts: tuple[Part, ...], name: str) -> int:
    """Return the bytes of parts, by the codec's own sizes."""
    codec = CODECS.get(name)()
    return sum(codec.part_bytes(len(each), len(each), None) for part in parts for each in part)


def equal(peers: int) -> list[float | None]:
    return [None] * peers


@given(sizes=sizes, name=codecs, links=rates)
def test_every_element_is_in_one_part(
    sizes: tuple[int, ...], name: str, links: list[float | None]
) -> None:
    found = cut(sizes, name, links)
    assert len(found) == len(links)
    segments = sorted(
        (each for parts in found for part in parts for each in part),
        key=lambda each: (each.tensor, each.start),
    )
    assert all(len(each) > 0 for each in segments)
    for tensor, size in enumerate(sizes):
        mine = [each for each in segments if each.tensor == tensor]
        borders = [0, *(each.stop for each in mine)]
        assert [each.start for each in mine] == borders[:-1]
        assert not any(each.start % CODECS.get(name).block for each in mine), "a block is cut"
        assert borders[-1] == size


@given(sizes=sizes, name=codecs, links=rates)
def test_peers_without_a_share_reduce_nothing(
    sizes: tuple[int, ...], name: str, links: list[float | None]
) -> None:
    found = cut(sizes, name, links)
    for parts, share in zip(found, reducer_shares(links), strict=True):
        assert share or not parts
    reducers = sum(bool(parts) for parts in found)
    total = sum(encoded(parts, name) for parts in found)
    assert reducers <= max(1, total // LEAST_SHARE), "a reducer for a handful of bytes"
    assert bool(reducers) == bool(sum(sizes))


@given(sizes=sizes, name=codecs, links=rates)
def test_parts_are_few_and_bounded(
    sizes: tuple[int, ...], name: str, links: list[float | None]
) -> None:
    for parts in cut(sizes, name, links):
        each = [encoded((part,), name) for part in parts]
        assert max(each, default=0) <= LARGEST_PART
        assert len(parts) <= 2 + 2 * sum(each) / LARGEST_PART + math.sqrt(sum(each) / 2**11)
        for one, other in pairwise(each):
            assert one + other > LEAST_SHARE, "two parts that would fit into a small one"


@settings(max_examples=300)
@given(
    name=codecs,
    peers=st.integers(1, 8),
    total=st.one_of(st.integers(10**5, MILLION), st.integers(10**5, 10**9)),
    weights=st.lists(st.floats(0.001, 1.0), min_size=1, max_size=40),
)
def test_shares_are_even_from_a_tenth_of_a_million_elements_on(
    name: str, peers: int, total: int, weights: list[float]
) -> None:
    """Within 5 % of the fair share, in bytes, for any division of the model into tensors.

    With less than 8 bits per element, from as many bytes on.
    """
    total = math.ceil(total * max(1.0, 8 / CODECS.get(name)().bits(total)))
    sizes = tuple(math.ceil(total * weight / sum(weights)) for weight in weights)
    loads = [encoded(parts, name) for parts in cut(sizes, name, equal(peers))]
    assert max(loads) <= 1.05 * sum(loads) / peers


@given(
    name=codecs, links=rates.filter(lambda links: len(links) > 2), total=st.integers(10**5, 10**8)
)
def test_shares_follow_the_links(name: str, links: list[float | None], total: int) -> None:
    total = math.ceil(total * max(1.0, 8 / CODECS.get(name)().bits(total)))
    sizes = (total // 2, 100, total - total // 2)
    loads = [encoded(parts, name) for parts in cut(sizes, name, links)]
    fair = worthwhile(reducer_shares(links), sum(loads), LEAST_SHARE)
    for load, share in zip(loads, fair, strict=True):
        assert load <= 1.05 * float(share) * sum(loads) + 2 * 1032


@given(sizes=sizes, name=codecs, links=rates.filter(lambda links: len(links) > 1))
def test_the_order_of_the_members_changes_no_size(
    sizes: tuple[int, ...], name: str, links: list[float | None]
) -> None:
    """Members of a group come in a random order, and a prediction knows none."""

    def lengths(links: list[float | None]) -> list[list[list[int]]]:
        return sorted([list(map(len, part)) for part in parts] for parts in cut(sizes, name, links))

    assert lengths(links) == lengths(links[::-1])


def test_an_adaptive_codec_has_a_price_for_each_tensor() -> None:
    codec = CODECS.get("size_adaptive")()
    sizes = (900_000, 900, 900, 900_000)
    prices = tuple(
        Price.of(lambda n, whole=size: codec.part_bytes(n, whole, 1000)) for size in sizes
    )
    assert prices[0] == Price(1032 * GRAINS, GRAINS)
    assert prices[1] == Price(0, 2 * GRAINS)
    found = partition(sizes, prices, reducer_shares(equal(4)))
    loads = [
        sum(codec.part_bytes(len(s), sizes[s.tensor], 1000) for part in parts for s in part)
        for parts in found
    ]
    assert max(loads) <= 1.05 * sum(loads) / 4


def test_small_tensors_share_a_message() -> None:
    sizes = (64, 64, 10, 300, 1, 0, 128)
    (parts, *_) = cut(sizes, "none", equal(1))
    assert [[each.tensor for each in part] for part in parts] == [[0, 1, 2, 3, 4, 6]]


@given(links=rates)
def test_links_are_done_at_the_same_time(links: list[float | None]) -> None:
    """No other division is done earlier: all reducers end together, the others before them."""
    shares = reducer_shares(links)
    assert sum(shares) == 1 and min(shares) >= 0
    peers = len(links)
    given_rates = [Fraction(rate) for rate in links if rate]
    usual = sum(given_rates, Fraction(0)) / len(given_rates) if given_rates else Fraction(1)
    exact = [usual if rate is None else Fraction(rate) for rate in links]
    assert not any(share for share, rate in zip(shares, exact, strict=True) if not rate)
    if peers < 3:
        assert len({share for share in shares if share}) == 1
        return
    ends = [
        (1 + (peers - 2) * share) / rate for share, rate in zip(shares, exact, strict=True) if rate
    ]
    able = [share for share, rate in zip(shares, exact, strict=True) if rate]
    reducing = {end for end, share in zip(ends, able, strict=True) if share}
    assert len(reducing) == 1
    (last,) = reducing
    for end, share in zip(ends, able, strict=True):
        assert end == last if share else end >= last, "a slower link gets nothing to reduce"


def test_shares_of_known_links() -> None:
    assert reducer_shares([None, None, None]) == (Fraction(1, 3),) * 3
    assert reducer_shares([100, 20]) == (Fraction(1, 2),) * 2, "both send one payload anyway"
    assert reducer_shares([0, None, None]) == (0, Fraction(1, 2), Fraction(1, 2))
    # (1 + 2 · 5/14)/60 = (1 + 2 · 1/7)/45
    assert reducer_shares([60, 60, 45, 45]) == (
        *(Fraction(5, 14),) * 2,
        *(Fraction(1, 7),) * 2,
    )
    for links in ([], [0.0, 0.0], [-1.0, 5.0]):
        with pytest.raises(ValueError, match="can reduce"):
            reducer_shares(links)


def test_small_totals_have_few_reducers() -> None:
    shares = reducer_shares([None, None, None, None])
    assert worthwhile(shares, 10, 5) == (Fraction(1, 2), Fraction(1, 2), 0, 0)
    assert worthwhile(shares, 10, 100) == (1, 0, 0, 0)
    assert worthwhile(shares, 10, 0) == shares
