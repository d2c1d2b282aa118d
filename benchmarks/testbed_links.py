"""Cost of a testbed's relay, which replaces netem, compared with the same link without it.

Claims, for a link of 100 Mbit/s and packets of 9000 bytes:

* with 10 ms of delay in each direction, a TCP connection transfers at least 0.9 times as much as
  without delay;
* the relay needs at most a quarter of a core;
* packets are at most a millisecond late: the median compared with the fastest of each measurement.

The two links take turns of two seconds, each with a connection of its own, after one second of
warm-up. One node sends to the switch, so the packets pass through one relay.
"""

from __future__ import annotations

import argparse
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

sys.path.insert(0, __file__.rsplit("/", 2)[0])

from benchmarks.claims import Claim, print_claims
from benchmarks.ratios import paired_ratio
from benchmarks.shaped_peers import skipped
from benchmarks.swarm import conditions
from rayhive.cluster.testbed import Testbed, TestbedConfig, namespaces
from rayhive.cluster.testbed.link_probe import measure_link
from rayhive.spec import Link

RATE_MBIT, DELAY_MS = 100.0, 10.0
LINKS = (Link(rate_mbit=RATE_MBIT, delay_ms=DELAY_MS), Link(rate_mbit=RATE_MBIT))
WARM_UP_S, TURN_S = 1.0, 2.0
_TICKS_PER_S = 100


class Sink:
    """Server at the switch that counts the received bytes."""

    def __init__(self, server: socket.socket) -> None:
        self.received = 0
        self._server = server
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            connection, _ = self._server.accept()
            with connection:
                while chunk := connection.recv(1 << 18):
                    self.received += len(chunk)


@contextmanager
def one_link() -> Iterator[Testbed]:
    config = TestbedConfig.model_validate({"name": "benchmark-links", "node_classes": {"a": {}}})
    with Testbed(config, ray=False) as testbed:
        yield testbed


def processor_s(command: str) -> float:
    """Return the CPU time of the processes whose command line contains ``command`` [s]."""
    total = 0.0
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if command in path.read_text():
                fields = path.with_name("stat").read_text().rpartition(")")[2].split()
                total += (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
        except OSError:
            continue
    return total


def turn(testbed: Testbed, link: Link, sink: Sink, to: tuple[str, int]) -> tuple[float, float]:
    """Return the rate of a connection over the link [Mbit/s], and the relay's share of a core."""
    testbed.link(0).set(link)
    relay = str(testbed.state.folder / "relay-")
    where = testbed.nodes[0].namespace
    with namespaces.inside(where, lambda: socket.create_connection(to, 10)) as connection:
        block, began, before = bytes(1 << 16), 0.0, (0, 0.0)
        start = time.monotonic()
        while (now := time.monotonic()) < start + WARM_UP_S + TURN_S:
            if not began and now >= start + WARM_UP_S:
                began, before = now, (sink.received, processor_s(relay))
            connection.sendall(block)
        seconds = time.monotonic() - began
        passed = (sink.received - before[0]) * 8e-6 / seconds
        return passed, (processor_s(relay) - before[1]) / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=8)
    arguments = parser.parse_args()
    if skipped():
        return
    print(conditions())
    with one_link() as testbed:
        if testbed.state.netem:
            print("skipped: the kernel has netem, so there is no relay")
            return
        address = testbed.state.data_gateway
        server = namespaces.inside(testbed.state.switch, lambda: socket.create_server((address, 0)))
        sink, to = Sink(server), server.getsockname()
        rates: list[list[float]] = [[], []]
        shares, late = [], []
        for _ in range(arguments.turns):
            for kind, link in enumerate(LINKS):
                passed, share = turn(testbed, link, sink, to)
                rates[kind].append(passed)
                if not kind:
                    shares.append(share)
                    seen = measure_link(testbed.state, testbed.nodes[0], link, ("rtt",))
                    late.append(seen.jitter_ms if seen.jitter_ms is not None else np.inf)
            print(f"with delay {rates[0][-1]:.1f}, without {rates[1][-1]:.1f} Mbit/s", flush=True)
    ratio = paired_ratio(*rates)
    print_claims(
        Claim("TCP with 10 ms of delay | without", *ratio, "x", 0.9, at_least=True),
        claim("relay at 100 Mbit/s: share of a core", shares, "", 0.25),
        claim("relay: delay of the median packet beyond the quickest", late, "ms", 1.0),
    )


def claim(text: str, values: list[float], unit: str, bound: float) -> Claim:
    """Return the claim that the median of ``values`` is at most ``bound``."""
    generator = np.random.default_rng(0)
    drawn = np.median(generator.choice(values, (2000, len(values))), axis=1)
    low, high = np.percentile(drawn, [2.5, 97.5])
    median = float(np.median(values))
    return Claim(text, median, float(low), float(high), unit, bound, at_least=False)


if __name__ == "__main__":
    main()
