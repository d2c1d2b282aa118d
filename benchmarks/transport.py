"""Time of 100 MB between two peers over a link, compared with gloo and with the network daemon.

Claim: on loopback, 100 MB over an encrypted link take at most 1.5 times as long as gloo's send, and
at most a fifth of the time through the daemon, which carried them before.

Each way sends 25 million float32 in messages of 512 KiB from one process to the other, and waits
for a short answer. A turn takes all ways, one after the other; the first turn does not count.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import numpy as np
import torch

sys.path.insert(0, __file__.rsplit("/", 2)[0])

from benchmarks.claims import Claim, print_claims
from benchmarks.ratios import paired_ratio
from benchmarks.swarm import conditions, run_swarm

ELEMENTS, PART = 25_000_000, 1 << 17
WAYS = ("link", "plain link", "gloo", "daemon")

Way = Callable[[], Awaitable[None]]


def parts() -> list[torch.Tensor]:
    """Return the parts that are sent."""
    return list(torch.ones(ELEMENTS).split(PART))


async def link_way(index: int, p2p: Any, other: Any, plain: bool) -> tuple[Way, Any]:
    """Return the way over a link, which sums up the parts at the second peer."""

    from hivemind.compression import CompressionInfo, NoCompression

    from rayhive.averaging.parts import PartMessage, decode, encode
    from rayhive.averaging.transport import AGGREGATE, aggregate_over, answering
    from rayhive.membership.peer_links import PeerLinks

    codec, sent = NoCompression(), parts()

    async def count(stream: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        count = 0
        async for message in stream:
            count += decode(message.tensor_part).numel()
        yield PartMessage(count)

    async def messages() -> AsyncIterator[Any]:
        for number, part in enumerate(sent):
            info = CompressionInfo.from_tensor(part, key=number)
            yield PartMessage(0, encode(part, info, codec, 0))

    links = PeerLinks(f"benchmark {plain}", True, plain)
    await links.open(p2p, {AGGREGATE: answering(count)})

    async def send() -> None:
        while (link := await links.get(other)) is None:
            await asyncio.sleep(0.1)
        async for answer in aggregate_over(link, messages()):
            assert answer.code == ELEMENTS, answer.code

    return send, links


async def daemon_way(p2p: Any, other: Any) -> Way:
    """Return the way through the daemon, with the messages of an all-reduce."""
    from hivemind.compression import deserialize_torch_tensor, serialize_torch_tensor
    from hivemind.proto import averaging_pb2

    sent = parts()

    async def count(stream: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        elements = 0
        async for message in stream:
            elements += deserialize_torch_tensor(message.tensor_part).numel()
            if elements == ELEMENTS:
                yield averaging_pb2.AveragingData(group_id=str(elements).encode())
                return

    async def messages() -> AsyncIterator[Any]:
        for part in sent:
            yield averaging_pb2.AveragingData(tensor_part=serialize_torch_tensor(part))

    kind = averaging_pb2.AveragingData
    await p2p.add_protobuf_handler("count", count, kind, stream_input=True, stream_output=True)

    async def send() -> None:
        answers = await p2p.iterate_protobuf_handler(other, "count", messages(), kind)
        async for answer in answers:
            assert answer.group_id == str(ELEMENTS).encode()

    return send


def gloo_way(index: int, port: int) -> Callable[[], None]:
    """Return the way of gloo; both peers call it."""
    from torch import distributed

    distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=index, world_size=2
    )
    tensor, answer = torch.ones(ELEMENTS), torch.ones(1)

    def call() -> None:
        if index == 0:
            distributed.send(tensor, 1)
            distributed.recv(answer, 1)
        else:
            distributed.recv(tensor, 0)
            distributed.send(answer, 0)

    return call


async def run_peer(index: int, settings: dict[str, Any]) -> dict[str, list[float]]:
    """Send (peer 0), or receive (peer 1); return the seconds of each turn by way."""
    from hivemind.p2p import P2P, PeerID

    torch.set_num_threads(1)
    given = settings["initial_peers"]
    p2p = await P2P.create(
        initial_peers=[each for each in given if "/p2p/" in each] or None,
        host_maddrs=["/ip4/127.0.0.1/tcp/0"],
        use_relay=False,
    )
    if index == 0:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        visible = [str(address) for address in await p2p.get_visible_maddrs()]
        print(json.dumps([*visible, str(port)]), flush=True)
    else:
        port = int(given[-1])
        print("[]", flush=True)
    loop = asyncio.get_running_loop()
    gloo = await loop.run_in_executor(None, gloo_way, index, port)
    names: list[Any] = [None, None]

    def exchange() -> None:
        from torch import distributed

        distributed.all_gather_object(names, p2p.peer_id.to_base58())

    await loop.run_in_executor(None, exchange)
    other = PeerID.from_base58(names[1 - index])
    link, links = await link_way(index, p2p, other, plain=False)
    plain, plain_links = await link_way(index, p2p, other, plain=True)
    daemon = await daemon_way(p2p, other)
    ways: dict[str, Way] = {"link": link, "plain link": plain, "daemon": daemon}
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for turn in range(settings["turns"] + 1):
        for way in WAYS:
            await loop.run_in_executor(None, exchange)  # both are ready
            began = time.perf_counter()
            if way == "gloo":
                await loop.run_in_executor(None, gloo)
            elif index == 0:
                await ways[way]()
            if turn:
                seconds[way].append(time.perf_counter() - began)
    await loop.run_in_executor(None, exchange)
    await asyncio.gather(links.close(), plain_links.close())
    await p2p.shutdown()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--peer", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peer is not None:
        settings = json.loads(sys.stdin.readline())
        result = asyncio.run(run_peer(arguments.peer, settings))
        print(json.dumps(result), flush=True)
        return
    print(conditions())
    seconds, _ = run_swarm(__file__, 2, {"turns": arguments.turns}, timeout=300)
    for way in WAYS:
        low, median, high = np.percentile(seconds[way], [5, 50, 95]) * 1e3
        print(f"{way:>10}: {median:5.0f} ms (5-95 %: {low:.0f}-{high:.0f})")
    against_gloo = paired_ratio(seconds["link"], seconds["gloo"])
    plain = paired_ratio(seconds["plain link"], seconds["gloo"])
    daemon = paired_ratio(seconds["daemon"], seconds["link"])
    print_claims(
        Claim("100 MB: encrypted link | gloo", *against_gloo, "x", 1.5, at_least=False),
        Claim("100 MB: plain link | gloo", *plain, "x", 1.5, at_least=False),
        Claim("100 MB: daemon | encrypted link", *daemon, "x", 5.0, at_least=True),
    )


if __name__ == "__main__":
    main()
