"""Resolution of a cluster's address; a wrong one is refused at once."""

from __future__ import annotations

import socket

import pytest

from rayhive.cluster import address
from rayhive.cluster.address import resolve
from rayhive.cluster.cluster import Cluster
from rayhive.errors import ConfigError


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_ADDRESS", "RAY_JOB_CONFIG_JSON_ENV_VAR"):
        monkeypatch.delenv(name, raising=False)


def refused(given: str | None) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve(given)
    (problem,) = caught.value.problems
    assert problem.key == "--address" and caught.value.exit_code == 2
    return problem.allowed


def test_no_address_means_an_embedded_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve(None) is None
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    assert resolve("local") is None


@pytest.mark.parametrize("given", ["host", ":6379", "host:", "host:port", "host:0", "host:65536"])
def test_a_malformed_address_is_refused(given: str) -> None:
    assert "HOST:PORT" in refused(given)


@pytest.mark.parametrize("given", ["ray://host:10001", "http://host:8265"])
def test_other_schemes_are_refused_with_the_command_to_use(given: str) -> None:
    assert "ray job submit" in refused(given)


def test_an_address_where_nothing_answers_is_refused_before_ray_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ray.init", lambda **_: pytest.fail("Ray was asked"))
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(ConfigError, match="nothing answers there"):
        Cluster.connect(f"127.0.0.1:{port}")


def test_the_environment_names_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "nonsense")
    assert "HOST:PORT" in refused(None)


def test_something_that_is_not_ray_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address, "_PROBE_TIMEOUT", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert "can't be joined" in refused(f"127.0.0.1:{server.getsockname()[1]}")


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ('{"error": "RuntimeError", "text": "Version mismatch: 2.50"}', "Version mismatch: 2.50"),
        ("gcs: Unauthenticated: InvalidAuthToken", "RAY_AUTH_TOKEN"),
        ("something else", "something else"),
    ],
)
def test_the_result_of_the_probe_reaches_the_user(
    monkeypatch: pytest.MonkeyPatch, said: str, words: str
) -> None:
    monkeypatch.setattr(address, "_PROBE", f"print({said!r})")
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert words in refused(f"127.0.0.1:{server.getsockname()[1]}")


def test_a_cluster_that_wants_a_token_gets_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    probe = "import os; print('{}' if 'RAY_AUTH_MODE' in os.environ else 'InvalidAuthToken')"
    monkeypatch.setattr(address, "_PROBE", probe)
    with socket.create_server(("127.0.0.1", 0)) as server:
        target = resolve(f"127.0.0.1:{server.getsockname()[1]}")
    assert target is not None and target.auth_mode == "token"


def test_the_driver_of_a_job_is_not_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    monkeypatch.setattr(address, "_PROBE", "raise SystemExit(1)")
    with socket.create_server(("127.0.0.1", 0)) as server:
        given = f"127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", given)
        assert resolve(None) == address.Target(given, in_job=True)
