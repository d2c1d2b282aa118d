"""Peers on shaped links, forked from one process that has imported torch and Lightning.

Every peer runs on a node of a testbed: a network namespace with a shaped link. A peer is forked for
each turn of a benchmark, so a turn begins within a second or two. hivemind is imported by the peers
and not before, because its locks must not be shared between them.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.swarm import die_with_parent, end_on_sigterm

PRELOAD = ["torch", "torch.distributed", "lightning.pytorch", "numpy"]
#: Interface of a node to its shaped link.
INTERFACE = "data0"
#: Smallest round trip for which packets are delayed if the kernel has no netem [ms]: the relay that
#: replaces netem is not accurate below, and costs CPU time.
RELAYED_MS = 5.0
#: Longest wait for processes of ended peers [s].
END_S = 10.0


class Wire(NamedTuple):
    """Bytes that passed the interface of a node since its creation."""

    received: int
    sent: int


def wire(interface: str = INTERFACE) -> Wire:
    """Return the counters of an interface of this peer."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == interface:
            values = counters.split()
            return Wire(int(values[0]), int(values[8]))
    raise OSError(f"no interface {interface}")


@dataclass
class Seat:
    """Place of one peer in a turn.

    Attributes:
        index: Number of the peer, from 0.
        hosts: Addresses of all peers.
        interface: Interface to the other peers.
    """

    index: int
    hosts: list[str]
    _connection: Connection
    interface: str = INTERFACE

    def tell(self, value: Any) -> None:
        """Send what the other peers need to find peer 0; every peer calls it once."""
        self._connection.send(value)

    def found(self) -> Any:
        """Return what peer 0 told; None on peer 0."""
        return self._connection.recv()


@dataclass
class Nodes:
    """Nodes on shaped links, or this machine.

    Attributes:
        hosts: Address of each node.
        namespaces: Network namespace of each node; empty for that of this process.
        rate_mbit: Measured rate of the first node's link [Mbit/s].
        rtt_ms: Measured round trip between two nodes [ms].
    """

    hosts: list[str]
    namespaces: list[str]
    rate_mbit: float
    rtt_ms: float

    def run(
        self,
        peer: Callable[[Seat, dict[str, Any]], Any],
        settings: dict[str, Any],
        timeout: float,
    ) -> list[Any]:
        """Run a function on every node and return the results.

        Args:
            peer: The function. It calls ``tell`` and then ``found`` of its seat.
            settings: Its second argument.
            timeout: Time limit of the turn [s].

        Raises:
            RuntimeError: A peer failed or took too long; the end of the log is printed.
        """
        end_on_sigterm()
        deadline = time.monotonic() + timeout
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        connections: list[Connection] = []
        processes = []
        with tempfile.NamedTemporaryFile("w+", suffix=".log") as log:
            try:
                for index, namespace in enumerate(self.namespaces):
                    near, far = context.Pipe()
                    arguments = (peer, index, self.hosts, namespace, settings, far, log.name)
                    process = context.Process(target=_child, args=arguments)
                    process.start()
                    far.close()
                    connections.append(near)
                    processes.append(process)
                first, *others = connections
                first.send(None)
                told = _receive(first, deadline)  # it has to be there before the others look for it
                for connection in others:
                    connection.send(told)
                for connection in others:
                    _receive(connection, deadline)
                return [_receive(connection, deadline) for connection in connections]
            except (EOFError, ConnectionResetError, TimeoutError) as error:
                time.sleep(0.5)  # for the end of the log
                log.seek(0)
                sys.stderr.write(log.read()[-4000:])
                codes = [process.exitcode for process in processes]
                raise RuntimeError(f"a peer failed: {error!r}, exit codes {codes}") from error
            finally:
                for process in processes:
                    with contextlib.suppress(ProcessLookupError, TypeError):
                        os.killpg(process.pid, signal.SIGKILL)  # type: ignore[arg-type]
                    process.join()


def _receive(connection: Connection, deadline: float) -> Any:
    if not connection.poll(max(0.0, deadline - time.monotonic())):
        raise TimeoutError("it took too long")
    return connection.recv()


def _child(
    peer: Callable[[Seat, dict[str, Any]], Any],
    index: int,
    hosts: list[str],
    namespace: str,
    settings: dict[str, Any],
    connection: Connection,
    log: str,
) -> None:
    from pyroute2 import netns

    os.setsid()
    die_with_parent()
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    for number in (1, 2):
        os.dup2(output, number)
    if namespace:
        netns.setns(namespace)
    # hivemind's own processes are forks
    multiprocessing.set_start_method("fork", force=True)
    interface = INTERFACE if namespace else "lo"
    connection.send(peer(Seat(index, hosts, connection, interface), settings))
    connection.close()
    os._exit(0)  # threads of the libraries must not delay the next turn


def skipped() -> bool:
    """Return whether this machine can't shape links, and print why."""
    from rayhive.cluster.testbed import privilege

    lacking = privilege.lacking()
    if lacking is not None:
        print(f"skipped: {lacking}")
    return lacking is not None


def one_thread_each() -> None:
    """Let each peer compute in one thread, and hivemind report errors only."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"
    os.environ.setdefault("HIVEMIND_LOGLEVEL", "ERROR")


def on_loopback(peers: int) -> Nodes:
    """Return places for peers on this machine, without links."""
    one_thread_each()
    return Nodes(["127.0.0.1"] * peers, [""] * peers, rate_mbit=float("inf"), rtt_ms=0.0)


@contextlib.contextmanager
def nodes(
    peers: int, rate_mbit: float, rtt_ms: float, queue_s: float | None = None
) -> Iterator[Nodes]:
    """Make nodes with shaped links.

    Args:
        peers: Number of nodes.
        rate_mbit: Rate of each link in each direction [Mbit/s].
        rtt_ms: Round trip between two nodes [ms]. Without netem, round trips below 5 ms are those
            of the bare links.
        queue_s: Length of the queues, which are then all before the links to the nodes, as in a
            router: a sender's own queue would slow it down [s]. Default: that of a testbed.
    """
    from rayhive.cluster.node.processes import wait_until
    from rayhive.cluster.testbed import Testbed, TestbedConfig, namespaces, network
    from rayhive.cluster.testbed.link_probe import path
    from rayhive.spec import Link

    one_thread_each()
    shape = {"rate_mbit": rate_mbit}
    classes = {"node": {"count": peers, "link": shape}}
    config = TestbedConfig.model_validate(
        {"name": f"benchmark-{os.getpid()}", "node_classes": classes}
    )
    with Testbed(config, ray=False) as testbed:
        # a round trip passes two links in each direction
        link = Link(rate_mbit=rate_mbit, delay_ms=rtt_ms / 4)
        if testbed.state.netem or rtt_ms >= RELAYED_MS:
            for node in testbed.nodes:
                testbed.link(node.index).set(link)
        if queue_s is not None:
            for node in testbed.nodes:
                namespaces.inside(node.namespace, lambda: _unlimited(INTERFACE))
                name = network.port(node.index)
                deepen = functools.partial(_deepen, name, rate_mbit, queue_s)
                namespaces.inside(testbed.state.switch, deepen)
        first, second = testbed.nodes[:2]
        with path(testbed.state, first, second) as ends:
            delays = ends.delays(1.0)
            measured = ends.rate(0, link, testbed.state.mtu, 1.0)
        names = [node.namespace for node in testbed.nodes]
        yield Nodes(
            hosts=[node.data_address for node in testbed.nodes],
            namespaces=names,
            rate_mbit=measured,
            rtt_ms=sum(sorted(each)[len(each) // 2] for each in delays),
        )
        # torch's managers of shared memory remove that of ended peers, unless they are killed
        wait_until(lambda: not namespaces.processes(names), END_S)


def _unlimited(interface: str) -> None:
    """Remove the shape of an interface of the current namespace."""
    from pyroute2 import IPRoute

    with IPRoute() as ip:
        ip.tc("del", None, ip.link_lookup(ifname=interface)[0], 0x10000, parent=0xFFFFFFFF)


def _deepen(interface: str, rate_mbit: float, queue_s: float) -> None:
    """Lengthen the queue of a shaped interface of the current namespace."""
    from pyroute2 import IPRoute

    rate = round(rate_mbit * 1e6 / 8)
    options = {"rate": rate, "burst": 20_000, "limit": round(rate * queue_s)}
    with IPRoute() as ip:
        index = ip.link_lookup(ifname=interface)[0]
        ip.tc("change", "tbf", index, 0x10000, parent=0xFFFFFFFF, **options)
