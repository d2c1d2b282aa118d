"""``rayhive train``."""

from __future__ import annotations

from typing import Annotated

import typer

from rayhive.cli.text import File


def train(
    file: File,
    initial_peers: Annotated[
        list[str] | None,
        typer.Option(
            help="Address of a peer to join, as that peer printed it; may be repeated. "
            "INITIAL_PEERS is read too. Without any address this is the first peer.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Train as one peer of a collaborative run on this machine.

    Example: `rayhive train experiments/quickstart.yaml` on the first machine; it prints the command
    for the other ones.
    """
    from rayhive.peer.train import train_file

    train_file(file, initial_peers or ())
