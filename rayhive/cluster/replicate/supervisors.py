"""The supervisors of a cluster: a replicate is found on one, or given to one.

A supervisor that has ended a replicate waits for another one of its study, with its peer actors, so
that most replicates begin without the start of a process.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray import exceptions

from rayhive.cluster import actors
from rayhive.cluster.actors import RETRY_EVERY
from rayhive.cluster.node.agent import AgentOptions
from rayhive.cluster.replicate.handle import NO_ANSWER, ReplicateHandle
from rayhive.cluster.replicate.supervisor import TrialSupervisor
from rayhive.errors import NoAnswerError, SupervisorError
from rayhive.spec.replicate import ReplicateSpec

_FIND_TIMEOUT, _LOOK_TIMEOUT = 15.0, 3.0


def start(
    spec: ReplicateSpec, agent_options: AgentOptions, broken: Callable[[], str | None]
) -> ReplicateHandle:
    """Give a replicate to a supervisor, or find the one that has a replicate of this name.

    Args:
        spec: The replicate.
        agent_options: Settings of an agent that has to be created.
        broken: See :class:`ReplicateHandle`.

    Raises:
        SupervisorError: The supervisor does not start in time; it is ended.
    """
    # The supervisor writes the events to the driver's disk.
    node = ray.get_runtime_context().get_node_id()
    prefix = actors.supervisor_prefix(spec.study, node)
    given = spec.model_dump(mode="json", by_alias=True)
    there, idle = _look(spec.run_id)
    if there is not None:
        return ReplicateHandle(there.spec, there.actor, broken)
    for name in (name for name in idle if name.startswith(prefix)):
        actor = actors.find(name)
        if actor is not None and _takes(actor, spec, given):
            break
    else:
        name = actors.new_supervisor_name(prefix)
        actor = actors.detached(TrialSupervisor, name, node, agent_options)
        if not give(actor, given, spec.run_id, spec.timeouts.supervisor):
            raise SupervisorError(f"the supervisor of {spec.run_id} left before it began")
    # A sweep of the same name may have begun at the same time. The later of the two is sure to see
    # the earlier one, because each looks after it has begun: the later one steps back.
    there, _ = _look(spec.run_id, apart_from=name)
    if there is not None and not (
        there.name.startswith(prefix) and _is_first(_Held(spec, actor, name), there)
    ):
        actor.stop.remote(spec.run_id, "another sweep has this name")
        actor.release.remote(spec.run_id)
        return ReplicateHandle(there.spec, there.actor, broken)
    return ReplicateHandle(spec, actor, broken)


def _takes(actor: Any, spec: ReplicateSpec, given: dict[str, Any]) -> bool:
    """Return whether an idle supervisor has taken a replicate; one that leaves or is busy has not.

    Raises:
        SupervisorError: It has begun the replicate and died, or did not answer and was ended.
    """
    try:
        return give(actor, given, spec.run_id, spec.timeouts.supervisor)
    except SupervisorError as error:
        died = isinstance(error.__cause__, exceptions.ActorDiedError)
        if died and not (Path(spec.folder) / "events.jsonl").exists():
            return False
        raise


def give(actor: Any, given: dict[str, Any], run_id: str, patience: float) -> bool:
    """Give a replicate to a supervisor; end the actor if it does not answer in time.

    Args:
        actor: The supervisor.
        given: The ReplicateSpec as a JSON object.
        run_id: The replicate.
        patience: Longest wait [s].

    Returns:
        Whether the supervisor has the replicate now.

    Raises:
        SupervisorError: The supervisor does not start.
    """
    deadline = time.monotonic() + patience
    while True:
        try:
            left = max(0.0, deadline - time.monotonic())
            return bool(ray.get(actor.take.remote(given), timeout=left))
        except NO_ANSWER as error:
            if time.monotonic() >= deadline:
                ray.kill(actor)
                text = (
                    f"the supervisor of {run_id} did not start within {patience:g} s "
                    "(timeouts.supervisor)"
                )
                raise SupervisorError(text) from error
            time.sleep(RETRY_EVERY)
        except exceptions.RayError as error:
            text = f"the supervisor of {run_id} does not start: {str(error).strip()}"
            raise SupervisorError(text) from error


def find(run_id: str, broken: Callable[[], str | None]) -> ReplicateHandle | None:
    """Return the replicate of a living supervisor; None if there is none.

    Args:
        run_id: Name of the replicate, or of a supervisor for the one that it has.
        broken: See :class:`ReplicateHandle`.

    Raises:
        NoAnswerError: A supervisor that may have it lives and does not answer.
    """
    silent: NoAnswerError | None = None
    for name in [run_id] if actors.supervisor_pattern(None).fullmatch(run_id) else _asked(run_id):
        try:
            held = _held(name, run_id)
        except NoAnswerError as error:
            silent = error
            continue
        if held is not None and run_id in (name, held.spec.run_id):
            return ReplicateHandle(held.spec, held.actor, broken)
    if silent is not None:
        raise silent
    return None


def pending(run_id: str) -> list[str]:
    """Return the supervisors that may get a replicate and that Ray has not created yet."""
    return [name for name in _asked(run_id) if actors.pending(name)]


def running(study: str | None) -> Iterator[str]:
    """Yield the name of each replicate that a supervisor of a study has, or of any study.

    A supervisor that does not answer is named itself.
    """
    for name in actors.live(actors.supervisor_pattern(study)):
        try:
            held = _held(name, name)
        except NoAnswerError:
            yield name
        else:
            if held is not None:
                yield held.spec.run_id


def _asked(run_id: str) -> list[str]:
    """Return the names of the living supervisors of the study of a replicate."""
    names = actors.live(actors.supervisor_pattern(None))
    return [name for name in names if actors.may_supervise(name, run_id)]


class _Held(NamedTuple):
    """A replicate and its supervisor."""

    spec: ReplicateSpec
    actor: Any
    name: str


def _is_first(own: _Held, other: _Held) -> bool:
    """Return whether a supervisor took a replicate before another one of its node did."""
    asked = [each.actor.since.remote(own.spec.run_id) for each in (own, other)]
    try:
        mine, theirs = ray.get(asked, timeout=_LOOK_TIMEOUT)
    except exceptions.RayError:
        return False
    return mine is not None and (theirs is None or (mine, own.name) < (theirs, other.name))


def _look(run_id: str, apart_from: str | None = None) -> tuple[_Held | None, list[str]]:
    """Ask the supervisors of the study of a replicate, without those that do not answer soon.

    Args:
        run_id: Name of the replicate.
        apart_from: A supervisor that is not asked.

    Returns:
        The replicate of this name if one of them has it, and the names of the idle ones.
    """
    idle = []
    for name in _asked(run_id):
        if name == apart_from:
            continue
        with contextlib.suppress(NoAnswerError):
            held = _held(name, run_id, _LOOK_TIMEOUT)
            if held is None:
                idle.append(name)
            elif held.spec.run_id == run_id:
                return held, idle
    return None, idle


def _held(name: str, run_id: str, timeout: float = _FIND_TIMEOUT) -> _Held | None:
    """Return the replicate that a supervisor has; None if it has none or is dead.

    Raises:
        NoAnswerError: It lives and does not answer.
    """
    try:
        actor: Any = ray.get_actor(name, namespace=actors.NAMESPACE)
        held: Any = ray.get(actor.describe.remote(), timeout=timeout)
    except NO_ANSWER as error:
        raise NoAnswerError(f"{run_id} does not answer: {error}") from error
    except (ValueError, exceptions.RayActorError, exceptions.ActorUnschedulableError):
        return None
    return None if held is None else _Held(ReplicateSpec.model_validate(held), actor, name)
