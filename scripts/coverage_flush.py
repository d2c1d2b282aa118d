"""Plug-in for coverage.py that saves the coverage of Ray's workers while they run.

Ray ends its workers with SIGKILL, which cannot be handled, so coverage of actors would be lost.
Other processes end by themselves or by SIGTERM, and save their coverage then.
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


def _save_periodically() -> None:
    pause = threading.Event()  # never set; wait() is an interruptible sleep
    while True:
        pause.wait(INTERVAL_S)
        current = Coverage.current()
        if current is not None:
            current.save()  # cheap if no new line ran


def coverage_init(registry: Any, options: dict[str, str]) -> None:
    """Start the saving thread. Called by coverage.py in each process that it measures."""
    del registry, options
    if _is_ray_worker():
        threading.Thread(target=_save_periodically, name="coverage-flush", daemon=True).start()
