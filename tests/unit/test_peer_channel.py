"""Preemption notices on the peer's end of the channel."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

# in a process of its own: a channel kills its process group when the other end closes
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
def test_a_notice_names_the_fault_that_sent_it(
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


FAILING = """
import os, runpy, socket, sys
from rayhive.peer.channel import Channel
ours, theirs = socket.socketpair()
channel = Channel(theirs, "peer-1")
try:
    runpy.run_path(sys.argv[1])
except Exception as error:
    channel.fail(error)
print(ours.makefile().readline(), end="", flush=True)
os._exit(0)
"""


def test_a_failure_in_the_users_code_names_its_line(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("import json\n\n\ndef step():\n    json.loads('{')\n\n\nstep()\n")
    done = subprocess.run(
        [sys.executable, "-c", FAILING, str(file)],
        capture_output=True,
        text=True,
        timeout=60,
        start_new_session=True,
        check=True,
        cwd=tmp_path,
    )
    event = json.loads(done.stdout)
    assert event["kind"] == "peer_failed"
    assert event["error"].endswith("(mine.py, line 5, in step)")
    assert event["error"].startswith("JSONDecodeError(")
    assert "Traceback" in event["traceback"]
