"""The peer's end of its line: what a notice tells."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

# in a process of its own: a channel whose other end goes kills its process group
SCRIPT = """
import json, os, socket, sys
from rayhive.peer.channel import Channel
ours, theirs = socket.socketpair()
channel = Channel(theirs, "peer-1")
ours.sendall((sys.argv[1] + "\\n").encode())
print(ours.makefile().readline(), end="", flush=True)
os._exit(0)
"""


@pytest.mark.parametrize(
    ("command", "deadline_s", "fault"),
    [
        ({"do": "notice", "deadline_s": 2.5, "fault": "f3"}, 2.5, "f3"),
        ({"do": "leave", "fault": "f4"}, None, "f4"),
        ({"do": "leave"}, None, None),
    ],
)
def test_a_notice_names_the_fault_that_told_it(
    command: dict[str, object], deadline_s: float | None, fault: str | None
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(command)],
        capture_output=True,
        text=True,
        timeout=60,
        start_new_session=True,
        check=True,
    )
    event = json.loads(done.stdout)
    assert (event["kind"], event["peer"]) == ("notice", "peer-1")
    assert (event["deadline_s"], event["fault"]) == (deadline_s, fault)
