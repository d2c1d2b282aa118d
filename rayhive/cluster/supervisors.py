"""Supervisors on the connected cluster: start, lookup, end."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import ray
from ray.exceptions import (
    ActorUnavailableError,
    ActorUnschedulableError,
    GetTimeoutError,
    RayActorError,
    RayError,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rayhive.cluster import actors
from rayhive.cluster.calls import RETRY_EVERY
from rayhive.cluster.replicate.supervisor import TrialSupervisor
from rayhive.cluster.replicate.timeouts import PhaseTimeouts
from rayhive.errors import NoAnswerError, SupervisorError
from rayhive.spec.replicate import ReplicateSpec

_ANSWER_TIMEOUT = 15.0


def start(
    spec: ReplicateSpec, timing: PhaseTimeouts, agent_options: Mapping[str, Any]
) -> tuple[Any, ReplicateSpec]:
    """Start the supervisor of a replicate, or find the living one of the same name.

    Args:
        spec: The replicate.
        timing: Bounds of its phases.
        agent_options: Arguments of an agent that has to be created.

    Returns:
        The actor, and the replicate that it runs.

    Raises:
        SupervisorError: The supervisor does not start in time; it is ended.
    """
    # The supervisor writes the events to the driver's disk.
    node = ray.get_runtime_context().get_node_id()
    supervisor: Any = ray.remote(TrialSupervisor)
    actor = supervisor.options(
        name=spec.run_id,
        namespace=actors.NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        num_cpus=0,
        max_restarts=0,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node, soft=False),
    ).remote(spec.model_dump(mode="json", by_alias=True), timing, agent_options)
    answer = first_answer(actor, spec.run_id, timing.study.supervisor)
    return actor, ReplicateSpec.model_validate(answer)


def first_answer(actor: Any, run_id: str, patience: float) -> Any:
    """Return the stored spec of a new supervisor; end the actor if it does not answer in time.

    Args:
        actor: The supervisor.
        run_id: Its name.
        patience: Longest wait [s].

    Raises:
        SupervisorError: The supervisor does not start.
    """
    deadline = time.monotonic() + patience
    while True:
        try:
            return ray.get(actor.describe.remote(), timeout=max(0.0, deadline - time.monotonic()))
        except (GetTimeoutError, ActorUnavailableError) as error:
            if time.monotonic() >= deadline:
                ray.kill(actor)
                text = (
                    f"the supervisor of {run_id} did not start within {patience:g} s "
                    "(timeouts.supervisor)"
                )
                raise SupervisorError(text) from error
            time.sleep(RETRY_EVERY)
        except RayError as error:
            text = f"the supervisor of {run_id} does not start: {str(error).strip()}"
            raise SupervisorError(text) from error


def find(run_id: str) -> tuple[Any, ReplicateSpec] | None:
    """Return a living supervisor and the replicate that it runs; None if there is none.

    Raises:
        NoAnswerError: The supervisor lives and does not answer.
    """
    try:
        actor: Any = ray.get_actor(run_id, namespace=actors.NAMESPACE)
        spec: Any = ray.get(actor.describe.remote(), timeout=_ANSWER_TIMEOUT)
    except (GetTimeoutError, ActorUnavailableError) as error:
        raise NoAnswerError(f"{run_id} does not answer: {error}") from error
    except (ValueError, RayActorError, ActorUnschedulableError):
        return None
    return actor, ReplicateSpec.model_validate(spec)
