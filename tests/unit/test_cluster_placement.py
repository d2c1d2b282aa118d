"""Placement of peers: every demand is met or reported, and cores never prevent a swarm."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayhive.cluster.replicate.placement import (
    Bundle,
    Room,
    bundles,
    demands,
    fits,
    lasting_problems,
    problems,
)
from rayhive.cluster.testbed.config import CLASS_LABEL, shape_labels
from rayhive.spec import Link, SwarmConfig


def swarm(peers: int = 2, **settings: Any) -> SwarmConfig:
    return SwarmConfig.model_validate({"peers": peers, **settings})


def test_a_peer_gets_the_cores_of_its_threads_where_there_are_enough() -> None:
    rooms = [Room("a", 16)]
    assert [b.cpus for b in bundles(swarm(3, threads_per_peer=4), rooms)] == [4.0, 4.0, 4.0]


def test_peers_share_the_cores_where_there_are_not() -> None:
    assert [b.cpus for b in bundles(swarm(8), [Room("a", 2)])] == [0.25] * 8


def test_the_share_is_the_largest_that_fits_node_by_node() -> None:
    # thirds of the total would leave two peers for one node that holds only one of them
    assert [b.cpus for b in bundles(swarm(3), [Room("a", 1), Room("b", 1)])] == [0.5] * 3


@given(
    peers=st.integers(1, 12),
    threads=st.integers(1, 8),
    cores=st.lists(st.integers(1, 8), min_size=1, max_size=4),
)
def test_any_swarm_without_demands_fits_and_takes_no_more_than_its_threads(
    peers: int, threads: int, cores: list[int]
) -> None:
    rooms = [Room(str(index), float(count)) for index, count in enumerate(cores)]
    config = swarm(peers, threads_per_peer=threads)
    asked = bundles(config, rooms)
    assert len(asked) == peers and fits(asked, rooms)
    assert all(0 < bundle.cpus <= threads for bundle in asked)
    assert problems(config, rooms) == []


def test_node_classes_take_the_peers_in_their_order() -> None:
    config = swarm(
        3,
        node_classes={
            "fast": {"count": 1, "labels": {"speed": "fast"}, "gpus": 0.5},
            "slow": {"count": 2, "labels": {"speed": "slow"}},
        },
    )
    assert [(b.labels["speed"], b.gpus) for b in demands(config)] == [
        ("fast", 0.5),
        ("slow", 0.0),
        ("slow", 0.0),
    ]
    rooms = [Room("a", 4, 1, {"speed": "fast"}), Room("b", 4, 0, {"speed": "slow"})]
    assert problems(config, rooms) == []
    assert bundles(config, rooms)[0].resources == {"CPU": 1.0, "GPU": 0.5}


@pytest.mark.parametrize(
    ("gpus", "peers", "have", "slots"),
    [
        (0.5, 2, [1.0], None),
        (0.5, 3, [1.0], 2),
        (1.0, 2, [1.0, 1.0], None),
        (1.0, 1, [], 0),
        # a share is one of a single device: 2 x 0.6 leave 0.4 on each, which cannot be joined
        (0.6, 2, [2.0], None),
        (0.6, 3, [2.0], 2),
        (0.4, 4, [2.0], None),
        (0.4, 5, [2.0], 4),
        (2.0, 2, [3.0], 1),
        (2.0, 2, [3.0, 2.0], None),
    ],
)
def test_fractions_of_gpus_share_one_and_too_many_are_reported(
    gpus: float, peers: int, have: list[float], slots: int | None
) -> None:
    rooms = [Room("cpu", 8.0), *(Room(str(i), 8.0, count) for i, count in enumerate(have))]
    found = problems(swarm(peers, gpus_per_peer=gpus), rooms)
    if slots is None:
        assert found == []
    else:
        assert [p.key for p in found] == ["swarm.gpus_per_peer"]
        assert f"room for {slots} such peers" in found[0].allowed


@given(
    shares=st.lists(st.sampled_from([0.2, 0.25, 0.3, 0.5, 0.6, 0.75, 1.0, 2.0]), max_size=6),
    gpus=st.integers(0, 4),
)
def test_shares_that_fit_can_be_assigned_to_devices(shares: list[float], gpus: int) -> None:
    """Whatever is said to fit does, by trying every assignment; equal shares also conversely."""

    def assign(left: list[float], rest: list[float]) -> bool:
        if not rest:
            return True
        share, *others = rest
        if share >= 1:
            whole = [i for i, free in enumerate(left) if free == 1.0]
            if len(whole) < share:
                return False
            return assign(
                [0.0 if i in whole[: int(share)] else f for i, f in enumerate(left)], others
            )
        return any(
            assign([f - share if j == i else f for j, f in enumerate(left)], others)
            for i, free in enumerate(left)
            if free + 1e-9 >= share
        )

    possible = assign([1.0] * gpus, sorted(shares, reverse=True))
    found = fits([Bundle(0.0, share) for share in shares], [Room("a", 1.0, float(gpus))])
    assert possible or not found
    if len(set(shares)) == 1:
        assert found == possible


def test_a_fraction_above_one_gpu_is_reported() -> None:
    (problem,) = problems(swarm(1, gpus_per_peer=1.5), [Room("a", 8, 8)])
    assert "whole number" in problem.allowed


def test_a_label_that_no_node_has_is_reported_with_the_nearest_one() -> None:
    config = swarm(1, node_classes={"far": {"count": 1, "labels": {"region": "eu-wset"}}})
    rooms = [Room("a", 4, labels={"region": "eu-west"}), Room("b", 4, labels={"region": "us"})]
    (problem,) = problems(config, rooms)
    assert problem.key == "swarm.node_classes.far.labels"
    assert problem.nearest == "region=eu-west" and "region=us" in problem.allowed


def test_labels_that_no_node_has_together_are_reported() -> None:
    classes = {
        name: {"count": 1, "labels": {"zone": "z"}, "gpus": 1} for name in ("first", "second")
    }
    found = problems(swarm(2, node_classes=classes), [Room("a", 4, 1, {"zone": "z"})])
    assert [p.key for p in found] == ["swarm.peers"]


def test_peers_without_gpus_leave_the_gpu_nodes_to_others() -> None:
    asked = [Bundle(1, 0), Bundle(1, 1)]
    assert fits(asked, [Room("gpu", 1, 1), Room("cpu", 1)])
    assert not fits(asked, [Room("gpu", 1, 1)])


def test_a_shaped_class_goes_to_nodes_that_are_shaped_so() -> None:
    link = Link(rate_mbit=20, delay_ms=40, loss=0.01)
    slow = {"slow": {"count": 1, "cpu_share": 0.4, "link": link}}
    swarm = SwarmConfig.model_validate({"peers": 1, "node_classes": slow})
    made = {CLASS_LABEL: "slow", **shape_labels(link, 0.4)}
    assert problems(swarm, [Room("a", 1.0, labels=made)]) == []
    assert bundles(swarm, [Room("a", 1.0, labels=made)])[0].labels == made
    other = {CLASS_LABEL: "slow", **shape_labels(link.model_copy(update={"loss": 0.0}), 0.4)}
    for labels in ({}, {CLASS_LABEL: "slow"}, other):
        (problem,) = problems(swarm, [Room("a", 1.0, labels=labels)])
        assert problem.key == "swarm.node_classes.slow.link"
        assert "must not pass for a shaped one" in problem.allowed


def test_a_cluster_that_grows_is_asked_for_all_cores() -> None:
    """Squeezed to a quarter of a core each, eight peers were no demand for another node."""
    assert [b.cpus for b in bundles(swarm(8), [Room("a", 2)], growing=True)] == [1.0] * 8
    assert len(bundles(swarm(2), [], later=1, growing=True)) == 3
    assert lasting_problems(swarm(8, gpus_per_peer=4)) == []
    assert [p.key for p in lasting_problems(swarm(1, gpus_per_peer=1.5))] == ["swarm.gpus_per_peer"]
    slow = {"slow": {"count": 1, "cpu_share": 0.4}}
    (problem,) = lasting_problems(swarm(1, node_classes=slow))
    assert problem.key == "swarm.node_classes.slow.cpu_share"


def test_a_cluster_without_cores_says_so() -> None:
    (problem,) = problems(swarm(2), [Room("head", 0)])
    assert "0 cores in all, and no autoscaler" in problem.allowed
