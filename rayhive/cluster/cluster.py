"""The cluster that replicates run on: a running one, or a Ray of our own on this machine."""

from __future__ import annotations

import atexit
import contextlib
import importlib
import logging
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
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

from rayhive.cluster import actors, autoscaling
from rayhive.cluster.address import KEY, Target, resolve
from rayhive.cluster.calls import RETRY_EVERY
from rayhive.cluster.embedded import EmbeddedRay, keep_silent, kept_signal_handlers
from rayhive.cluster.node import capabilities, remote_capabilities
from rayhive.cluster.node.raylets import rooms
from rayhive.cluster.replicate import placement
from rayhive.cluster.replicate.handle import ReplicateHandle
from rayhive.cluster.replicate.supervisor import TrialSupervisor
from rayhive.cluster.replicate.timeouts import PhaseTimeouts
from rayhive.cluster.testbed.config import NUMBER_LABEL
from rayhive.errors import ClusterError, ConfigError, NoAnswerError, Problem, SupervisorError
from rayhive.spec import SwarmConfig
from rayhive.spec.replicate import ReplicateSpec

_ANSWER_TIMEOUT = 15.0
#: Longest wait for the first report of an autoscaler; its monitor looks every 5 s.
_FIRST_REPORT = 12.0
_STOP_TIMEOUT = 6.0
_RETIRE_TIMEOUT = 4.0


class Cluster:
    """A Ray cluster with what rayhive needs of it. Make one with :meth:`connect`.

    Args:
        embedded: The Ray of our own, None on somebody else's.
        timing: Bounds of the phases of replicates; None for those of each replicate's study.
        forkserver_command: Overrides rayhive's own forkserver; for tests.
    """

    def __init__(
        self,
        embedded: EmbeddedRay | None,
        timing: PhaseTimeouts | None,
        forkserver_command: Sequence[str] | None,
    ) -> None:
        self._embedded = embedded
        self._timing = timing
        self._agent_options = {
            "forkserver_command": None if forkserver_command is None else list(forkserver_command),
            "directory": None if embedded is None else str(embedded.agents),
            "idle": (timing or PhaseTimeouts()).agent_idle,
        }
        self._handles: dict[str, ReplicateHandle] = {}
        self._studies: set[str] = set()
        self._make: Callable[[], EmbeddedRay] | None = None
        self._pending: dict[str, float] = {}  # run id -> when it was first seen
        self._open = True
        atexit.register(self.close)

    @classmethod
    def connect(
        cls,
        address: str | None = None,
        *,
        namespace: str = actors.NAMESPACE,
        num_cpus: int | None = None,
        timing: PhaseTimeouts | None = None,
        forkserver_command: Sequence[str] | None = None,
    ) -> Cluster:
        """Connect to the cluster at ``address`` or ``RAY_ADDRESS``, or start one of our own.

        To be called from the main thread: an embedded Ray ends with the thread that started it.

        Args:
            address: ``HOST:PORT`` or ``auto``; ``local`` for an embedded Ray in any case.
            namespace: Ray namespace of this driver; actors are always in rayhive's own.
            num_cpus: Logical CPUs of an embedded Ray; those of the machine if None.
            timing: Bounds of the phases of replicates; None for those of each replicate's study.
            forkserver_command: Overrides rayhive's own forkserver; for tests.

        Raises:
            ConfigError: Nothing that can be used answers at the address.
            ClusterError: An embedded Ray did not start.
        """
        target = resolve(address)
        if ray.is_initialized():
            raise ClusterError("this process is connected to a Ray cluster already")
        make = partial(EmbeddedRay, namespace, num_cpus)
        embedded = make() if target is None else None
        if target is not None:
            _join(target, namespace)
        cluster = cls(embedded, timing, forkserver_command)
        cluster._make = make
        return cluster

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    @property
    def embedded(self) -> bool:
        """Whether this is a Ray of our own, which ends with this process."""
        return self._embedded is not None

    def capacity(self) -> dict[str, Any]:
        """Return what the living nodes have in total: ``cpus``, ``gpus``, ``nodes``, ``labels``."""
        found = rooms()
        return {
            "cpus": sum(room.cpus for room in found),
            "gpus": sum(room.gpus for room in found),
            "nodes": len(found),
            "labels": [room.labels for room in found],
        }

    def check_room(self, swarm: SwarmConfig) -> list[Problem]:
        """Return what of a swarm the cluster can never hold.

        On a cluster that adds nodes on demand only what no node ever holds: the demand for the
        rest has to reach Ray before a node is added for it.
        """
        found = placement.problems(swarm, rooms())
        if found and not self.embedded and autoscaling.grows(_FIRST_REPORT):
            return placement.lasting_problems(swarm)
        return found

    def check_kinds(
        self, needs: Mapping[str, Collection[str]], swarm: SwarmConfig
    ) -> list[Problem]:
        """Return which kinds of faults some node that may get peers of the swarm can't do.

        Args:
            needs: The kinds, each with what it needs.
            swarm: The swarm.
        """
        if not needs:
            return []  # trying what a machine allows starts processes and mounts
        present = rooms()
        if self.embedded:
            available = dict(capabilities.here())
        elif any(NUMBER_LABEL in room.labels for room in present):  # all on this machine
            available = {**capabilities.here(), **dict.fromkeys(("link", "node", "nodes", "drain"))}
        else:
            available = remote_capabilities.what_all_can(remote_capabilities.hosts(swarm, present))
            available |= dict.fromkeys(("link", "node"), capabilities.NEEDS_TESTBED)
        return capabilities.missing(needs, available)

    def start(self, spec: ReplicateSpec, timing: PhaseTimeouts | None = None) -> ReplicateHandle:
        """Start a replicate, or adopt the one of this name if its supervisor lives.

        Args:
            spec: The replicate.
            timing: Other bounds than the cluster's.

        Raises:
            ConfigError: A supervisor of this name runs something else.
            SupervisorError: The supervisor does not start in time; it is ended.
        """
        bounds = timing or self._timing or PhaseTimeouts(spec.timeouts)
        self._mend()
        self._studies.add(spec.study)
        node = ray.get_runtime_context().get_node_id()
        given = spec.model_dump(mode="json", by_alias=True)
        supervisor: Any = ray.remote(TrialSupervisor)
        actor = supervisor.options(
            name=spec.run_id,
            namespace=actors.NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            max_restarts=0,
            # The events are written to the driver's disk.
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node, soft=False),
        ).remote(given, bounds, self._agent_options)
        other = ReplicateSpec.model_validate(
            _first_answer(actor, spec.run_id, bounds.study.supervisor)
        )
        if other != spec:
            text = f"a name that no other run on this cluster has; {other.folder} is running"
            raise ConfigError(Problem("name", spec.study, text))
        if self._embedded is not None:
            self._embedded.note_run(spec)
        handle = ReplicateHandle(spec, actor, self._broken)
        self._handles[spec.run_id] = handle
        return handle

    def _broken(self) -> str | None:
        """Return what is wrong with the embedded Ray, None if nothing is or there is none."""
        return None if self._embedded is None else self._embedded.broken()

    def _mend(self) -> None:
        """Start another embedded Ray in the place of one that has lost a daemon.

        What ran on it died with it, or is ended here.
        """
        if self._embedded is None or self._make is None or self._broken() is None:
            return
        self._handles.clear()
        self._embedded.close()
        self._embedded = self._make()
        self._agent_options["directory"] = str(self._embedded.agents)

    def find(self, run_id: str, folder: str | Path | None = None) -> ReplicateHandle | None:
        """Return the replicate of this name if its supervisor lives.

        A supervisor whose actor Ray has not made in time is ended: it never ran anything.

        Args:
            run_id: The name.
            folder: If given, a replicate that writes elsewhere is somebody else's: None.

        Raises:
            NoAnswerError: Its supervisor lives but does not answer.
        """
        self._mend()
        try:
            handle = self.peek(run_id)
        except NoAnswerError:
            if not actors.pending(run_id):
                raise
            since = self._pending.setdefault(run_id, time.monotonic())
            if time.monotonic() - since < (self._timing or PhaseTimeouts()).study.supervisor:
                raise
            actors.end(run_id)
            return None
        if handle is None or (folder is not None and Path(handle.spec.folder) != Path(folder)):
            return None
        self._studies.add(handle.spec.study)
        self._handles[run_id] = handle
        return handle

    def peek(self, run_id: str) -> ReplicateHandle | None:
        """Return the same as :meth:`find`, but without taking part in the replicate's study.

        Raises:
            NoAnswerError: Its supervisor lives but does not answer.
        """
        try:
            actor: Any = ray.get_actor(run_id, namespace=actors.NAMESPACE)
            spec: Any = ray.get(actor.describe.remote(), timeout=_ANSWER_TIMEOUT)
        except (GetTimeoutError, ActorUnavailableError) as error:
            raise NoAnswerError(f"{run_id} does not answer: {error}") from error
        except (ValueError, RayActorError, ActorUnschedulableError):
            return None
        return ReplicateHandle(ReplicateSpec.model_validate(spec), actor, self._broken)

    def supervisors(self, study: str | None = None) -> list[str]:
        """Return the run ids of the living supervisors of a study, or of all studies."""
        return actors.live(actors.supervisor_pattern(study))

    def retire_agents(self, studies: Sequence[str]) -> None:
        """Let the agents of these studies go as soon as no replicate needs them."""
        found = [name for study in studies for name in actors.live(actors.agent_prefix(study))]
        agents: list[Any] = []
        for name in found:
            with contextlib.suppress(ValueError):
                agents.append(ray.get_actor(name, namespace=actors.NAMESPACE))
        if not agents:
            return
        answers = [agent.retire.remote() for agent in agents]
        ray.wait(answers, num_returns=len(answers), timeout=_RETIRE_TIMEOUT)
        for agent, answer in zip(agents, answers, strict=True):
            with contextlib.suppress(RayError):
                if ray.get(answer, timeout=0):
                    agent.leave.remote()

    def close(self) -> None:
        """Disconnect; may be called again.

        An embedded Ray ends with everything on it: replicates that still run are stopped first.
        On a shared cluster running replicates go on and can be adopted; the agents of the
        studies that this object started go as soon as no replicate needs them.
        """
        if not self._open:
            return
        self._open = False
        atexit.unregister(self.close)
        try:
            with contextlib.suppress(RayError):  # it may be gone before us
                if ray.is_initialized() and self._embedded is not None:
                    self._stop_all("the driver closed its cluster")
                if ray.is_initialized():
                    self.retire_agents(sorted(self._studies))
        finally:
            if self._embedded is not None:
                self._embedded.close()
            else:
                ray.shutdown()

    def _stop_all(self, reason: str) -> None:
        running = [handle for handle in self._handles.values() if handle.wait(0.0) is None]
        for handle in running:
            handle.stop(reason)
        deadline = time.monotonic() + _STOP_TIMEOUT
        for handle in running:
            handle.wait(max(0.0, deadline - time.monotonic()))


def _first_answer(actor: Any, run_id: str, patience: float) -> Any:
    """Return the spec that a new supervisor runs; end the actor if it does not answer in time.

    Raises:
        SupervisorError: It does not start.
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


def _join(target: Target, namespace: str) -> None:
    """Connect this process to a cluster that answered."""
    os.environ.setdefault("RAY_DEDUP_LOGS", "1")
    if target.auth_mode is not None:
        os.environ["RAY_AUTH_MODE"] = target.auth_mode
        # Ray read the variable when it was imported.
        config = getattr(importlib.import_module("ray._raylet"), "Config", None)
        if config is not None:
            config.initialize("")
    # A job brings its working directory. Elsewhere a checkout is shipped; where rayhive is
    # installed, the nodes are expected to have it too.
    package = Path(__file__).resolve().parent.parent
    installed = "site-packages" in package.parts or "dist-packages" in package.parts
    ship = not target.in_job and not installed
    try:
        with kept_signal_handlers():
            ray.init(
                address=target.address,
                namespace=namespace,
                log_to_driver=False,
                logging_level=logging.ERROR,
                runtime_env={"py_modules": [str(package)]} if ship else None,
            )
        keep_silent()
    except Exception as error:
        text = f"a cluster that can be joined: {str(error).strip().splitlines()[0]}"
        raise ConfigError(Problem(KEY, target.address, text)) from error
