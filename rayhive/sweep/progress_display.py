"""Display of a running sweep on a terminal: a bar, the peers of the replicate, the best values."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rayhive.errors import RayhiveError
from rayhive.spec.replicate import ReplicateSpec
from rayhive.sweep.replicate_runner import Handle
from rayhive.sweep.tally import Tally, objective, replicate_label

#: Figures of a peer: the key in its status, the header, the format.
PEER_FIGURES = (
    ("state", "state", "{}"),
    ("round", "round", "{}"),
    ("samples", "samples", "{}"),
    ("samples_per_s", "samples/s", "{:.0f}"),
    ("loss", "loss", "{:.4g}"),
)


class Display:
    """Display at the bottom of a terminal, with lines above it.

    Args:
        tally: Counts of the sweep.
        console: The terminal.
    """

    def __init__(self, tally: Tally, console: Console) -> None:
        self._tally = tally
        self._console = console
        self._running: ReplicateSpec | None = None
        self._since = 0.0
        self._status: Mapping[str, Any] = {}
        self._live = Live(
            get_renderable=self.render, console=self._console, refresh_per_second=2, transient=True
        )

    def start(self) -> None:
        """Show the display from now on."""
        self._live.start()

    def stop(self) -> None:
        """Remove the display."""
        self._live.stop()

    def show(self, spec: ReplicateSpec | None) -> None:
        """Show the peers of a replicate, or none if no replicate runs."""
        self._running, self._status, self._since = spec, {}, time.monotonic()

    def update(self, handle: Handle) -> None:
        """Read the state of the peers; if that fails, the last one stays."""
        with suppress(RayhiveError):
            self._status = handle.status()

    def print(self, text: str) -> None:
        """Print a line above the display."""
        self._console.print(Text(text))

    def render(self) -> RenderableType:
        """Return the display."""
        parts: list[RenderableType] = [self._bar()]
        if self._running is not None:
            parts += [self._replicate(self._running), self._peers()]
        if self._tally.best:
            parts.append(self._best())
        return Group(*parts)

    def _bar(self) -> RenderableType:
        tally, eta = self._tally, self._tally.eta
        grid = Table.grid(padding=(0, 1))
        grid.add_row(
            Text(tally.config.name, style="bold"),
            ProgressBar(total=max(1, eta.total), completed=eta.done, width=30),
            f"trials {tally.trials_done}/{tally.trials}",
            f"replicates {eta.done}/{eta.total}",
            f"left: {tally.remaining}",
        )
        return grid

    def _replicate(self, spec: ReplicateSpec) -> RenderableType:
        phase = str(self._status.get("phase", "starting"))
        seconds = time.monotonic() - self._since
        return Text(f"{replicate_label(spec)}: {phase}, {seconds:.0f} s")

    def _peers(self) -> RenderableType:
        table = Table(box=None, padding=(0, 2), header_style="dim")
        table.add_column("peer")
        for _, header, _ in PEER_FIGURES:
            table.add_column(header, justify="right")
        for name, peer in sorted(dict(self._status.get("peers", {})).items()):
            shown = {**peer, "samples_per_s": self._rate(peer)}
            cells = [
                "" if shown.get(key) is None else form.format(shown[key])
                for key, _, form in PEER_FIGURES
            ]
            table.add_row(str(name), *cells)
        return table

    def _rate(self, peer: Mapping[str, Any]) -> float | None:
        """Return the rate that a peer reports, or else its mean since training began [1/s]."""
        if peer.get("samples_per_s") is not None:
            return float(peer["samples_per_s"])
        seconds, samples = self._status.get("seconds"), peer.get("samples")
        if self._status.get("phase") != "training" or not seconds or not samples:
            return None
        return float(samples / seconds)

    def _best(self) -> RenderableType:
        lines = [
            f"best {name}: {objective(self._tally.config, name, value)} (trial {record.number} "
            f"{record.configuration.label})"
            for name, (value, record) in self._tally.best.items()
        ]
        return Text("\n".join(lines), style="green")
