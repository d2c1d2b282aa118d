"""Claims: replicates that have their nodes to themselves, and how many run at the same time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayhive.cluster.replicate.claims import (
    Choice,
    can_be_claimed,
    choose,
    claim_name,
    most_at_once,
    shape,
    spread,
)
from rayhive.cluster.replicate.placement import Bundle, Room, bundles
from rayhive.spec import SwarmConfig


def swarm(peers: int = 2, **settings: Any) -> SwarmConfig:
    return SwarmConfig.model_validate({"peers": peers, **settings})


def nodes(*cpus: float, **fields: Any) -> list[Room]:
    return [
        Room(f"n{index}", count, address=f"10.0.0.{index}", **fields)
        for index, count in enumerate(cpus)
    ]


def free(rooms: Sequence[Room], taken: Mapping[str, float] = {}) -> dict[str, dict[str, float]]:
    """Return the free resources of nodes of which a part of the claim is taken."""
    return {
        room.node: {
            "CPU": room.cpus,
            "GPU": room.gpus,
            claim_name(room): 1.0 - taken.get(room.node, 0.0),
        }
        for room in rooms
    }


def names(choice: Choice | None) -> list[str] | None:
    return None if choice is None else [room.node for room in choice.nodes]


def test_peers_are_spread_over_the_nodes_and_share_them_evenly() -> None:
    found = spread([Bundle(1.0, 0)] * 5, nodes(4, 4, 4))
    assert found is not None and shape(found) == [1, 2, 2]
    assert spread([Bundle(1.0, 0)] * 5, nodes(2, 2)) is None


def test_a_peer_goes_only_where_its_labels_and_gpus_are() -> None:
    rooms = [Room("plain", 8), Room("gpu", 2, 1), Room("slow", 2, labels={"speed": "slow"})]
    asked = [Bundle(1, 0), Bundle(1, 0.5), Bundle(1, 0, {"speed": "slow"})]
    found = spread(asked, rooms)
    assert found is not None
    assert [room.node for room in found] == ["plain", "gpu", "slow"]


def test_a_claim_is_the_whole_of_each_node() -> None:
    rooms = nodes(2, 2)
    choice = choose([Bundle(0.5, 0)] * 5, rooms, free(rooms), shared=False)
    assert choice is not None
    parts: dict[str, float] = defaultdict(float)
    for resources in choice.resources([Bundle(0.5, 0)] * 5):
        assert resources.pop("CPU") == 0.5
        for name, part in resources.items():
            parts[name] += part
    assert dict(parts) == pytest.approx({claim_name(room): 1.0 for room in rooms}, abs=1e-9)


def test_replicates_take_nodes_that_no_other_has_claimed() -> None:
    rooms = nodes(4, 4, 4, 4)
    asked = bundles(swarm(2), rooms)
    assert names(choose(asked, rooms, free(rooms), False)) == ["n0", "n1"]
    assert names(choose(asked, rooms, free(rooms, {"n0": 1.0, "n1": 1.0}), False)) == ["n2", "n3"]
    # a trace of one that shares is enough to keep one away that does not
    assert names(choose(asked, rooms, free(rooms, {"n0": 2e-4}), False)) == ["n1", "n2"]
    assert names(choose(asked, rooms, free(rooms, {"n0": 2e-4}), True)) == ["n0", "n1"]
    assert names(choose(asked, rooms, free(rooms, {"n0": 1.0}), True)) == ["n1", "n2"]
    # one that shares lets one go first that waits for a node of its own
    waited = frozenset([claim_name(rooms[0])])
    assert names(choose(asked, rooms, free(rooms), True, waited)) == ["n1", "n2"]


def test_a_swarm_waits_rather_than_crowding_on_fewer_nodes_than_it_should() -> None:
    rooms = nodes(8, 8, 8)
    asked = bundles(swarm(2), rooms)
    assert choose(asked, rooms, free(rooms, {"n0": 1.0, "n1": 1.0}), shared=False) is None


def test_nodes_whose_cores_another_program_uses_are_left_out() -> None:
    rooms = nodes(2, 2, 2)
    busy = free(rooms)
    busy["n0"]["CPU"] = 0.5
    assert names(choose([Bundle(1.0, 0)] * 2, rooms, busy, shared=False)) == ["n1", "n2"]


@pytest.mark.parametrize(
    ("peers", "cpus", "settings", "expected"),
    [
        (2, [2], {}, 1),
        (8, [2], {}, 1),
        (2, [16], {}, 1),  # one node is for one replicate
        (2, [16], {"share_nodes": True}, 8),
        (2, [16], {"share_nodes": True, "threads_per_peer": 4}, 2),
        (8, [2], {"share_nodes": True}, 1),  # not even one has all of its cores
        (2, [4] * 6, {}, 3),
        (2, [4] * 7, {}, 3),
        (4, [4] * 6, {}, 1),
        (3, [1, 1, 4, 4, 4, 4], {}, 2),
    ],
)
def test_as_many_run_at_once_as_have_nodes_or_cores_of_their_own(
    peers: int, cpus: list[float], settings: dict[str, Any], expected: int
) -> None:
    assert most_at_once(swarm(peers, **settings), nodes(*cpus)) == expected


def test_peers_that_join_later_need_room_too() -> None:
    shared = swarm(2, share_nodes=True)
    assert most_at_once(shared, nodes(12)) == 6
    assert most_at_once(shared, nodes(12), joining=1) == 4


def test_node_classes_bound_the_number_by_their_nodes() -> None:
    classes = {
        "fast": {"count": 1, "labels": {"speed": "fast"}},
        "slow": {"count": 1, "labels": {"speed": "slow"}},
    }
    fast, slow = nodes(2, 2, labels={"speed": "fast"}), nodes(2, 2, 2, labels={"speed": "slow"})
    rooms = [*fast, *(Room(f"s{r.node}", 2, 0, r.labels, f"s{r.address}") for r in slow)]
    assert most_at_once(swarm(2, node_classes=classes), rooms) == 2


def test_nodes_behind_one_address_cannot_be_told_apart() -> None:
    same = [Room("a", 4, address="127.0.0.1"), Room("b", 4, address="127.0.0.1")]
    assert not can_be_claimed(same) and can_be_claimed(same[:1])
    assert most_at_once(swarm(1), same) == 1


@given(
    peers=st.integers(1, 5),
    cpus=st.lists(st.integers(1, 6), min_size=1, max_size=6),
)
def test_that_many_replicates_find_nodes_one_after_the_other(peers: int, cpus: list[int]) -> None:
    rooms, config = nodes(*map(float, cpus)), swarm(peers)
    asked = bundles(config, rooms)
    taken: dict[str, float] = {}
    for _ in range(most_at_once(config, rooms)):
        choice = choose(asked, rooms, free(rooms, taken), shared=False)
        assert choice is not None
        assert not {*taken} & {room.node for room in choice.nodes}
        taken |= {room.node: 1.0 for room in choice.nodes}
