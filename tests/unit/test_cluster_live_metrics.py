"""Gauges of a process, which Ray forgets if they are not set again."""

from __future__ import annotations

import queue
import threading

import pytest

from rayhive.cluster import live_metrics
from rayhive.cluster.live_metrics import SweepMetrics


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


def test_a_gauge_is_set_again_until_the_process_leaves_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = Ray()
    monkeypatch.setattr(live_metrics, "REPEAT_S", 0.001)
    monkeypatch.setattr(live_metrics, "_metric", ray.metric)
    monkeypatch.setattr(live_metrics, "_connected", lambda: ray.connected)
    metrics = SweepMetrics("study", 3)
    metrics.ended("completed")
    metrics.ended("completed")
    left = ("replicates_left", 1, {"study": "study"})
    ended = ("replicates", 2, {"study": "study", "state": "completed"})
    last = [ray.set_to.get(timeout=20) for _ in range(20)][-4:]  # the calls set four
    assert last.count(left) == last.count(ended) == 2
    (thread,) = [each for each in threading.enumerate() if each.name == "gauges"]
    ray.connected = False
    thread.join(20)
    assert not thread.is_alive()
    ray.connected = True
    metrics.ended("failed")
    assert ("replicates", 1, {"study": "study", "state": "failed"}) in list(ray.set_to.queue)
    ray.connected = False
