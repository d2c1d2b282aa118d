"""Consistency of a peer's parameters with those of the other peers."""

from __future__ import annotations


class ParameterConsistency:
    """Tracks whether a peer's parameters are those of its round. No network, no clock.

    Attributes:
        stale: The parameters are of an older round than the peer announces, so they get next to no
            weight in an average.
        keeps_gradients: The peer kept its accumulated gradients when it loaded its state. They
            count although the parameters are stale.
        settling: A state was loaded, and parameters have not been averaged since.
        diverged: Other peers refused this peer's parameters; they have to be replaced.
        unsynchronised_since: The last round after which the parameters may differ between peers,
            because an averaging failed or was partial; 0 if there is none.
    """

    def __init__(self) -> None:
        self.stale = self.keeps_gradients = self.settling = self.diverged = False
        self.unsynchronised_since = 0
        self._requested = False

    @property
    def gradients_count(self) -> bool:
        """Whether the accumulated gradients may enter an average."""
        return self.keeps_gradients or not self.stale

    @property
    def needs_averaging(self) -> bool:
        """Whether parameters should be averaged in the next round, due or not."""
        return self.stale or self.unsynchronised_since > 0

    def take_divergence(self) -> bool:
        """Return whether the parameters were refused since the last call."""
        diverged, self.diverged = self.diverged, False
        return diverged

    def request_averaging(self, requested: bool) -> None:
        """Note whether a peer of the gradients' group needs parameters to be averaged."""
        self._requested = requested

    def take_request(self) -> bool:
        """Return whether a peer asked for parameter averaging since the last call."""
        requested, self._requested = self._requested, False
        return requested

    def note_alone(self) -> None:
        """Note that no other peer is left; no parameters are newer than these."""
        self.stale = False

    def note_failure(self, round_: int) -> None:
        """Note that parameters may differ between peers from ``round_`` on."""
        self.unsynchronised_since = round_

    def note_loaded(self) -> None:
        """Note that a state was downloaded."""
        self.settling = True

    def note_jump(self, *, behind: bool, keeps_gradients: bool) -> None:
        """Note that the peer went on to the newest round.

        Args:
            behind: The parameters are of an older round than that.
            keeps_gradients: The accumulated gradients were kept.
        """
        self.stale |= behind
        self.keeps_gradients = keeps_gradients

    def note_averaged(self, round_: int) -> None:
        """Note that the parameters of ``round_`` were averaged completely.

        With delays this may come after a later round has failed, which it does not mend.
        """
        self.stale = self.settling = self.keeps_gradients = False
        if self.unsynchronised_since <= round_:
            self.unsynchronised_since = 0
