"""Warm-up of a cluster: a short replicate whose results are discarded.

A cluster that has just started reads code from the disk and starts its agents. Without a warm-up
this may slow the first replicate down.
"""

from __future__ import annotations

import shutil
from collections.abc import Generator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from rayhive.errors import DamagedError
from rayhive.spec.replicate import ReplicateSpec
from rayhive.sweep.attempts import finished_event
from rayhive.sweep.replicate_runner import Handle, ReplicateRunner, Watcher

#: Name of its scenario and of its folder.
WARM_UP = "warm-up"


@dataclass(frozen=True)
class _NotesAlone:
    """Shows notes, but not the replicate, so that progress does not count the warm-up."""

    watcher: Watcher

    def replicate_started(self, spec: ReplicateSpec, adopted: bool) -> None:
        """Show nothing."""

    def replicate_status(self, spec: ReplicateSpec, handle: Handle) -> None:
        """Show nothing."""

    def note(self, text: str) -> None:
        """Show a line."""
        self.watcher.note(text)


def warm_up(
    runner: ReplicateRunner, first: ReplicateSpec, seconds: float, run: Path
) -> Generator[None, None, None]:
    """Run a short replicate without faults and delete its folder; pauses at every poll.

    Args:
        runner: Runs the replicates of the study.
        first: Replicate whose configuration and swarm the warm-up takes.
        seconds: Training time [s].
        run: The run folder.
    """
    with suppress(DamagedError):
        if finished_event(run / WARM_UP) is not None:  # the driver died before it removed it
            shutil.rmtree(run / WARM_UP, ignore_errors=True)
    runner.watcher.note(f"warm-up: {seconds:g} s of training that count nowhere")
    limits = {"seconds_per_replicate": seconds, "samples_per_replicate": None}
    spec = first.model_copy(
        update={
            "scenario": WARM_UP,
            "plan": None,
            "early_stop": None,
            "budget": first.budget.model_copy(update={**limits, "stop_at_target": False}),
            "folder": str(run / WARM_UP),
        }
    )
    yield from replace(runner, watcher=_NotesAlone(runner.watcher)).course(spec)
    shutil.rmtree(run / WARM_UP, ignore_errors=True)
