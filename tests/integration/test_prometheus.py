"""Metrics for Prometheus, as an embedded Ray serves them."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Mapping
from multiprocessing import get_context
from pathlib import Path

import pytest

from rayhive.cluster.cluster import Cluster
from rayhive.cluster.embedded import metrics_port
from rayhive.cluster.live_metrics import COUNTERS, GAUGES, OF_SWEEP, PORT, SweepMetrics
from rayhive.errors import ConfigError
from tests.integration.cluster_harness import FAKE_FORKSERVER, eventually, free_port, replicate

#: One sample in Prometheus' text format.
SAMPLE = re.compile(r"^ray_rayhive_(\w+?)(?:_total)?\{(.*)\} ([0-9.e+-]+)$", re.M)
Samples = dict[tuple[str, str, str], float]


def scraped(port: int) -> Samples:
    """Return name, peer or state, and other label of the samples of rayhive, with their values."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            text = answer.read().decode()
    except OSError:
        return {}
    found: Samples = {}
    for name, labels, value in SAMPLE.findall(text):
        given: Mapping[str, str] = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        assert given["study"] == "study"
        who = given.get("peer") or given.get("state") or ""
        found[name, who, given.get("outcome", "")] = float(value)
    return found


@pytest.mark.slow
@pytest.mark.cluster
def test_an_embedded_ray_serves_the_metrics_of_its_replicates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a process of its own: Ray exports a driver's metrics for the first Ray of a process."""
    port = free_port()
    monkeypatch.setenv(PORT, str(port))
    driver = get_context("spawn").Process(target=serve, args=(tmp_path, port))
    driver.start()
    driver.join()
    assert driver.exitcode == 0


def serve(folder: Path, port: int) -> None:
    """Run a replicate, and check what is served at a port meanwhile and afterwards."""
    with Cluster.connect("local", forkserver_command=FAKE_FORKSERVER) as cluster:
        handle = cluster.start(replicate(folder, rounds=None))
        sweep = SweepMetrics("study", 3)
        sweep.ended("completed")
        samples: Samples = {}

        def complete() -> bool:
            samples.clear()
            samples.update(scraped(port))
            return {name for name, *_ in samples} >= {"rounds", "replicates_left"}

        eventually(complete, 120.0)
        for peer in ("peer-0", "peer-1"):
            rounds = samples["rounds", peer, "averaged"]
            # Ray may have read one counter before a round and the other one after it
            assert rounds > 0 and 4 * rounds - samples["samples", peer, ""] in (0, 4)
            assert samples["samples_per_second", peer, ""] > 0
        assert samples["replicates", "completed", ""] == 1
        assert samples["replicates_left", "", ""] == 2
        known = {*COUNTERS, *GAUGES, *OF_SWEEP}
        assert {name for name, *_ in samples} <= known
        handle.stop("enough")
        handle.wait(40.0)
        handle.release()
        gauges = [(name, peer, "") for name in GAUGES for peer in ("peer-0", "peer-1")]
        eventually(lambda: {scraped(port).get(gauge) for gauge in gauges} == {0.0}, 120.0)


@pytest.mark.parametrize("text", ["http", "0", "65536", "-1"])
def test_a_port_that_is_none_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PORT, text)
    with pytest.raises(ConfigError, match=PORT):
        metrics_port()
