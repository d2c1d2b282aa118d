"""``rayhive train``, ``status``, ``stop`` and ``doctor``."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from rayhive.cli.options import ListFormat, RunningAddress, StudyFile
from rayhive.cli.output import print_json, print_rows

if TYPE_CHECKING:
    from rayhive.cluster.replicate.peer_table import ReplicateStatus


def train(
    file: StudyFile,
    initial_peers: Annotated[
        list[str] | None,
        typer.Option(
            help="Address of a peer to join, as that peer printed it; may be repeated. "
            "INITIAL_PEERS is read too. Without any address this is the first peer."
        ),
    ] = None,
) -> None:
    """Train as one peer of a collaborative run on this machine.

    Example: `rayhive train experiments/quickstart.yaml` on the first machine; it prints the command
    for the other ones.
    """
    from rayhive.peer.train import train_file

    train_file(file, initial_peers or ())


def status(address: RunningAddress = None, format: ListFormat = "table") -> None:
    """Show the running replicates and the state of each peer.

    Examples: `rayhive status`, `rayhive status --address 10.0.0.1:6379`
    """
    from rayhive.cluster.control import cluster_status

    found = cluster_status(address)
    if format == "json":
        print_json([asdict(replicate) for replicate in found])
    elif not found:
        print("no replicate is running")
    for replicate in found if format != "json" else ():
        _print_replicate(replicate)


def stop(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the study.")],
    address: RunningAddress = None,
) -> None:
    """End a running sweep on this machine or on a cluster; finished replicates are kept.

    Example: `rayhive stop quickstart`
    """
    from rayhive.cluster.control import stop_study

    stopped = stop_study(address, name)
    print(f"stopped {', '.join(stopped)}" if stopped else f"no replicate of {name!r} is running")


def doctor(format: ListFormat = "table") -> None:
    """Check this machine and print a remedy for each problem.

    Exit code 1 if a requirement of rayhive is missing.
    """
    from rayhive.cluster.doctor import doctor as examine

    checks = examine()
    if format == "json":
        print_json([asdict(check) for check in checks])
    else:
        rows = [
            {**asdict(check), "verdict": "ok" if check.ok else "bad" if check.needed else "note"}
            for check in checks
        ]
        print_rows(rows, {"verdict": "", "name": "check", "detail": "found", "mend": "repair"})
    if any(check.needed and not check.ok for check in checks):
        raise typer.Exit(1)


def _print_replicate(found: ReplicateStatus) -> None:
    if found.seconds is None:  # the supervisor does not answer
        print(f"{found.run_id}: {found.phase}")
        return
    print(f"{found.run_id}: {found.phase}, {found.seconds:.0f} of {found.budget_seconds:.0f} s")
    print(f"  {found.folder}")
    print_rows(
        [{"peer": f"  {name}", **asdict(peer)} for name, peer in sorted(found.peers.items())],
        {
            "peer": "  peer",
            "state": "state",
            "round": "round>",
            "samples": "samples>",
            "samples_per_s": "samples/s>",
            "loss": "loss>",
            "host": "host",
            "error": "error",
        },
    )
