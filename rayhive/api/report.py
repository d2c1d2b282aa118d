"""HTML report of a run, once or for as long as its sweep runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import suppress
from pathlib import Path

from rayhive.files import check_writable
from rayhive.remote import local_folder
from rayhive.sweep.run_folder import RunFolder

#: Files that a report depends on, below the run folder.
_SOURCES = ("sweep.yaml", "provenance.json", "trials/*/*/*.json*", "*.json*")
#: Seconds between two looks at a running sweep.
EVERY_S = 5.0
#: Least time between two writes of a watched report, as a multiple of the time of one.
REST = 9.0


def write_report(folder: str | Path, out: str | Path | None = None) -> Path:
    """Write the report of a run as one HTML file that opens offline.

    Args:
        folder: The run folder or its URL, or the folder of one replicate.
        out: The file; by default ``report.html`` in the folder.

    Returns:
        The path of the file.

    Raises:
        ConfigError: ``folder`` is neither, or the file cannot be written.
        DamagedError: Its study cannot be read. Damaged replicates are left out and named in the
            notes of the table.
    """
    from rayhive.report.page import write

    place = local_folder(folder)
    path = _file(place, out)
    write.write_report(place, path)
    return path


def _file(folder: Path, out: str | Path | None) -> Path:
    """Return the file of a report; refuse one that cannot be written."""
    from rayhive.report.page import write

    path = folder / write.REPORT if out is None else Path(out)
    if out is not None or folder.is_dir():  # a folder that does not exist is refused as no run
        check_writable(path, "--out")
    return path


def watch_report(
    folder: str | Path,
    out: str | Path | None = None,
    *,
    every_s: float = EVERY_S,
    wait: Callable[[float], object] = time.sleep,
) -> Generator[Path, None, None]:
    """Write the report of a running sweep again whenever its folder changes.

    The page loads itself again every ``every_s`` seconds. Between two writes passes at least
    :data:`REST` times as long as the first one took, so that the sweep keeps the processor. When
    the sweep has ended, or the caller closes the iterator, the report is written a last time
    without that.

    Args:
        folder: The run folder.
        out: The file; by default ``report.html`` in the folder.
        every_s: Seconds between two looks at the folder.
        wait: Waits for a time [s].

    Yields:
        The path of the file after each time that it was written.

    Raises:
        ConfigError: ``folder`` is no run folder, or the file cannot be written.
        DamagedError: Its study cannot be read.
    """
    from rayhive.report.page import write

    path = _file(Path(folder), out)
    run, seen, rest = RunFolder(folder), None, 0.0
    try:
        while run.is_running:
            now = _fingerprint(Path(folder))
            if now != seen:
                seen, began = now, time.monotonic()
                write.write_report(folder, path, reload_s=every_s)
                rest = REST * (time.monotonic() - began)
                yield path
            wait(max(every_s, rest))
            rest = 0.0
    finally:
        write.write_report(folder, path)
    yield path


def _fingerprint(folder: Path) -> frozenset[tuple[str, int, int]]:
    """Return name, time and size of every file that the report depends on."""
    found = set()
    for pattern in _SOURCES:
        for path in folder.glob(pattern):
            with suppress(OSError):
                stat = path.stat()
                found.add((str(path), stat.st_mtime_ns, stat.st_size))
    return frozenset(found)
