"""Requests to the kernel for the shape of a link, with and without netem."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from pyroute2.netlink.rtnl.tcmsg import sched_netem

from rayhive.cluster.testbed import veth
from rayhive.spec import Link

TOP, ROOT, CHILD, CLASS = 0xFFFFFFFF, 0x10000, 0x20000, 0x10001


class Interfaces:
    """One interface and its queueing disciplines."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.root: str | None = None

    def link_lookup(self, ifname: str) -> list[int]:
        return [7]

    def get_qdiscs(self, index: int) -> list[Any]:
        present = {"parent": TOP, "handle": ROOT if self.root else 0}

        class Found(dict):  # type: ignore[type-arg]
            def get_attr(found, name: str) -> str | None:
                return self.root

        return [Found(present)]

    def tc(self, do: str, kind: str | None, index: int, handle: int, **options: Any) -> None:
        self.calls.append((do, kind, handle, options.pop("parent", TOP), options))
        if handle == ROOT:
            self.root = None if do == "del" else kind


@pytest.fixture
def interfaces(monkeypatch: pytest.MonkeyPatch) -> Interfaces:
    made = Interfaces()

    @contextmanager
    def routes() -> Iterator[Interfaces]:
        yield made

    monkeypatch.setattr(veth, "routes", routes)
    return made


def steps(interfaces: Interfaces, link: Link, netem: bool) -> list[tuple[Any, ...]]:
    interfaces.calls.clear()
    veth.shape("x", link, netem, 1500)
    return [call[:4] for call in interfaces.calls]


def test_netem_delays_and_a_bucket_in_it_shapes(interfaces: Interfaces) -> None:
    link = Link(rate_mbit=10, delay_ms=20, loss=0.015)
    assert steps(interfaces, link, True) == [
        ("add", "netem", ROOT, TOP),
        ("add", "tbf", CHILD, CLASS),
    ]
    (*_, netem), (*_, bucket) = interfaces.calls
    assert netem == {"delay": 20_000, "loss": 1.5, "limit": 50_000}
    assert bucket["rate"] == 1_250_000 and bucket["limit"] > bucket["burst"] >= 1514
    encoded = sched_netem.get_parameters(netem)
    assert encoded["loss"] / 2**32 == pytest.approx(0.015, rel=1e-3)
    assert encoded["delay"] == sched_netem.get_parameters({"delay": 10_000})["delay"] * 2


def test_netem_is_replaced_and_removed(interfaces: Interfaces) -> None:
    steps(interfaces, Link(delay_ms=20), True)
    assert steps(interfaces, Link(loss=0.1), True) == [
        ("del", None, ROOT, TOP),
        ("add", "netem", ROOT, TOP),
    ]
    assert steps(interfaces, Link(rate_mbit=5), True) == [
        ("del", None, ROOT, TOP),
        ("add", "tbf", ROOT, TOP),
    ]
    assert steps(interfaces, Link(), True) == [("del", None, ROOT, TOP)]
    assert steps(interfaces, Link(), True) == []


def test_without_netem_a_rate_changes_in_place(interfaces: Interfaces) -> None:
    assert steps(interfaces, Link(rate_mbit=5, delay_ms=9), False) == [("add", "tbf", ROOT, TOP)]
    assert steps(interfaces, Link(rate_mbit=6, loss=0.1), False) == [("change", "tbf", ROOT, TOP)]
    assert steps(interfaces, Link(delay_ms=9), False) == [("del", None, ROOT, TOP)]
    assert steps(interfaces, Link(delay_ms=9), False) == []
