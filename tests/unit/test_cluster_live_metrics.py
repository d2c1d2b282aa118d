"""Gauges of a process, which Ray forgets if they are not set again."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator

import pytest

from rayhive.cluster import live_metrics
from rayhive.cluster.live_metrics import ReplicateMetrics, SweepMetrics
from rayhive.events import PeerLost, Round
from tests.fixtures.logs import make_spec


class Ray:
    """Metrics of Ray, and whether the process is connected."""

    def __init__(self) -> None:
        self.connected = True
        self.set_to: queue.Queue[tuple[str, float, dict[str, str]]] = queue.Queue()

    def metric(self, kind: str, name: str, *labels: object) -> Gauge:
        return Gauge(self, name)


class Gauge:
    def __init__(self, ray: Ray, name: str) -> None:
        self.ray, self.name = ray, name

    def __hash__(self) -> int:
        return hash(self.name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Gauge) and other.name == self.name

    def set(self, value: float, tags: dict[str, str]) -> None:
        self.ray.set_to.put((self.name, value, tags))

    def inc(self, value: float, tags: dict[str, str]) -> None:
        """Counters are kept by Ray."""


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ray]:
    made = Ray()
    monkeypatch.setattr(live_metrics, "REPEAT_S", 0.001)
    monkeypatch.setattr(live_metrics, "_metric", made.metric)
    monkeypatch.setattr(live_metrics, "_connected", lambda: made.connected)
    yield made
    leave(made)


def leave(ray: Ray) -> None:
    """Leave Ray, and wait for the thread that notices it."""
    ray.connected = False
    for thread in threading.enumerate():
        if thread.name == "gauges":
            thread.join(20)
            assert not thread.is_alive()


def test_a_gauge_is_set_again_until_the_process_leaves_ray(ray: Ray) -> None:
    metrics = SweepMetrics("study", 3)
    metrics.ended("completed")
    metrics.ended("completed")
    left = ("replicates_left", 1, {"study": "study"})
    ended = ("replicates", 2, {"study": "study", "state": "completed"})
    last = [ray.set_to.get(timeout=20) for _ in range(20)][-4:]  # the calls set four
    assert last.count(left) == last.count(ended) == 2
    leave(ray)
    ray.connected = True
    metrics.ended("failed")
    assert ("replicates", 1, {"study": "study", "state": "failed"}) in list(ray.set_to.queue)


LOST = PeerLost(peer="peer-0", exit_code=-9, reason="killed by signal 9")


@pytest.mark.parametrize(
    "end",
    [ReplicateMetrics.end, lambda metrics: metrics.heard(LOST)],
    ids=["of the replicate", "of the peer"],
)
def test_gauges_of_a_peer_end(ray: Ray, end: Callable[[ReplicateMetrics], None]) -> None:
    """A supervisor runs many replicates, and must not repeat the gauges of all of them."""
    SweepMetrics("study", 3).ended("completed")
    metrics = ReplicateMetrics(make_spec())
    round_ = Round(round=1, outcome="averaged", samples=8, live_peers=2, peer="peer-0")
    metrics.heard(round_, samples_per_s=9.0)
    seen = [ray.set_to.get(timeout=20)[:2] for _ in range(40)]
    assert seen.count(("live_peers", 2)) > 2
    end(metrics)
    while ray.set_to.get(timeout=20)[:2] != ("live_peers", 0.0):
        pass
    later = {ray.set_to.get(timeout=20)[0] for _ in range(20)}
    assert later == {"replicates", "replicates_left"}
