"""Waits for a peer's background work: averaging, and the optimizer's step."""

from __future__ import annotations

import math
from concurrent import futures

from hivemind.utils import get_logger

from rayhive.averaging.gradient_averager import RayhiveGradientAverager
from rayhive.errors import PeerError
from rayhive.optim.peer_state import PeerState

logger = get_logger(__name__)

#: Factor between the longest wait for background work and the longest time of a step.
BACKGROUND_WAITS = 4
#: Longest wait for the callback of a finished parameter averaging [s].
CALLBACK_S = 1.0
#: Longest wait for background work after its averaging was cancelled [s].
CANCELLED_S = 1.0


def finish(peer: PeerState) -> None:
    """Wait for the end of background work, and apply its results to the module.

    hivemind waits for the time of one averaging, and leaves what lasts longer; a round has two.

    Args:
        peer: The peer.

    Raises:
        PeerError: The work does not end, or a process of the peer died.
    """
    waits = math.ceil(peer.round_timeout / peer.averaging_timeout)
    left, moved = BACKGROUND_WAITS * waits, peer.moved()
    while left:
        peer.state_averager.step(wait_for_delayed_updates=True)
        if not peer.state_averager.pending_updates:
            # without the outcome, the next round would ask for parameters that are here
            peer.parameters_reported.wait(CALLBACK_S)
            take_extras(peer)
            return
        peer.watchdog.check()
        before, moved = moved, peer.moved()
        left = left - 1 if moved == before else BACKGROUND_WAITS * waits
    raise PeerError("what runs in the background does not end")


def end(peer: PeerState, patience: float) -> None:
    """Apply background work that ends soon, and cancel the rest.

    Args:
        peer: The peer.
        patience: Longest wait for its end [s].
    """
    pending = futures.wait(set(peer.state_averager.pending_updates), patience).not_done
    if pending:
        logger.warning(f"an averaging has not ended after {patience:.0f} s; cancelling it")
        peer.watchdog.interrupt()
        pending = futures.wait(pending, CANCELLED_S).not_done
        peer.watchdog.resume()
    if not pending:
        peer.state_averager.step(wait_for_delayed_updates=True)
        take_extras(peer)


def take_extras(peer: PeerState) -> None:
    """Set the extra tensors of a peer to averages that have arrived."""
    if isinstance(peer.grad_averager, RayhiveGradientAverager):
        peer.grad_averager.take_extras()
