"""The forkserver in a process of its own, with peers that do nothing."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

#: Serves requests of which the second gets no process, as at the limit of a container, and whose
#: first call of ``accept`` gets no descriptor.
SERVER = textwrap.dedent(
    """
    import errno, os, signal, socket, sys
    from rayhive.peer import forkserver

    def become_peer(self, connection, request):
        os.setsid()
        signal.set_wakeup_fd(-1)
        connection.sendall(b"here")
        while True:
            signal.pause()

    def failing(function, number, fails):
        def call(*args):
            if next(numbers) in fails:
                raise OSError(number, os.strerror(number))
            return function(*args)

        numbers = iter(range(99))
        return call

    forkserver.PRELOAD = ()
    forkserver.Forkserver._become_peer = become_peer
    os.fork = failing(os.fork, errno.EAGAIN, {1})
    socket.socket.accept = failing(socket.socket.accept, errno.EMFILE, {0})
    forkserver.Forkserver(sys.argv[1]).serve()
    """
)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "z"
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(path)],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdin is not None and process.stderr is not None
    with process.stderr:
        yield path
        process.stdin.close()
        assert process.wait(10.0) == 0


def ask(path: Path) -> socket.socket:
    """Send a request; wait for the server to listen."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(20.0)
    while True:
        with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
            connection.connect(str(path))
            connection.sendall(b"{}\n")
            return connection


def test_a_peer_that_gets_no_process_leaves_the_others_alive(server: Path) -> None:
    with ask(server) as first, ask(server) as second, ask(server) as third:
        assert first.recv(9) == b"here"
        assert second.recv(9) == b""
        assert third.recv(9) == b"here"
        first.setblocking(False)
        with pytest.raises(BlockingIOError):  # its peer lives
            first.recv(9)
