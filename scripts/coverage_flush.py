"""A plug-in for coverage.py: Ray's workers write what they ran while they run.

Ray ends its workers with SIGKILL, which no handler sees: without this, everything that ran in an
actor would count as never run. Other processes end by themselves or by SIGTERM and write then.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

from coverage import Coverage

INTERVAL_S = 0.2


def _is_ray_worker() -> bool:
    return any(os.path.basename(word) == "default_worker.py" for word in sys.orig_argv)


def _flush_for_ever() -> None:
    pause = threading.Event()  # never set: wait() is an interruptible sleep
    while True:
        pause.wait(INTERVAL_S)
        current = Coverage.current()
        if current is not None:
            current.save()  # costs nothing if no new line ran


def coverage_init(registry: Any, options: dict[str, str]) -> None:
    """Start the flushing thread; coverage calls this in each process that it measures."""
    del registry, options
    if _is_ray_worker():
        threading.Thread(target=_flush_for_ever, name="coverage-flush", daemon=True).start()
