"""Distribution of the tests over the workers of pytest-xdist."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

from xdist.scheduler import LoadScopeScheduling

#: The worker that runs the integration tests.
FIRST = "gw0"
#: Files whose fixtures take long, and are made by one worker.
TOGETHER = ("tests/unit/test_bad_input.py", "tests/unit/test_docs_commands.py")


class OneSwarm(LoadScopeScheduling):
    """Run one integration test at a time, because a swarm needs the machine.

    They are one scope, which is the largest and therefore goes to the first worker. Every other
    test is a scope of its own, and runs in a worker that is free; so is each file of
    :data:`TOGETHER`.
    """

    @property
    def nodes(self) -> list[Any]:
        """The workers, by name."""
        return sorted(super().nodes, key=lambda node: str(node.gateway.id))

    def _split_scope(self, nodeid: str) -> str:
        if nodeid.startswith("tests/integration/"):
            return "integration"
        file = nodeid.split("::")[0]
        return file if file in TOGETHER else nodeid


def give_way(worker: str) -> None:
    """Let a worker besides the first one run only when the integration tests leave a core free.

    Linux shares time among sessions before it looks at processes, so the worker becomes a session
    with a low priority. The sessions that its tests begin have a normal one.
    """
    if worker != FIRST:
        os.nice(19)
        with contextlib.suppress(OSError):  # not Linux, or no shares of sessions
            os.setsid()
            Path("/proc/self/autogroup").write_text("19")
