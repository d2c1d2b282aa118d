"""Initial peers in every form reach the DHT, and the printed command can be pasted."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hivemind.utils.multiaddr import Multiaddr

from rayhive.errors import ConfigError
from rayhive.membership.addresses import (
    initial_peers,
    join_message,
    reachable,
    same_command,
    tcp_address,
)
from rayhive.strategy.dht import start_on_host
from rayhive.strategy.strategy import HivemindStrategy

ONE = "/ip4/10.0.0.1/tcp/1/p2p/12D3KooWE1wLERt3YbuCM1kNJfxCLi3NWmZHcP5163sJwzdbqoUe"
TWO = ONE.replace("10.0.0.1", "10.0.0.2")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, None),
        (ONE, [ONE]),
        (f"{ONE}, {TWO} ,", [ONE, TWO]),
        ([ONE, TWO], [ONE, TWO]),
        ((Multiaddr(ONE),), [ONE]),
        ("", None),
        ([], None),
    ],
)
def test_addresses_come_in_every_form(given: Any, expected: list[str] | None) -> None:
    assert initial_peers(given, {}) == expected


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"PL_INITIAL_PEERS": f"{ONE},{TWO}"}, [ONE, TWO]),
        ({"INITIAL_PEERS": ONE}, [ONE]),
        ({"PL_INITIAL_PEERS": ONE, "INITIAL_PEERS": TWO}, [ONE]),
        ({"PL_INITIAL_PEERS": "", "INITIAL_PEERS": TWO}, [TWO]),
        ({}, None),
    ],
)
def test_both_variables_reach_the_dht(
    environ: dict[str, str], expected: list[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with mock.patch("hivemind.DHT", autospec=True) as dht:
        strategy = HivemindStrategy(target_batch_size=1)
    assert strategy.settings.initial_peers == dht.call_args.kwargs["initial_peers"] == expected


def test_an_argument_takes_precedence_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INITIAL_PEERS", ONE)
    with mock.patch("hivemind.DHT", autospec=True) as dht:
        HivemindStrategy(target_batch_size=1, initial_peers=TWO)
    assert dht.call_args.kwargs["initial_peers"] == [TWO]


def test_a_given_dht_ignores_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INITIAL_PEERS", ONE)
    strategy = HivemindStrategy(target_batch_size=1, dht=mock.MagicMock())
    assert strategy.settings.initial_peers is None


@pytest.mark.parametrize(
    ("addresses", "expected"),
    [
        (["/ip4/127.0.0.1/tcp/1", "/ip4/10.0.0.1/tcp/1"], ["/ip4/10.0.0.1/tcp/1"]),
        (["/ip4/127.0.0.1/tcp/1", "/ip6/::1/tcp/1"], ["/ip4/127.0.0.1/tcp/1", "/ip6/::1/tcp/1"]),
        (["/ip6/fe80::1%eth0/tcp/1", "/ip6/::1/tcp/1"], ["/ip6/fe80::1%eth0/tcp/1"]),
        (["/dns4/host/tcp/1", "/ip4/127.0.0.1/tcp/1"], ["/dns4/host/tcp/1"]),
        ([], []),
    ],
)
def test_loopback_is_announced_only_without_other_addresses(
    addresses: list[str], expected: list[str]
) -> None:
    assert reachable(addresses) == expected


def test_the_message_can_be_pasted() -> None:
    message = join_message("run", [ONE, TWO], "python train.py")
    lines = message.splitlines()
    assert f"INITIAL_PEERS={ONE},{TWO} python train.py" in lines
    assert f"HivemindStrategy(initial_peers='{ONE},{TWO}')" in lines
    given = lines[1].partition(" ")[0].partition("=")[2]
    assert initial_peers(given, {}) == [ONE, TWO]


@pytest.mark.parametrize(
    ("interpreter", "arguments", "expected"),
    [
        (["/v/bin/python", "train.py", "--a", "b c"], ["train.py"], "python train.py --a 'b c'"),
        (["python", "train.py"], ["train.py"], "python train.py"),
        (["python", "train.py", "-c", "x"], ["train.py", "-c", "x"], "python train.py -c x"),
        (["./python", "./train.py"], ["./train.py"], "python ./train.py"),
        (["python", "-u", "src/train.py"], ["src/train.py"], "python -u src/train.py"),
        (["/v/bin/python", "-m", "pkg", "x"], ["/pkg/__main__.py", "x"], "python -m pkg x"),
        (["/v/bin/python", "/v/bin/tool", "x"], ["/v/bin/tool", "x"], "tool x"),
        (["/v/bin/python", "-c", "a\nb"], ["-c"], "python ..."),
        (["/v/bin/python"], [""], "python ..."),
    ],
)
def test_the_command_is_the_one_that_was_given(
    interpreter: list[str], arguments: list[str], expected: str
) -> None:
    assert same_command(interpreter, arguments) == expected


def test_the_line_of_the_documented_example_starts_it_again(tmp_path: Path) -> None:
    """`python train.py`, found on the PATH, in the folder of the script."""
    script = tmp_path / "train.py"
    script.write_text(
        "import sys\nfrom rayhive.membership.addresses import same_command\n"
        "print(same_command(sys.orig_argv, sys.argv))\n"
    )
    folder = Path(sys.executable).parent
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[2])

    def run(command: list[str]) -> str:
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    told = run(["python", "train.py", "--rounds", "3"])
    assert told == "python train.py --rounds 3"
    assert run(shlex.split(told)) == told


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("10.0.0.1", "/ip4/10.0.0.1/tcp/0"),
        ("::1", "/ip6/::1/tcp/0"),
        ("fd00::2", "/ip6/fd00::2/tcp/0"),
    ],
)
def test_a_peer_listens_on_an_address_of_either_version(host: str, expected: str) -> None:
    assert tcp_address(host) == expected
    assert str(Multiaddr(expected)) == expected
    with mock.patch("hivemind.DHT") as dht:
        start_on_host(host)
    assert dht.call_args.kwargs["host_maddrs"] == [expected]


def test_a_name_is_no_address_to_listen_on() -> None:
    with pytest.raises(ConfigError, match="host: 'gpu-1' is not valid: an IPv4 or IPv6 address"):
        tcp_address("gpu-1")
