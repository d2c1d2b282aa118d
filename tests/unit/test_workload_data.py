from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rayhive.errors import ConfigError
from rayhive.workloads.base import Target
from rayhive.workloads.data import SampleStream, Windows, seeded, spread


@given(st.integers(1, 60), st.integers(1, 12), st.integers(0, 3), st.integers(0, 2**32))
def test_each_generation_of_peers_divides_each_pass(
    size: int, peers: int, generation: int, seed: int
) -> None:
    peers = min(peers, size)
    first = generation * peers
    streams = [
        SampleStream(size, peer=first + peer, peers=peers, seed=seed) for peer in range(peers)
    ]
    for number in range(2):
        seen: list[int] = []
        for stream in streams:
            share = len(range(stream.offset, size, peers))
            seen += itertools.islice(stream, number * share, (number + 1) * share)
        assert sorted(seen) == list(range(size))


def test_more_peers_than_samples_is_refused_before_a_stream_runs_dry() -> None:
    with pytest.raises(ConfigError, match=r"swarm\.peers: 4"):
        SampleStream(3, peer=0, peers=4, seed=0)


def test_windows_are_followed_by_their_targets() -> None:
    tokens = torch.arange(11, dtype=torch.uint8)
    windows = Windows(tokens, 5)
    assert len(windows) == 2
    inputs, targets = windows.batch([1, 0])
    assert inputs.tolist() == [[5, 6, 7, 8, 9], [0, 1, 2, 3, 4]]
    assert targets.tolist() == [[6, 7, 8, 9, 10], [1, 2, 3, 4, 5]]
    assert inputs.dtype == targets.dtype == torch.int64


@given(st.integers(1, 200), st.integers(1, 300), st.integers(1, 50))
def test_spread_indices_are_distinct_and_within_range(size: int, count: int, batch: int) -> None:
    batches = spread(size, count, batch)
    index = [number for part in batches for number in part]
    assert len(index) == min(size, count) == len(set(index))
    assert index == sorted(index)
    assert index[0] == 0
    assert index[-1] < size
    assert all(len(part) <= batch for part in batches)


def test_seeding_is_undone_even_after_an_error() -> None:
    before = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="stop"), seeded(1):
        torch.rand(3)
        raise RuntimeError("stop")
    assert torch.equal(torch.get_rng_state(), before)


def test_a_target_is_reached_from_the_right_side() -> None:
    climb, sink = Target("accuracy", 0.9, "max"), Target("perplexity", 9.0, "min")
    assert [climb.reached(value) for value in (0.89, 0.9, 0.91, float("nan"))] == [0, 1, 1, 0]
    assert [sink.reached(value) for value in (8.9, 9.0, 9.1, float("nan"))] == [1, 1, 0, 0]
