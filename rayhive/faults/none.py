"""The scenario in which nothing breaks: every other one is compared with its twin under it."""

from __future__ import annotations


class NoFaults:
    """Plans no fault."""

    about = "Nothing breaks."

    def plan(self, seed: int, peers: int) -> list[dict[str, object]]:
        """Return the empty fault plan."""
        return []
