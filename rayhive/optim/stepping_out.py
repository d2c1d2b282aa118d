"""A peer that computes nothing for a while steps out of the swarm's rounds, and comes back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rayhive.errors import Problem
from rayhive.optim.state_sync import StateSync

#: What is said of a ``target_group_size``.
GROUP_SIZE = "absent: the group of a round is every peer that takes part"


class SteppingOut(StateSync):
    """Leaves the others to go on while this peer validates, saves a checkpoint or loads data.

    What it has accumulated stays, and enters the round in which it is back.
    """

    def begin_batch(self) -> None:
        """Say that a batch is about to be computed; come back first if this peer stepped out.

        It must be called before the forward pass: the parameters may be replaced by newer ones.
        """
        seconds = self.tracker.begin_batch()
        if seconds is None:
            return
        before = self.local_epoch
        if self.tracker.has_missed(before + 1, self.averaging_timeout):
            self.load_state_from_peers(keep_gradients=True)
        else:
            self.tracker.take_part(True)
        self._emit("stepped_in", round_before=before, round=self.local_epoch, seconds=seconds)

    def _take_over_missed_round(self) -> bool:
        """Load the state if others have averaged the round that is due; return whether they have.

        They may have begun it just when this peer came back. Its gradients enter the next round;
        a step by itself would part it from the others. Peers that were parted by a broken link
        merge what each of them learnt instead.
        """
        self._note_reunion()
        due = self.local_epoch + 1
        if self._apart is not None or not self.tracker.was_met(due):
            return False
        self.tracker.has_missed(due, self.averaging_timeout)  # they may be in the middle of it
        self.load_state_from_peers(keep_gradients=True)
        return True

    def end_batch(self) -> None:
        """Say that a batch is over: if the next one does not begin soon, this peer steps out."""
        self.tracker.end_batch()

    def _on_break(self) -> None:
        self._emit("stepped_out", round=self.local_epoch)


def group_sizes(options: Mapping[str, Any]) -> Iterator[Problem]:
    """Find sizes of groups among an optimizer's arguments, which would mean nothing."""
    factory = options.get("grad_averager_factory")
    for name, given in (
        ("averager_opts", options.get("averager_opts")),
        ("grad_averager_factory", getattr(factory, "keywords", None)),
    ):
        if given and "target_group_size" in given:
            yield Problem(f"{name}.target_group_size", given["target_group_size"], GROUP_SIZE)
