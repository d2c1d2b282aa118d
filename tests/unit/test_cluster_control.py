"""Supervisors that live, that died, and that live and do not answer are told apart."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError, RaySystemError

from rayhive.cluster import actors, control
from rayhive.cluster.cluster import Cluster
from rayhive.cluster.node.agent import AgentOptions
from rayhive.cluster.replicate.handle import ReplicateHandle
from rayhive.cluster.replicate.peer_table import ReplicateStatus
from rayhive.cluster.replicate.supervisors import give, start
from rayhive.errors import ClusterError, NoAnswerError
from rayhive.spec import SwarmConfig, Timeouts
from rayhive.spec.replicate import ReplicateSpec

SPEC = ReplicateSpec(
    study="study",
    trial=0,
    replicate=0,
    workload={"name": "digits"},
    swarm=SwarmConfig(),
    configuration={},
    folder="/nowhere",
)
NAME = "supervisor:study:c0de:n0de:1"
SILENT = [GetTimeoutError("15 s"), ActorUnavailableError("a broken link", b"0" * 16)]


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """Return a cluster with one supervisor."""
    monkeypatch.setattr(actors, "live", lambda pattern: [NAME])
    monkeypatch.setattr(ray, "get_actor", lambda name, namespace: _Asked())
    monkeypatch.setattr(actors, "pending", lambda name: False)
    found = Cluster(None, None)
    yield found
    found.close()


class _Asked:
    """An actor whose methods may be called."""

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=lambda *arguments: name)


def answering(monkeypatch: pytest.MonkeyPatch, answer: Any) -> None:
    def get(reference: Any, timeout: float) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(ray, "get", get)


@pytest.mark.parametrize("error", SILENT)
def test_a_supervisor_that_does_not_answer_is_not_lost(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    answering(monkeypatch, error)
    with pytest.raises(NoAnswerError, match=SPEC.run_id):
        cluster.find(SPEC.run_id, SPEC.folder)
    handle = ReplicateHandle(SPEC, _Asked())
    with pytest.raises(NoAnswerError, match=SPEC.run_id):
        handle.status()
    assert handle.wait(0.0) is None


def test_a_supervisor_that_died_is_lost(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    answering(monkeypatch, ActorDiedError())
    assert cluster.find(SPEC.run_id) is None
    handle = ReplicateHandle(SPEC, _Asked())
    with pytest.raises(ClusterError, match="gone") as caught:
        handle.status()
    assert not isinstance(caught.value, NoAnswerError)
    outcome = handle.wait(0.0)
    assert outcome is not None and outcome.state == "lost"

    def nobody(name: str, namespace: str) -> Any:
        raise ValueError(name)

    monkeypatch.setattr(ray, "get_actor", nobody)
    assert cluster.find(SPEC.run_id) is None


def test_a_broken_cluster_is_no_lost_supervisor(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    answering(monkeypatch, RaySystemError("the head is gone"))
    with pytest.raises(RaySystemError):
        cluster.find(SPEC.run_id)


def test_a_supervisor_that_ray_never_made_is_given_up_and_ended(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[str] = []
    answering(monkeypatch, GetTimeoutError("15 s"))
    monkeypatch.setattr(actors, "pending", lambda name: True)

    def end(name: str) -> None:
        ended.append(name)
        monkeypatch.setattr(actors, "live", lambda pattern: [])

    monkeypatch.setattr(actors, "end", end)
    with pytest.raises(NoAnswerError):  # it may be on its way
        cluster.find(SPEC.run_id, SPEC.folder)
    assert ended == []
    later = time.monotonic() + Timeouts().supervisor
    monkeypatch.setattr(time, "monotonic", lambda: later)
    assert cluster.find(SPEC.run_id, SPEC.folder) is None
    assert ended == [NAME]


def test_a_replicate_is_given_to_a_supervisor_again_until_it_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers: list[Any] = [ActorUnavailableError("a broken link", b"0" * 16), True]
    killed: list[Any] = []

    def get(reference: Any, timeout: float) -> Any:
        answer = answers.pop(0) if answers else GetTimeoutError("late")
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(ray, "kill", killed.append)
    assert give(_Asked(), {}, "a-run", 60.0)
    with pytest.raises(ClusterError, match=r"a-run did not start within 0 s \(timeouts.superv"):
        give(_Asked(), {}, "a-run", 0.0)
    assert len(killed) == 1


def test_a_request_to_stop_that_may_not_have_arrived_is_repeated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []

    class Supervisor:
        """Cannot be reached."""

        def __getattr__(self, name: str) -> Any:
            return SimpleNamespace(remote=lambda *arguments: asked.append(name))

    answering(monkeypatch, ActorUnavailableError("a broken link", b"0" * 16))
    handle = ReplicateHandle(SPEC, Supervisor())
    assert handle.wait(0.01) is None and asked.count("stop") == 0
    handle.stop("enough")
    assert handle.wait(0.01) is None and asked.count("stop") > 1


class _Cluster:
    """Supervisors by their names: what each has, or the error of a call to it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, has: dict[str, Any]) -> None:
        self.has, self.calls = has, list[tuple[str, str]]()
        here = SimpleNamespace(get_node_id=lambda: "n0de")
        monkeypatch.setattr(ray, "get_runtime_context", lambda: here)
        monkeypatch.setattr(actors, "code_version", lambda: "c0de")
        monkeypatch.setattr(actors, "live", lambda pattern: sorted(self.has))
        monkeypatch.setattr(actors, "detached", self.create)
        monkeypatch.setattr(ray, "get_actor", lambda name, namespace: self.actor(name))
        monkeypatch.setattr(ray, "get", self.get)

    def create(self, kind: type, name: str, node: str, *arguments: Any) -> Any:
        self.has["new"] = None
        return self.actor("new")

    def actor(self, name: str) -> Any:
        def called(method: str) -> Any:
            return SimpleNamespace(remote=lambda *arguments: self.call(name, method))

        return SimpleNamespace(**{each: called(each) for each in ("describe", "take", "outcome")})

    def call(self, name: str, method: str) -> tuple[str, str]:
        self.calls.append((name, method))
        return name, method

    def get(self, call: tuple[str, str], timeout: float) -> Any:
        name, method = call
        if isinstance(self.has[name], Exception):
            raise self.has[name]
        return self.has[name] if method == "describe" else True


def test_a_replicate_is_given_to_an_idle_supervisor_of_the_same_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other = SPEC.model_copy(update={"trial": 1}).model_dump(mode="json", by_alias=True)
    has = {f"{NAME}-busy": other, f"{NAME}-silent": SILENT[0], f"{NAME}-dead": ActorDiedError()}
    dead = f"{NAME}-dead"  # may have died after it was asked
    has |= {"supervisor:study:0ld:n0de:1": None, "supervisor:another:c0de:n0de:1": None}
    cluster = _Cluster(monkeypatch, {**has, f"{NAME}-idle": None})
    assert start(SPEC, AgentOptions(), lambda: None).spec == SPEC
    assert [name for name, method in cluster.calls if method == "take"] == [dead, f"{NAME}-idle"]
    assert "new" not in cluster.has

    cluster = _Cluster(monkeypatch, has)
    start(SPEC, AgentOptions(), lambda: None)
    assert [name for name, method in cluster.calls if method == "take"] == [dead, "new"]


def test_a_replicate_of_the_same_name_is_found_and_not_started_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    elsewhere = SPEC.model_copy(update={"folder": "/elsewhere"})
    given = elsewhere.model_dump(mode="json", by_alias=True)
    cluster = _Cluster(monkeypatch, {"supervisor:study:0ld:n0de:1": given, NAME: None})
    assert start(SPEC, AgentOptions(), lambda: None).spec == elsewhere
    assert {method for _, method in cluster.calls} == {"describe"}


class _Handle:
    """A replicate that ends when it is told to."""

    def __init__(self, run_id: str) -> None:
        self.run_id, self.spec, self.stopped = run_id, SPEC, False

    def status(self) -> ReplicateStatus:
        if self.run_id == "ended":
            raise ClusterError("it is gone")
        return ReplicateStatus(self.run_id, "training")

    def wait(self, timeout: float) -> dict[str, str] | None:
        return {"state": "stopped", "stop_reason": "x"} if self.stopped else None

    def stop(self, reason: str) -> None:
        self.stopped = True

    def release(self) -> None:
        """There is nothing to let go."""


@pytest.fixture
def handles(monkeypatch: pytest.MonkeyPatch) -> dict[str, _Handle]:
    """Return the replicates of a cluster on which another one does not answer."""
    handles = {run_id: _Handle(run_id) for run_id in ("first", "ended", "last")}

    def peek(run_id: str) -> _Handle:
        if run_id == "silent":
            raise NoAnswerError("silent does not answer: 15 s")
        return handles[run_id]

    @contextmanager
    def connect(address: str | None) -> Iterator[Any]:
        yield SimpleNamespace(
            peek=peek,
            supervisors=lambda study=None: ["first", "silent", "ended", "last"],
            retire=lambda studies: None,
        )

    monkeypatch.setattr(actors, "pending", lambda name: False)
    monkeypatch.setattr(control, "resolve", lambda address: address)
    monkeypatch.setattr(Cluster, "connect", connect)
    return handles


def test_the_status_names_a_supervisor_that_does_not_answer(handles: dict[str, _Handle]) -> None:
    found = {status.run_id: status.phase for status in control.cluster_status("a:1")}
    assert found == {"first": "training", "silent": "does not answer", "last": "training"}


def test_stopping_ends_a_supervisor_that_has_not_begun(
    handles: dict[str, _Handle], monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[str] = []
    monkeypatch.setattr(actors, "pending", lambda name: name == "silent")
    monkeypatch.setattr(actors, "end", ended.append)
    assert control.stop_study("a:1", "study") == ["first", "ended", "last"]
    assert ended == ["silent"]


def test_stopping_names_a_silent_supervisor_and_ends_the_rest(
    handles: dict[str, _Handle],
) -> None:
    with pytest.raises(NoAnswerError, match="silent"):
        control.stop_study("a:1", "study")
    assert all(handle.stopped for handle in handles.values())
