"""Fixtures of several integration tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.swarm_helpers import forks

__all__ = ["forks", "socket_path"]


@pytest.fixture(scope="module")
def socket_path() -> Iterator[str]:
    """Run a forkserver, and return the path of its socket."""
    from tests.integration.forkserver_harness import forkserver

    with forkserver() as path:
        yield path
