"""Soak test: hundreds of rounds with random averaging failures, in every delay mode.

Claim: after 300 rounds of four peers, with a failure about every ten rounds, replicas agree, every
partial round was reported as partial, and no peer has grown: memory by less than 5 %, descriptors
not at all. Half way, one peer downloads the state of another one.

A peer fails by dropping out of an all-reduce, before it begins or after it has ended. If one drops
out before, its parts are missing, so that no other peer of the group may report a complete round.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import multiprocessing
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial, reduce
from operator import and_
from pathlib import Path
from typing import Any, TypeAlias

import psutil
import torch

sys.path.insert(0, __file__.rsplit("/", 2)[0])

from hivemind.averaging.allreduce import AllreduceException
from hivemind.averaging.group_info import GroupInfo

from benchmarks.claims import print_fact
from benchmarks.swarm import conditions, join_swarm, run_swarm
from rayhive.averaging.gradient_averager import RayhiveGradientAverager
from rayhive.spec.axes.delay import DELAY_FLAGS

BATCH = 16
#: Share of the rounds after which the reference size of a peer is measured.
SETTLED = 0.2
#: Consecutive rounds over which a size is measured.
SIZED = 10
AGREE = 1e-4
#: Most groups that a peer counts.
MOST_GROUPS = 10_000

#: Memory [bytes] of a peer's processes, and the number of descriptors by process and file.
Size: TypeAlias = "tuple[int, Counter[tuple[int, str]]]"


class Groups:
    """Groups that the process of an averager counts, and that its trainer reads."""

    def __init__(self) -> None:
        self._ids = torch.zeros(MOST_GROUPS, dtype=torch.long).share_memory_()
        self._count = torch.zeros(1, dtype=torch.long).share_memory_()

    def add(self, group: GroupInfo) -> None:
        """Add a group."""
        self._ids[int(self._count)] = int.from_bytes(group.group_id[:7], "big")
        self._count += 1

    def ids(self) -> list[int]:
        """Return numbers of the groups, which are the same at all of their peers."""
        return self._ids[: int(self._count)].tolist()


class FailingAverager(RayhiveGradientAverager):
    """Averager that fails in some rounds.

    Attributes:
        early: Groups that it left before their all-reduce.
        late: Groups that it left after it.
        complete: Groups whose round it reported as complete.
    """

    def __init__(self, *args: Any, every: float, seed: int, **kwargs: Any) -> None:
        self.every, self.dice = every, random.Random(seed)
        self.early, self.late, self.complete = Groups(), Groups(), Groups()
        super().__init__(*args, **kwargs)

    async def run_allreduce(self, tensors: Any, group: GroupInfo, *args: Any, **kw: Any) -> None:
        fails, early = self.dice.random() < 1 / self.every, self.dice.random() < 0.5
        if fails and early:
            self._fail(group, self.early)
        await super().run_allreduce(tensors, group, *args, **kw)
        if fails:
            self._fail(group, self.late)

    def _fail(self, group: GroupInfo, groups: Groups) -> None:
        groups.add(group)
        raise AllreduceException("dropped on purpose")

    async def _aggregate_with_group(self, group_info: GroupInfo, *args: Any, **kw: Any) -> Any:
        result = await super()._aggregate_with_group(group_info, *args, **kw)
        if result.fraction == 1.0:
            self.complete.add(group_info)
        return result


class Garbage:
    """Garbage collection in all processes of this peer, as uncollected futures hold pipes.

    It has to be created before the processes are forked.
    """

    def __init__(self) -> None:
        self._gone = multiprocessing.Semaphore(0)
        signal.signal(signal.SIGUSR1, self._collect)

    def _collect(self, *_: Any) -> None:
        gc.collect()
        self._gone.release()

    def drop(self, processes: list[psutil.Process]) -> None:
        """Collect garbage in these processes, and wait until all have."""
        for process in processes:
            process.send_signal(signal.SIGUSR1)
        for _ in processes:
            assert self._gone.acquire(timeout=10), "a process does not answer"


def size(garbage: Garbage) -> Size:
    """Return the memory and the descriptors of this peer's processes."""
    own = psutil.Process()
    tree = [own, *(p for p in own.children(recursive=True) if "python" in p.name())]
    garbage.drop(tree)
    memory = sum(process.memory_full_info().uss for process in tree)
    return memory, Counter(file for process in tree for file in descriptors(process.pid))


def descriptors(pid: int) -> Iterator[tuple[int, str]]:
    """Yield the process and the file of each of its descriptors: ``pipe``, ``socket:[123]``.

    Pipes have no number: the process of the DHT holds one of the last request, which is that of
    whichever process of the peer made it.
    """
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            file = os.readlink(entry)
            yield pid, "pipe" if file.startswith("pipe:") else file


def standing(sizes: Iterable[Size]) -> tuple[int, Counter[str]]:
    """Return the least memory of several samples, and the descriptors open in all, by kind.

    Streams and full buffers are temporary; leaks are in every sample.
    """
    memory, files = zip(*sizes, strict=True)
    kinds: Counter[str] = Counter()
    for (_, file), count in reduce(and_, files).items():
        kinds[file.partition(":[")[0]] += count
    return min(memory), kinds


def growth_of(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    """Return the change in the number of descriptors by kind, without the zeros."""
    change = Counter(after)
    change.subtract(before)
    return {kind: count for kind, count in change.items() if count}


def run_peer(index: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Train one peer; return its weights, the outcomes of its rounds, and its growth."""
    from rayhive.optim.optimizer import RayhiveOptimizer

    garbage = Garbage()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    module = torch.nn.Sequential(
        torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10)
    )
    dht = join_swarm(settings["initial_peers"])
    flags = dict(DELAY_FLAGS[settings["delay"]])
    recreated = flags.get("offload_optimizer", False) or flags.get("delay_state_averaging", False)
    outcomes: list[str] = []
    every, seed = settings["every"] * settings["peers"], settings["seed"] + index
    optimizer = RayhiveOptimizer(
        dht=dht,
        run_id=f"soak-{settings['delay']}",
        target_batch_size=BATCH * settings["peers"] * 2,
        batch_size_per_step=BATCH,
        params=list(module.parameters()) if recreated else None,
        optimizer=partial(torch.optim.SGD, lr=0.05)
        if recreated
        else torch.optim.SGD(module.parameters(), lr=0.05),
        matchmaking_time=5.0,
        averaging_timeout=20.0,
        grad_averager_factory=partial(FailingAverager, every=every, seed=seed),
        on_event=lambda kind, fields: kind == "round" and outcomes.append(fields["outcome"]),
        **flags,
    )
    assert optimizer.tracker.wait_for_peers(settings["peers"], 60)
    generator = torch.Generator().manual_seed(index)
    began, last = time.perf_counter(), settings["rounds"]
    settled, download = int(SETTLED * last), last // 2 if index == 0 else last
    early: dict[int, Size] = {}
    late: dict[int, Size] = {}
    while (round_ := optimizer.local_epoch) < last:
        for sizes, begin in ((early, settled), (late, last - SIZED)):
            if begin <= round_ < begin + SIZED and round_ not in sizes:
                sizes[round_] = size(garbage)
        if round_ >= download:
            optimizer.state_averager.load_state_from_peers(timeout=20)
            download = last
        data = torch.randn(BATCH, 64, generator=generator)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(module(data), data[:, :10].argmax(1)).backward()
        optimizer.step()
    optimizer.state_averager.step(wait_for_delayed_updates=True)
    averager = optimizer.grad_averager
    weights = torch.cat([p.detach().flatten() for p in optimizer.state_averager.main_parameters])
    optimizer.shutdown()
    dht.shutdown()
    before, after = standing(early.values()), standing(late.values())
    return {
        "seconds": time.perf_counter() - began,
        "weights": weights.tolist(),
        "outcomes": {name: outcomes.count(name) for name in sorted(set(outcomes))},
        "early": averager.early.ids(),
        "late": averager.late.ids(),
        "complete": averager.complete.ids(),
        "memory": (before[0], after[0]),
        "descriptors": (before[1], after[1]),
    }


def main() -> None:
    """Run the swarms, and print the measurements and claims."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--every", type=float, default=10.0, help="rounds between two failures")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--delay", choices=list(DELAY_FLAGS), nargs="*", default=list(DELAY_FLAGS))
    arguments = parser.parse_args()
    if arguments.peer is not None:
        print(json.dumps(run_peer(arguments.peer, json.loads(sys.stdin.readline()))), flush=True)
        return
    print(f"{arguments.peers} peers, {arguments.rounds} rounds each, {conditions()}")
    facts: dict[str, bool] = {}
    for delay in arguments.delay:
        settings = {**vars(arguments), "delay": delay}
        results = run_swarm(__file__, arguments.peers, settings, timeout=900)
        weights = torch.tensor([result["weights"] for result in results])
        distance = float((weights - weights[0]).norm(dim=1).max() / weights[0].norm())
        growth = max(after / before - 1 for before, after in (r["memory"] for r in results))
        changes = [growth_of(*r["descriptors"]) for r in results]
        grown = max(changes, key=lambda kinds: sum(kinds.values()))
        which = "".join(f", {kind} {count:+d}" for kind, count in grown.items())
        print(f"{delay}: {results[0]['seconds']:.0f} s, distance {distance:.1e},")
        early, late = ({g for r in results for g in r[when]} for when in ("early", "late"))
        complete = {group for r in results for group in r["complete"]}
        print(f"  failures on purpose: {len(early)} groups before, {len(late)} after", end=", ")
        print(f"memory {growth:+.1%}, descriptors {sum(grown.values()):+d}{which}")
        for result in results:
            print(f"  outcomes {result['outcomes']}")
        facts[f"{delay}: replicas agree to {AGREE:g}"] = distance < AGREE
        reported = bool(early and complete) and not early & complete
        facts[f"{delay}: no partial round goes unreported"] = reported
        facts[f"{delay}: memory grows by less than 5 %"] = growth < 0.05
        facts[f"{delay}: descriptors do not grow"] = sum(grown.values()) <= 0
    for text, held in facts.items():
        print_fact(text, held)


if __name__ == "__main__":
    main()
