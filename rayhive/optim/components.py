"""What the optimizer is made of: its tracker and averagers, and the events that it reports."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import hivemind
import torch
from hivemind.optim.grad_averager import GradientAverager
from hivemind.utils import get_logger

from rayhive.averaging.averagers import RayhiveStateAverager
from rayhive.averaging.excluded import ExcludedRoundFailed
from rayhive.averaging.factory import round_fields, takes_rules, with_our_averager
from rayhive.averaging.filtered_averager import floats
from rayhive.averaging.group_formation import NoOtherPeers
from rayhive.averaging.outlier_filter import norm_of
from rayhive.errors import PeerError
from rayhive.membership.member import Member
from rayhive.membership.progress_tracker import LiveProgressTracker
from rayhive.optim.child_processes import descendants
from rayhive.optim.watchdog import PeerProcessDied, ProcessWatchdog
from rayhive.spec import Aggregation, OutlierFilterRule

logger = get_logger(__name__)

#: Longest wait for the end of a process that was killed [s].
JOIN_S = 1.0
#: How often a wait for what runs in the background may take all the time of a step.
BACKGROUND_WAITS = 4
#: How long after an averaging of parameters it may take until this peer has heard of it [s].
TOLD_S = 1.0
#: What an error calls the processes of a peer.
SPOKEN = {
    "dht": "DHT",
    "gradient_averager": "gradient averager's process",
    "state_averager": "state averager's process",
}

OnEvent = Callable[[str, dict[str, Any]], None]


class OptimizerComponents(hivemind.Optimizer):
    """A :class:`hivemind.Optimizer` that is built of rayhive's parts.

    The class that derives from it sets ``_on_event``, ``_averager_opts`` and
    ``_straggler_timeout`` before it calls this constructor. It takes hivemind's arguments, and:

    Args:
        outlier_filter: What is refused before a group averages, see
            :func:`rayhive.averaging.outlier_filter.judge`.
        aggregation: What a reducer makes of the gradients of a group, see
            :mod:`rayhive.averaging.aggregation`.
    """

    tracker: LiveProgressTracker
    #: Called before a round's gradients are averaged, with its number and the averager.
    before_round: Callable[[int, GradientAverager], None] | None = None
    #: Its own parameters were refused by the others: they have to be replaced.
    _diverged = False
    _groups: deque[frozenset[bytes]]
    _on_event: OnEvent | None
    _averager_opts: dict[str, Any]
    _straggler_timeout: float
    _state_told: threading.Event
    _watch: ProcessWatchdog

    def __init__(
        self,
        *,
        outlier_filter: OutlierFilterRule = "norm",
        aggregation: Aggregation = "mean",
        **kwargs: Any,
    ) -> None:
        self._outlier_filter, self._aggregation = outlier_filter, aggregation
        super().__init__(**kwargs)

    def __del__(self) -> None:
        if hasattr(self, "_parent_pid"):  # else it was refused before it began
            super().__del__()

    @property
    def _step_timeout(self) -> float:
        """Longest time of a step, from the wait for those who compute to the last part [s]."""
        return float(self.averaging_timeout) + self._straggler_timeout

    def _make_progress_tracker(self, target_batch_size: int, **kwargs: Any) -> LiveProgressTracker:
        return LiveProgressTracker(
            dht=self.dht,
            prefix=self.run_id,
            target_batch_size=target_batch_size,
            client_mode=self.client_mode,
            straggler_timeout=self._straggler_timeout,
            start=False,  # its thread must not hold a lock when averagers are forked
            **kwargs,
        )

    def _averager_settings(self, name: str) -> dict[str, Any]:
        return {
            "dht": self.dht,
            "prefix": f"{self.run_id}_{name}",
            "min_matchmaking_time": self.matchmaking_time,
            "allreduce_timeout": self.allreduce_timeout,
            "shutdown_timeout": self.shutdown_timeout,
            "next_chunk_timeout": self.next_chunk_timeout,
            "client_mode": self.client_mode,
            "auxiliary": self.auxiliary,
            "start": True,
        }

    def _make_state_averager(self, **kwargs: Any) -> RayhiveStateAverager:
        return RayhiveStateAverager(
            **{
                **self._averager_settings("state_averager"),
                "outlier_filter": self._outlier_filter,
                "offload_optimizer": self.offload_optimizer,
                "custom_gradients": self.offload_optimizer,
                "status_loglevel": self.status_loglevel,
                **kwargs,
            }
        )

    def _make_gradient_averager(
        self, factory: Callable[..., Any] | None, **kwargs: Any
    ) -> GradientAverager:
        factory = with_our_averager(factory)
        robust = {"outlier_filter": self._outlier_filter, "aggregation": self._aggregation}
        averager = factory(
            **{
                **(robust if takes_rules(factory) else {}),
                **self._averager_settings("grad_averager"),
                "parameters": self.state_averager.main_parameters,
                **self._averager_opts,
                **kwargs,
            }
        )
        if self.offload_optimizer:
            parameters = self._optimized_parameters()
            with averager.get_tensors() as gradients:
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    parameter.grad = gradient
        return averager

    def _optimized_parameters(self) -> list[torch.Tensor]:
        groups = self.state_averager.optimizer.param_groups
        return [parameter for group in groups for parameter in group["params"]]

    @property
    def live_peers(self) -> int:
        """Peers, this one included, that can take part in the next round."""
        return self.tracker.live_peers

    def _tell_members(self, kind: str, members: tuple[Member, ...], lost: frozenset[bytes]) -> None:
        averager = self.grad_averager if kind == "averaged" else self.state_averager
        if hasattr(averager, "set_members"):  # a user's own averager may know nothing of it
            averager.set_members(members, lost)

    @property
    def processes(self) -> dict[str, int]:
        """The processes that this peer consists of: role -> pid."""
        averagers = {
            "gradient_averager": self.grad_averager,
            "state_averager": self.state_averager,
        }
        return {
            "trainer": os.getpid(),
            "dht": self.dht.pid,
            **{child.name(): child.pid for child in descendants(self.dht.pid)},
            **{role: a.pid for role, a in averagers.items() if a is not None},
        }

    def _watch_processes(self) -> ProcessWatchdog:
        watched = {role: pid for role, pid in self.processes.items() if role != "trainer"}
        names = {role: SPOKEN.get(role, role) for role in watched}
        return ProcessWatchdog({names[role]: pid for role, pid in watched.items()}, self._on_death)

    def _on_death(self, error: PeerProcessDied) -> None:
        """Let go of all that a process that died, or now waits for one, may hold."""
        self.tracker.take_part(False)  # if it can still say so
        for averager in (self.grad_averager, self.state_averager):
            if averager is not None:
                averager.kill()
                averager.join(JOIN_S)
                with contextlib.suppress(ValueError):  # it was not held
                    averager.lock_averaged_tensors.release()

    def _finish_background(self) -> None:
        """Wait for what runs in the background: next to it, a round would use its buffers.

        hivemind goes on after the time that one averaging may take; a round has two.

        Raises:
            PeerError: It does not end.
        """
        for _ in range(BACKGROUND_WAITS * math.ceil(self._step_timeout / self.averaging_timeout)):
            self.state_averager.step(wait_for_delayed_updates=True)
            if not self.state_averager.pending_updates:
                # else the next round would ask for parameters that this peer has
                self._state_told.wait(TOLD_S)
                return
            self._watch.check()
        raise PeerError("what runs in the background does not end")

    def _emit_state_round(self, round_: int, began: float, control: Any) -> bool:
        """Report what became of averaging parameters; return whether all of it happened."""
        seconds = time.perf_counter() - began
        cancelled = control.cancelled()
        error = None if cancelled else control.exception()
        if isinstance(error, NoOtherPeers):
            return False
        self._diverged |= isinstance(error, ExcludedRoundFailed)
        self._emit_refusals(round_, error, "parameters")
        if cancelled or error is not None:
            self._emit(
                "state_round", round=round_, outcome="failed", group_size=0, fraction=0.0,
                sent_bytes=0, received_bytes=0, averaging_s=seconds,
            )  # fmt: skip
            return False
        result = control.result()
        self._emit_refusals(round_, result, "parameters")
        self._diverged |= getattr(result, "excluded", False)
        fields = round_fields(result, seconds)
        outcome = "averaged" if fields["fraction"] >= 1.0 else "partial"
        self._emit("state_round", round=round_, outcome=outcome, **fields)
        return outcome == "averaged"

    def _read_result(self, record: dict[str, Any], result: Any) -> None:
        """Note what came of averaging gradients, and say what was refused."""
        record.update(round_fields(result, time.perf_counter() - record["began"]))
        self._emit_refusals(record["round"], result, "gradients")
        self._groups.append(frozenset(peer.to_bytes() for peer in result))
        if getattr(result, "excluded", False):
            record["samples"] = 0

    def _emit_refusals(self, round_: int, result: Any, tensors: str) -> None:
        for refusal in getattr(result, "rejected", ()):
            self._refuse(round_, tensors, **refusal)

    def _refuse(self, round_: int, tensors: str, **refusal: Any) -> None:
        """Log and report that a peer's tensors were refused."""
        limit = "" if refusal.get("bound") is None else f" (bound {refusal['bound']:.4g})"
        value = refusal.get("norm") if refusal.get("lean") is None else refusal["lean"]
        measured = "" if value is None else f" {value:.4g}"
        logger.warning(
            f"round {round_}: the {tensors} of {refusal['offender']} are refused: "
            f"{refusal['reason']}{measured}{limit}"
        )
        self._emit("rejected", round=round_, tensors=tensors, **refusal)

    def _refuses_own(self, record: dict[str, Any]) -> bool:
        """Say whether the gradients that this peer would apply on its own are not finite."""
        gradients = (parameter.grad for parameter in self._optimized_parameters())
        norm = norm_of(floats([gradient for gradient in gradients if gradient is not None]))
        if math.isfinite(norm):
            return False
        refusal = {"offender": str(self.dht.peer_id), "reason": "not_finite", "norm": norm}
        self._refuse(record["round"], "gradients", bound=None, **refusal)
        record["samples"] = 0
        return True

    def _emit_round(self, record: dict[str, Any], outcome: str) -> None:
        fields = {key: value for key, value in record.items() if key != "began"}
        if outcome in ("alone", "local", "skipped"):
            self._groups.append(frozenset({self.dht.peer_id.to_bytes()}))
        self._emit("round", outcome=outcome, **fields)

    def _emit(self, kind: str, **fields: Any) -> None:
        if self._on_event is not None:
            self._on_event(kind, fields)
