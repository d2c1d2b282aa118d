"""What the optimizer is made of: its tracker and averagers, and the events that it reports."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import hivemind
import torch
from hivemind.optim.grad_averager import GradientAverager

from rayhive.compression.averagers import RayhiveStateAverager
from rayhive.peer.averaging import round_fields, with_our_averager
from rayhive.peer.tracker import LiveProgressTracker

OnEvent = Callable[[str, dict[str, Any]], None]


class SwarmParts(hivemind.Optimizer):
    """A :class:`hivemind.Optimizer` that is built of rayhive's parts.

    The class that derives from it sets ``_on_event`` and ``_averager_opts`` before it calls
    hivemind's constructor.
    """

    scheduled_grads: Any
    scheduled_state: Any
    _on_event: OnEvent | None
    _averager_opts: dict[str, Any]

    def _make_progress_tracker(self, target_batch_size: int, **kwargs: Any) -> LiveProgressTracker:
        return LiveProgressTracker(
            dht=self.dht,
            prefix=self.run_id,
            target_batch_size=target_batch_size,
            client_mode=self.client_mode,
            status_loglevel=self.status_loglevel,
            start=True,
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
                "offload_optimizer": self.offload_optimizer,
                "custom_gradients": self.offload_optimizer,
                "status_loglevel": self.status_loglevel,
                **kwargs,
            }
        )

    def _make_gradient_averager(
        self, factory: Callable[..., Any] | None, **kwargs: Any
    ) -> GradientAverager:
        averager = with_our_averager(factory)(
            **{
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
        return max(1, int(self.tracker.live_peers))

    def _follow_live_peers(self) -> None:
        size = self.live_peers if self.live_peers > 1 else None
        for averager in (self.grad_averager, self.state_averager):
            if hasattr(averager, "set_group_size"):
                averager.set_group_size(size)

    def _emit_state_round(self, round_: int, began: float, control: Any) -> None:
        seconds = time.perf_counter() - began
        if control.cancelled() or control.exception() is not None:
            self._emit(
                "state_round", round=round_, outcome="failed", group_size=0, fraction=0.0,
                sent_bytes=0, received_bytes=0, averaging_s=seconds,
            )  # fmt: skip
            return
        fields = round_fields(control.result(), seconds)
        outcome = "averaged" if fields["fraction"] >= 1.0 else "partial"
        self._emit("state_round", round=round_, outcome=outcome, **fields)

    def _emit_round(self, record: dict[str, Any], outcome: str) -> None:
        fields = {key: value for key, value in record.items() if key != "began"}
        self._emit("round", outcome=outcome, **fields)

    def _emit(self, kind: str, **fields: Any) -> None:
        if self._on_event is not None:
            self._on_event(kind, fields)
