"""Events of the swarm's optimizer, and the log lines that go with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hivemind.utils import get_logger

logger = get_logger(__name__)

OnEvent = Callable[[str, dict[str, Any]], None]


class EventReporter:
    """Passes an optimizer's events on to one callback.

    Args:
        on_event: Called with the kind and the fields of each event, see
            :data:`rayhive.events.KINDS`. None drops all events.
    """

    def __init__(self, on_event: OnEvent | None = None) -> None:
        self._on_event = on_event

    def emit(self, kind: str, **fields: Any) -> None:
        """Report one event."""
        if self._on_event is not None:
            self._on_event(kind, fields)

    def refusals(self, round_: int, outcome: Any, tensors: str) -> None:
        """Report every refusal that the result or the error of an averaging names.

        Args:
            round_: The round.
            outcome: A result or an error; its ``rejected`` lists the refusals.
            tensors: ``gradients``, ``parameters`` or ``state``.
        """
        for refusal in getattr(outcome, "rejected", ()):
            self.refusal(round_, tensors, **refusal)

    def refusal(self, round_: int, tensors: str, **refusal: Any) -> None:
        """Log and report that the tensors of one peer were refused.

        Args:
            round_: The round.
            tensors: ``gradients``, ``parameters`` or ``state``.
            refusal: ``offender``, ``reason`` and the measured values, as in the ``rejected`` event.
        """
        limit = "" if refusal.get("bound") is None else f" (bound {refusal['bound']:.4g})"
        value = refusal.get("norm") if refusal.get("lean") is None else refusal["lean"]
        measured = "" if value is None else f" {value:.4g}"
        logger.warning(
            f"round {round_}: the {tensors} of {refusal['offender']} are refused: "
            f"{refusal['reason']}{measured}{limit}"
        )
        self.emit("rejected", round=round_, tensors=tensors, **refusal)
