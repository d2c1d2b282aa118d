"""Heartbeats beside bulk data on a slow link: no peer is falsely lost, no round incomplete.

Claims, for links of 10 Mbit/s and a round trip of 80 ms: in 100 rounds of 10 MB, and in one of
200 MB, no peer is taken for lost, and every averaging is complete. No peer is taken for lost either
while another one joins and downloads a state of 200 MB.

The sizes are those of the averaged gradients, which no lossless coding shortens. Peers run
``RayhiveOptimizer`` with the time limits of ``HivemindStrategy``. A loss is any moment at which a
live peer counts as dead for another one. The table has the times of the heartbeats' calls, which
take one round trip on an idle link.

``--queue`` makes the queue of a link deeper than its 0.1 s, and ``--congestion reno`` fills it, as
most routers and systems do. ``--daemon`` sends everything through the network daemon.
"""

from __future__ import annotations

import argparse
import inspect
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

sys.path.insert(0, __file__.rsplit("/", 2)[0])

from benchmarks.claims import Claim, print_claims
from benchmarks.shaped_peers import Nodes, Seat, nodes, skipped
from benchmarks.swarm import conditions

if TYPE_CHECKING:
    import torch

#: Time limit under ``make bench`` [s].
LIMIT_S = 7200
RATE_MBIT, RTT_MS, BATCH, SAMPLE_S = 10.0, 80.0, 4, 0.05
#: Longest time of a turn beyond that of its bytes [s].
SPARE_S = 180.0


@dataclass(frozen=True)
class Work:
    """Rounds of one turn.

    Attributes:
        megabytes: Size of the gradients [MB].
        rounds: Number of rounds.
        joins: Whether the last peer joins after the first round, and downloads the state.
    """

    megabytes: float
    rounds: int
    joins: bool = False

    def __str__(self) -> str:
        joining = ", a peer joins" if self.joins else ""
        return f"{self.rounds} x {self.megabytes:g} MB{joining}"


WORKS = (Work(10.0, 100), Work(200.0, 1), Work(200.0, 3, joins=True))


class Losses:
    """Counts the moments at which a live peer begins to count as dead, in a thread."""

    def __init__(self, view: Any) -> None:
        self.count, self._view, self._ended = 0, view, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        lost: frozenset[bytes] = frozenset()
        while not self._ended.wait(SAMPLE_S):
            with self._view.lock:
                now = self._view.lost()
            self.count, lost = self.count + len(now - lost), now

    def end(self) -> int:
        """Stop, and return the number of losses."""
        self._ended.set()
        self._thread.join()
        return self.count


def time_calls() -> list[float]:
    """Note the seconds of each heartbeat from now on; a failed one counts as infinite."""
    from rayhive.membership.heartbeat import HeartbeatService

    seconds: list[float] = []
    plain = HeartbeatService.call

    async def timed(self: HeartbeatService, peer: bytes, message: bytes) -> bytes:
        began, took = time.perf_counter(), float("inf")
        try:
            answer = await plain(self, peer, message)
            took = time.perf_counter() - began
        finally:
            seconds.append(took)
        return answer

    HeartbeatService.call = timed  # type: ignore[method-assign]
    return seconds


def random_numbers(size: int, seed: int) -> torch.Tensor:
    """Return numbers whose exponents are random too, so that a link cannot send them in less."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-32, 32, (size,), generator=generator)
    return torch.randn(size, generator=generator).mul_(torch.exp2(exponents.float()))


def tune(congestion: str | None) -> None:
    """Set the congestion control of this peer's node, and windows that fill a long queue."""
    if congestion is not None:
        folder = Path("/proc/sys/net/ipv4")
        (folder / "tcp_congestion_control").write_text(congestion)
        for name in ("tcp_rmem", "tcp_wmem"):
            (folder / name).write_text("4096 8000000 32000000")


def run_peer(seat: Seat, settings: dict[str, Any]) -> dict[str, Any]:
    """Train one peer; return its heartbeats, losses and rounds."""
    import hivemind
    import torch

    from rayhive.averaging.transport import no_link
    from rayhive.membership.peer_links import PeerLinks
    from rayhive.optim.optimizer import RayhiveOptimizer
    from rayhive.strategy.strategy import HivemindStrategy

    torch.set_num_threads(1)
    tune(settings["congestion"])
    if settings["daemon"]:
        PeerLinks.get = lambda self, peer: no_link(peer)  # type: ignore[method-assign]
    calls = time_calls()
    first = seat.found()
    dht = hivemind.DHT(
        initial_peers=first,
        host_maddrs=[f"/ip4/{seat.hosts[seat.index]}/tcp/0"],
        use_relay=False,
        start=True,
    )
    seat.tell([str(address) for address in dht.get_visible_maddrs()])
    limits = inspect.signature(HivemindStrategy.__init__).parameters
    size = round(settings["megabytes"] * 250_000)
    parameter = torch.nn.Parameter(random_numbers(size, seed=0))
    gradient = random_numbers(size, seed=seat.index + 1)
    peers, joins = len(seat.hosts), settings["joins"]
    late = joins and seat.index == peers - 1
    if late:
        time.sleep(settings["round_s"])
    events: list[tuple[str, dict[str, Any]]] = []
    optimizer = RayhiveOptimizer(
        dht=dht,
        run_id="bulk",
        target_batch_size=BATCH * (peers - joins),
        batch_size_per_step=BATCH,
        optimizer=torch.optim.SGD([parameter], lr=0.01),
        on_event=lambda kind, fields: events.append((kind, fields)),
        **{name: limits[name].default for name in ("matchmaking_time", "averaging_timeout")},
    )
    losses = Losses(optimizer.tracker.view)
    if late:
        optimizer.load_state_from_peers()
    else:
        assert optimizer.tracker.wait_for_peers(peers - joins, 60)
    began, ends, calls[:] = time.perf_counter(), [], []
    while not ends or optimizer.local_epoch < settings["rounds"]:
        before = optimizer.local_epoch
        optimizer.zero_grad()
        parameter.grad = gradient.clone()
        optimizer.step()
        if optimizer.local_epoch != before:
            ends.append(time.perf_counter() - began)
    lost = losses.end()
    optimizer.settle()
    optimizer.shutdown()
    dht.shutdown()
    kinds = ("round", "state_round", "state_loaded")
    shown = [(kind, fields) for kind, fields in events if kind in kinds]
    return {"calls": calls, "losses": lost, "ends": ends, "events": shown}


def turn(work: Work, on: Nodes, arguments: argparse.Namespace) -> tuple[int, int]:
    """Run one turn and print it; return the numbers of losses and of incomplete averagings.

    Raises:
        RuntimeError: The rounds took less time than their bytes, so that the links were not busy.
    """
    peers = len(on.hosts)
    round_s = work.megabytes * 8 / arguments.rate * 2 * (peers - 1) / peers
    settings = {
        **vars(work),
        "round_s": round_s,
        "congestion": arguments.congestion,
        "daemon": arguments.daemon,
    }
    limit = SPARE_S + 2 * round_s * (work.rounds + 2 * work.joins)
    results = on.run(run_peer, settings, limit)
    calls = [seconds for result in results for seconds in result["calls"]]
    failed = int(np.sum(np.isinf(calls)))
    answered = np.array([seconds for seconds in calls if np.isfinite(seconds)])
    events = [event for result in results for event in result["events"]]
    outcomes = [fields["outcome"] for kind, fields in events if "outcome" in fields]
    incomplete = sum(outcome != "averaged" for outcome in outcomes)
    losses = sum(result["losses"] for result in results)
    median, p99, most = np.percentile(answered, [50, 99, 100]) * 1e3 if len(answered) else [0] * 3
    seconds = max(result["ends"][-1] for result in results)
    if not work.joins and seconds < 0.9 * round_s * work.rounds:
        raise RuntimeError(f"{work}: rounds of {round_s:.1f} s on a full link took {seconds:.1f} s")
    print(
        f"| {work} | {peers} | {on.rate_mbit:.1f}, {on.rtt_ms:.0f} | {seconds:.0f} "
        f"| {len(calls)} | {median:.0f} | {p99:.0f} | {most:.0f} "
        f"| {failed} | {losses} | {incomplete} of {len(outcomes)} |",
        flush=True,
    )
    if arguments.events:
        print(*(f"{kind} {fields}" for kind, fields in events), sep="\n")
    return losses, incomplete


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", type=int, default=2)
    parser.add_argument("--rate", type=float, default=RATE_MBIT, help="of a link [Mbit/s]")
    parser.add_argument("--rtt", type=float, default=RTT_MS, help="between two peers [ms]")
    parser.add_argument("--queue", type=float, help="depth of a link's queue [s]")
    parser.add_argument("--congestion", help="congestion control of the nodes; default: kernel's")
    parser.add_argument("--daemon", action="store_true", help="send all through the daemon")
    parser.add_argument("--megabytes", type=float, help="only rounds of this size")
    parser.add_argument("--rounds", type=int, default=1, help="number of these rounds")
    parser.add_argument("--joins", action="store_true", help="a peer joins in these rounds")
    parser.add_argument("--events", action="store_true", help="print the events")
    arguments = parser.parse_args()
    if skipped():
        return
    works: tuple[Work, ...] = WORKS
    if arguments.megabytes is not None:
        works = (Work(arguments.megabytes, arguments.rounds, arguments.joins),)
    print(conditions())
    print(
        "| work | peers | Mbit/s, ms | s | heartbeats | median [ms] | 99 % | most | failed "
        "| losses | incomplete |"
    )
    print("|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|", flush=True)
    made: list[Claim] = []
    for work in works:
        peers = arguments.peers + work.joins
        with nodes(peers, arguments.rate, arguments.rtt, arguments.queue) as on:
            losses, incomplete = turn(work, on, arguments)
        counts = {"peers taken for lost": losses, "incomplete": incomplete}
        if work.joins:  # a peer that joins in the middle of a round may miss it
            del counts["incomplete"]
        for text, count in counts.items():
            value = float(count)
            made.append(Claim(f"{work}: {text}", value, value, value, "", 0.0, at_least=False))
    print_claims(*made)


if __name__ == "__main__":
    main()
