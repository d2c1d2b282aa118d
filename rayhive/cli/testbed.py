"""``rayhive testbed``."""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rayhive.cli.options import ListFormat
from rayhive.cli.output import complain, print_json, print_rows
from rayhive.errors import ClusterError

if TYPE_CHECKING:
    from rayhive.cluster.testbed.state import TestbedState

app = typer.Typer(
    no_args_is_help=True, help="A Ray cluster of several shaped nodes on this one machine."
)
Name = Annotated[
    str | None,
    typer.Argument(metavar="[NAME]", help="Its name; optional if only one exists."),
]


@app.command("up")
def up(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The testbed, a YAML file.")],
) -> None:
    """Create a testbed, which stays until `down`, and print the command that uses it.

    Example: `rayhive testbed up experiments/testbed.yaml`
    """
    from rayhive.cluster.testbed import lifecycle, load_testbed

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # removes a half-made testbed
    made = lifecycle.up(load_testbed(file))
    complain(f"the testbed {made.name!r} has {len(made.nodes)} nodes; on it:")
    print(" ".join(_command(made)))
    complain("measure its links: rayhive testbed status; remove it: rayhive testbed down")


@app.command("status")
def status(name: Name = None, format: ListFormat = "table") -> None:
    """Measure every link of a testbed, and show the settings beside the measurements.

    Takes some seconds for each node. Other traffic on the links lowers the measured rates.
    """
    from rayhive.cluster.testbed import lifecycle

    known = lifecycle.find(name)
    rows = list(_rows(known))
    if format == "json":
        print_json(rows)
        return
    print(" ".join(_command(known)))
    print_rows(
        [{**row, **{f"{key}_text": _pair(row, key) for key in _COLUMNS}} for row in rows],
        {
            "node": "node",
            "node_class": "class",
            "state": "state",
            "data_address": "data address",
            "cpu_share": "cores>",
            **{f"{key}_text": f"{header}: set, measured>" for key, header in _COLUMNS.items()},
        },
    )


@app.command("down")
def down(
    name: Name = None,
    all_: Annotated[bool, typer.Option("--all", help="Every testbed of this machine.")] = False,
) -> None:
    """Remove a testbed with its processes; also one that a crash left behind."""
    from rayhive.cluster.testbed import lifecycle, state

    numbers = state.numbers()
    if name is not None or (len(numbers) > 1 and not all_):
        numbers = [lifecycle.find(name).number]
    kept = [str(state.folder_of(number)) for number in numbers if not lifecycle.down(number)]
    if kept:
        text = "these testbeds can't be removed while something uses them; end it, and try again"
        raise ClusterError(f"{text}: {', '.join(kept)}")
    print(f"removed {len(numbers)}" if numbers else "no testbed exists")


#: Settings that are measured, with their headers.
_COLUMNS = {"rate_mbit": "rate (Mbit/s)", "rtt_ms": "round trip (ms)", "loss": "loss (%)"}


def _command(made: TestbedState) -> list[str]:
    from rayhive.cluster.testbed.raylets import driver_variables

    variables = [f"{key}={shlex.quote(value)}" for key, value in driver_variables(made).items()]
    return [*variables, "rayhive", "sweep", "FILE", "--address", made.address]


def _rows(known: TestbedState) -> Iterator[dict[str, Any]]:
    from rayhive.cluster.testbed import lifecycle
    from rayhive.cluster.testbed.veth import Veth

    for node, found in zip(known.nodes, lifecycle.measured(known), strict=True):
        asked = Veth(known, node).now
        seen = found.model_dump() if found is not None else {}
        yield {
            "node": node.index,
            "node_class": node.node_class,
            "state": "up" if lifecycle.alive(node) else "down",
            "data_address": node.data_address,
            "control_address": node.control_address,
            "cpu_share": node.cpu_share,
            "rate_mbit_asked": asked.rate_mbit,
            "rate_mbit": _mean(seen, "rate_up_mbit", "rate_down_mbit"),
            "rtt_ms_asked": 2 * asked.delay_ms,
            "rtt_ms": seen.get("rtt_ms"),
            "loss_asked": asked.loss,
            "loss": _mean(seen, "loss_up", "loss_down"),
            "measured": seen,
        }


def _mean(measured: dict[str, Any], *names: str) -> float | None:
    known = [measured[name] for name in names if measured.get(name) is not None]
    return sum(known) / len(known) if known else None


def _pair(row: dict[str, Any], key: str) -> str:
    factor = 100 if key == "loss" else 1
    asked, seen = (None if v is None else factor * v for v in (row[f"{key}_asked"], row[key]))
    return f"{'any' if asked is None else f'{asked:g}'}, {'?' if seen is None else f'{seen:.4g}'}"
