"""Links between peers on one Linux machine: a network namespace and a shaped veth pair for each.

The namespaces have no names. Each exists as long as a process in it. These processes end with the
benchmark, even if it is killed, and the kernel then removes the veth pairs and the switch.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

#: Burst [bytes] and queue [ms] of a link.
BURST, QUEUE = 16_000, 100
_TOOLS = ("ip", "nsenter", "tc", "unshare")

_RECEIVE = """
import socket, time
server = socket.create_server((HOST, 5201))
print("listening", flush=True)
connection, _ = server.accept()
received, began = len(connection.recv(1 << 16)), time.perf_counter()
size = 0
while chunk := connection.recv(1 << 16):
    size += len(chunk)
print(size * 8e-6 / (time.perf_counter() - began), flush=True)
"""
_SEND = """
import socket
with socket.create_connection((HOST, 5201), timeout=10) as connection:
    connection.settimeout(60)
    connection.sendall(bytes(SIZE))
"""


@dataclass(frozen=True)
class Links:
    """Addresses of the peers, and the links between them.

    Args:
        rate_mbit: Rate of a peer's link in each direction [Mbit/s].
        hosts: Address of each peer.
        launchers: Prefix of each peer's command; empty if the links are not shaped.
    """

    rate_mbit: float
    hosts: list[str]
    launchers: list[list[str]]

    @property
    def shaped(self) -> bool:
        """Whether the links are shaped; otherwise the averagers have to throttle."""
        return bool(self.launchers)

    def measured_mbit(self, seconds: float = 2.0) -> float:
        """Return the rate from the second peer to the first [Mbit/s], measured over ``seconds``."""
        size = round(self.rate_mbit * 1e6 / 8 * seconds)
        assign = f"HOST = {self.hosts[0]!r}; SIZE = {size}\n"
        receive, send = (
            [*launcher, sys.executable, "-c", assign + code]
            for launcher, code in zip(self.launchers, (_RECEIVE, _SEND), strict=False)
        )
        with subprocess.Popen(receive, stdout=subprocess.PIPE, text=True) as receiver:
            try:
                assert receiver.stdout is not None
                receiver.stdout.readline()
                subprocess.run(send, check=True, timeout=60)
                return float(receiver.stdout.readline())
            finally:
                receiver.kill()


def become_root() -> None:
    """Restart the script as root of a user namespace, if the kernel allows that."""
    command = ["unshare", "--user", "--map-root-user"]
    if os.geteuid() and shutil.which("unshare") and _works([*command, "--net", "true"]):
        os.execvp("unshare", [*command, sys.executable, *sys.argv])


@contextlib.contextmanager
def links(peers: int, rate_mbit: float, shape: bool = True) -> Iterator[Links]:
    """Connect each peer to a switch over its own link.

    Args:
        peers: Number of peers.
        rate_mbit: Rate of a link in each direction [Mbit/s].
        shape: Whether to shape the links if possible.

    Yields:
        The links; not shaped if the machine does not allow it.
    """
    tools = all(map(shutil.which, _TOOLS))
    if not (shape and tools and _works(["unshare", "--net", "true"])):
        yield Links(rate_mbit, ["127.0.0.1"] * peers, [])
        return
    with contextlib.ExitStack() as stack:
        switch, *namespaces = [stack.enter_context(_namespace()) for _ in range(peers + 1)]
        _batch(switch, "ip", ["link add switch type bridge", "link set switch up"])
        hosts = [f"10.77.0.{index + 1}" for index in range(peers)]
        tbf = f"root tbf rate {rate_mbit}mbit burst {BURST} latency {QUEUE}ms"
        for index, (namespace, host) in enumerate(zip(namespaces, hosts, strict=True)):
            port = f"port{index}"
            pair = f"link add {port} type veth peer name eth0 netns {namespace}"
            attach = f"link set {port} master switch up"
            _batch(switch, "ip", [pair, attach])
            up = ["link set lo up", f"addr add {host}/24 dev eth0", "link set eth0 up"]
            _batch(namespace, "ip", up)
            _batch(namespace, "tc", [f"qdisc add dev eth0 {tbf}"])
            _batch(switch, "tc", [f"qdisc add dev {port} {tbf}"])
        yield Links(rate_mbit, hosts, [_enter(namespace) for namespace in namespaces])


@contextlib.contextmanager
def _namespace() -> Iterator[int]:
    """Yield the id of a process that holds a network namespace until its input is closed."""
    keeper = subprocess.Popen(
        ["unshare", "--net", "sh", "-c", "echo ready; exec cat"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        assert keeper.stdout is not None
        if not keeper.stdout.readline():
            raise OSError("a network namespace could not be created")
        yield keeper.pid
    finally:
        keeper.kill()
        keeper.communicate()


def _enter(namespace: int) -> list[str]:
    return ["nsenter", f"--net=/proc/{namespace}/ns/net"]


def _batch(namespace: int, tool: str, lines: Sequence[str]) -> None:
    command = [*_enter(namespace), tool, "-batch", "-"]
    subprocess.run(command, input="\n".join(lines) + "\n", text=True, check=True)


def _works(command: list[str]) -> bool:
    return subprocess.run(command, capture_output=True).returncode == 0


class Throttle:
    """Link in memory that a peer's processes share: a sender waits as long as its bytes take.

    It has to be created before the processes fork.

    Args:
        rate_mbit: Rate [Mbit/s].
    """

    def __init__(self, rate_mbit: float) -> None:
        import multiprocessing

        self._bytes_per_s = rate_mbit * 1e6 / 8
        self._free = multiprocessing.get_context("fork").Value("d", 0.0)

    def wait_s(self, size: int) -> float:
        """Reserve the link for ``size`` bytes, and return the time until they are sent [s]."""
        now = time.monotonic()
        with self._free.get_lock():
            self._free.value = max(now, self._free.value) + size / self._bytes_per_s
            return float(self._free.value) - now

    def install(self) -> None:
        """Throttle the messages that this peer's averagers send in an all-reduce."""
        import asyncio

        from rayhive.averaging import averager

        throttle = self

        class ThrottledRunner(averager.MeasuredAllReduce):
            async def _generate_input_for_peer(self, peer_index):  # type: ignore[no-untyped-def]
                async for message in super()._generate_input_for_peer(peer_index):
                    await asyncio.sleep(throttle.wait_s(message.ByteSize()))
                    yield message

            async def rpc_aggregate_part(self, stream, context):  # type: ignore[no-untyped-def]
                async for message in super().rpc_aggregate_part(stream, context):
                    await asyncio.sleep(throttle.wait_s(message.ByteSize()))
                    yield message

        averager.MeasuredAllReduce = ThrottledRunner  # type: ignore[misc]
