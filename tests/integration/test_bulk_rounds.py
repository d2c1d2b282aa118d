"""Rounds of real peers on a link that is so slow that heartbeats wait for seconds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.claims import parse_claims
from tests.integration.testbed_helpers import needs_testbed

pytestmark = [needs_testbed, pytest.mark.slow]

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "bulk_rounds.py"
WORK = ("--megabytes", "4", "--rounds", "2")
#: The queue of the router holds more than a peer's patience with silence (4 s).
LINK = ("--rate", "4", "--rtt", "80", "--queue", "6", "--congestion", "reno")


@pytest.mark.parametrize("way", [(), ("--daemon",)], ids=["links", "daemon"])
def test_no_peer_is_lost_while_its_parts_arrive(way: tuple[str, ...]) -> None:
    command = [sys.executable, str(SCRIPT), *WORK, *LINK, *way]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    claims = parse_claims(ended.stdout.splitlines())
    assert [claim.held for claim in claims] == [True, True], ended.stdout + ended.stderr
