"""Agreement of the replicas' weights."""

from __future__ import annotations

from itertools import combinations

from rayhive.columns import Column, Row, in_group
from rayhive.events import Weights as Fingerprint
from rayhive.metrics.folds import Reduced
from rayhive.metrics.group import MetricGroup
from rayhive.timeline import Timeline


class Weights(MetricGroup):
    """Column from the fingerprints of the weights that every peer takes after a round.

    * ``weights_distance_max``: the largest relative distance between two peers after the same
      round, ``‖sketch_a - sketch_b‖ / max(‖a‖, ‖b‖)``, over all pairs and rounds. A count-sketch
      (Charikar, Chen and Farach-Colton, 2002) is linear, and its squared norm is an unbiased
      estimate of the squared norm of the sketched vector, here the difference of the weights. 0
      means bit-equal sketches. Weights that are not finite are left out; the replicate's state is
      ``diverged`` then. None without two peers to compare.
    """

    columns = in_group(
        "communication",
        Column(
            "weights_distance_max",
            "Largest relative distance between replicas after a round",
            fold=Reduced(max),
        ),
    )

    def compute(self, timeline: Timeline) -> Row:
        """Return the group's column of one replicate."""
        largest: float | None = None
        for events in timeline.by_round(Fingerprint).values():
            by_peer = {event.peer: event for event in events if event.finite}
            for a, b in combinations(by_peer.values(), 2):
                largest = max(largest or 0.0, a.distance(b))
        return {"weights_distance_max": largest}
