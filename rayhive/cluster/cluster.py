"""The cluster that replicates run on: a running one, or an embedded Ray on this machine."""

from __future__ import annotations

import atexit
import contextlib
import importlib
import logging
import os
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import ray
from ray.exceptions import RayError

from rayhive.cluster import actors, capacity, own_runs
from rayhive.cluster.address import KEY, Target, resolve
from rayhive.cluster.embedded import EmbeddedRay, keep_silent, kept_signal_handlers
from rayhive.cluster.node.agent import AgentOptions
from rayhive.cluster.replicate import supervisors
from rayhive.cluster.replicate.handle import ReplicateHandle, still_running
from rayhive.errors import ClusterError, ConfigError, NoAnswerError, Problem
from rayhive.spec import SwarmConfig, Timeouts
from rayhive.spec.replicate import ReplicateSpec

_STOP_TIMEOUT = 6.0
_RETIRE_TIMEOUT = 4.0


class Cluster:
    """A Ray cluster as rayhive uses it. Create one with :meth:`connect`.

    Args:
        embedded: The embedded Ray; None on a shared cluster.
        forkserver_command: Replaces rayhive's own forkserver; for tests.

    Attributes:
        embedded_ray: The embedded Ray; None on a shared cluster.
        embedded: Whether this is an embedded Ray, which ends with this process.
        agent_options: Settings of an agent that has to be created.
    """

    def __init__(
        self, embedded: EmbeddedRay | None, forkserver_command: Sequence[str] | None
    ) -> None:
        self.embedded_ray = embedded
        self.embedded = embedded is not None
        self.agent_options = AgentOptions(
            forkserver_command=None if forkserver_command is None else tuple(forkserver_command),
            directory=None if embedded is None else str(embedded.agents),
        )
        self._handles: dict[str, ReplicateHandle] = {}
        self._studies: set[str] = set()
        self._pending: dict[str, float] = {}  # supervisor -> time of its first lookup
        self._open = True
        atexit.register(self.close)

    @classmethod
    def connect(
        cls, address: str | None = None, *, forkserver_command: Sequence[str] | None = None
    ) -> Cluster:
        """Connect to the cluster at ``address`` or ``RAY_ADDRESS``, or start an embedded Ray.

        Call it from the main thread: an embedded Ray ends with the thread that started it.

        Args:
            address: ``HOST:PORT`` or ``auto``; ``local`` for an embedded Ray in any case.
            forkserver_command: Replaces rayhive's own forkserver; for tests.

        Raises:
            ConfigError: No usable cluster answers at the address.
            ClusterError: An embedded Ray did not start.
        """
        target = resolve(address)
        if ray.is_initialized():
            raise ClusterError("this process is connected to a Ray cluster already")
        if target is not None:
            _join(target)
        return cls(None if target else EmbeddedRay(), forkserver_command)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def check_room(self, swarm: SwarmConfig) -> list[Problem]:
        """Return the demands of a swarm that the cluster can never meet."""
        return capacity.check_room(swarm, self.embedded)

    def at_once(self, swarm: SwarmConfig, joining: int = 0) -> int:
        """See :func:`rayhive.cluster.capacity.at_once`."""
        return capacity.at_once(swarm, joining)

    def check_kinds(
        self, needs: Mapping[str, Collection[str]], swarm: SwarmConfig
    ) -> list[Problem]:
        """See :func:`rayhive.cluster.capacity.check_kinds`."""
        return capacity.check_kinds(needs, swarm, self.embedded)

    def start(self, spec: ReplicateSpec) -> ReplicateHandle:
        """Start a replicate, or adopt the one of this name if its supervisor lives.

        Args:
            spec: The replicate.

        Raises:
            ConfigError: A supervisor of this name runs another replicate.
            SupervisorError: The supervisor does not start in time; it is ended.
        """
        self._replace_broken()
        self._studies.add(spec.study)
        handle = supervisors.start(spec, self.agent_options, self._broken)
        if handle.spec != spec:
            text = f"a name that no other run on this cluster has; {handle.spec.folder} is running"
            raise ConfigError(Problem("name", spec.study, text))
        embedded = self.embedded_ray
        place = own_runs.testbed_folder() if embedded is None else embedded.directory
        if place is not None:
            own_runs.note(place, spec)
        self._handles[spec.run_id] = handle
        return handle

    def _broken(self) -> str | None:
        """Return a description of a failure of the embedded Ray; None without a failure."""
        return None if self.embedded_ray is None else self.embedded_ray.broken()

    def _replace_broken(self) -> None:
        """Start a new embedded Ray in place of one that has lost a daemon.

        The replicates on the old one died with it, or are ended here.
        """
        if self.embedded_ray is None or self._broken() is None:
            return
        self._handles.clear()
        self.embedded_ray.close()
        self.embedded_ray = EmbeddedRay()
        self.agent_options = replace(self.agent_options, directory=str(self.embedded_ray.agents))

    def find(self, run_id: str, folder: str | Path | None = None) -> ReplicateHandle | None:
        """Return the replicate of this name if its supervisor lives.

        A supervisor that Ray has not created in time is ended: it never ran anything.

        Args:
            run_id: Name of the replicate.
            folder: Folder of the replicate; one that writes to another folder does not count.

        Raises:
            NoAnswerError: The supervisor lives and does not answer.
        """
        self._replace_broken()
        try:
            handle = self.peek(run_id)
        except NoAnswerError:
            if not self._end_pending(run_id):
                raise
            return self.find(run_id, folder)
        if handle is None or (folder is not None and Path(handle.spec.folder) != Path(folder)):
            return None
        self._studies.add(handle.spec.study)
        self._handles[run_id] = handle
        return handle

    def _end_pending(self, run_id: str) -> bool:
        """End supervisors that Ray has not created in time; return whether there were any."""
        now, ended = time.monotonic(), False
        for name in supervisors.pending(run_id):
            if now - self._pending.setdefault(name, now) >= Timeouts().supervisor:
                actors.end(name)
                ended = True
        return ended

    def peek(self, run_id: str) -> ReplicateHandle | None:
        """Return the same as :meth:`find`, without adopting the replicate.

        Args:
            run_id: Name of the replicate, or of its supervisor.

        Raises:
            NoAnswerError: The supervisor lives and does not answer.
        """
        return supervisors.find(run_id, self._broken)

    def supervisors(self, study: str | None = None) -> list[str]:
        """Return the names of the replicates that supervisors of a study have, or of all studies.

        A supervisor that does not answer is named itself.
        """
        return list(supervisors.running(study))

    def retire(self, studies: Sequence[str]) -> None:
        """Have supervisors and agents of these studies exit once no replicate needs them."""
        for pattern in (actors.supervisor_pattern, actors.agent_pattern):
            self._retire([name for study in studies for name in actors.live(pattern(study))])

    @staticmethod
    def _retire(found: Sequence[str]) -> None:
        agents = [agent for agent in map(actors.find, found) if agent is not None]
        if not agents:
            return
        answers = [agent.retire.remote() for agent in agents]
        ray.wait(answers, num_returns=len(answers), timeout=_RETIRE_TIMEOUT)

    def close(self) -> None:
        """Disconnect. May be called again.

        An embedded Ray ends with everything on it; its running replicates are stopped first. On a
        shared cluster, running replicates go on and can be adopted. Supervisors and agents of the
        studies that this object started exit once no replicate needs them.
        """
        if not self._open:
            return
        self._open = False
        atexit.unregister(self.close)
        try:
            with contextlib.suppress(RayError):  # the cluster may be gone already
                if ray.is_initialized() and self.embedded_ray is not None:
                    self._stop_all("the driver closed its cluster")
                if ray.is_initialized():
                    self.retire(sorted(self._studies))
        finally:
            if self.embedded_ray is not None:
                self.embedded_ray.close()
            else:
                ray.shutdown()

    def _stop_all(self, reason: str) -> None:
        running = still_running(self._handles.values(), 0.0)
        for handle in running:
            handle.stop(reason)
        still_running(running, _STOP_TIMEOUT)


def _join(target: Target) -> None:
    """Connect this process to a cluster that answered.

    Raises:
        ConfigError: The cluster cannot be joined.
    """
    os.environ.setdefault("RAY_DEDUP_LOGS", "1")
    if target.auth_mode is not None:
        os.environ["RAY_AUTH_MODE"] = target.auth_mode
        # Ray read the variable when it was imported.
        config = getattr(importlib.import_module("ray._raylet"), "Config", None)
        if config is not None:
            config.initialize("")
    # A job brings its working directory. Otherwise a checkout is shipped, and an installed rayhive
    # is expected on the nodes too.
    package = Path(__file__).resolve().parents[1]
    installed = "site-packages" in package.parts or "dist-packages" in package.parts
    ship = not target.in_job and not installed
    try:
        with kept_signal_handlers():
            ray.init(
                address=target.address,
                namespace=actors.NAMESPACE,
                log_to_driver=False,
                logging_level=logging.ERROR,
                runtime_env={"py_modules": [str(package)]} if ship else None,
            )
        keep_silent()
    except Exception as error:
        text = f"a cluster that can be joined: {str(error).strip().splitlines()[0]}"
        raise ConfigError(Problem(KEY, target.address, text)) from error
