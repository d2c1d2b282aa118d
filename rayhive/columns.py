"""The columns of the results: one list that metrics fill, reports print and objectives name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Direction = Literal["minimize", "maximize"]


@dataclass(frozen=True)
class Column:
    """One column of the table per configuration.

    Attributes:
        name: The key in data frames, JSON and ``--sort``.
        group: The column group it is printed under.
        unit: Its unit, shown in the header; empty for counts and names.
        about: What it measures, in one sentence.
        better: The direction that is an improvement, where there is one; only such columns
            can be objectives.
        interval: Whether ``NAME_low`` and ``NAME_high`` bound its 95 % interval.
        exact: Whether shapes and settings determine it, so that replicates which agree on it
            leave no doubt.
    """

    name: str
    group: str
    unit: str
    about: str
    better: Direction | None = None
    interval: bool = False
    exact: bool = False


#: Columns that shapes and settings determine, where replicates sent what was predicted.
_EXACT = frozenset({"payload_bytes_per_round", "gradient_compression_ratio"})


def _group(group: str, *rows: tuple[str, str, str, Direction | None]) -> tuple[Column, ...]:
    return tuple(
        Column(name, group, unit, about, better, better is not None, name in _EXACT)
        for name, unit, about, better in rows
    )


CONFIGURATION = _group(
    "configuration",
    ("configuration", "", "Stable name of the configuration", None),
    ("scenario", "", "Fault scenario that it ran under", None),
    ("workload", "", "What was trained", None),
    ("data", "", "real, or generated where the real data set was not given", None),
    ("codec", "", "Gradient codec", None),
    ("threshold", "elements", "Size from which size_adaptive uses 8 bits", None),
    ("powersgd_rank", "", "Rank of the PowerSGD factors; empty without PowerSGD", None),
    ("min_compression_ratio", "", "Least fraction saved for a matrix to be factorised", None),
    ("delay", "", "What is averaged in the background", None),
    ("peers", "", "Peers in the swarm", None),
    ("link", "", "Shaping of the peers' links", None),
)
REPLICATION = _group(
    "replication",
    ("n", "", "Replicates that finished", None),
    ("n_failed", "", "Replicates that diverged, failed or were invalid", None),
    ("n_lost", "", "Replicates that the infrastructure lost in every attempt", None),
    ("pareto", "", "Whether no other configuration is better in every objective", None),
)
CONVERGENCE = _group(
    "convergence",
    ("final_loss", "", "Held-out loss at the last evaluation", "minimize"),
    ("loss_delta", "", "final_loss less the twin's", None),
    ("time_to_target_s", "s", "Training time until the target was reached", "minimize"),
    ("samples_to_target", "", "Committed samples until the target was reached", "minimize"),
    ("reached", "", "Replicates that reached the target", None),
    ("convergence_penalty", "", "samples_to_target less the twin's", None),
)
THROUGHPUT = _group(
    "throughput",
    ("samples_per_s", "1/s", "Committed samples per second of training time", "maximize"),
    ("round_p50_s", "s", "Median overhead-inclusive time of the global step", "minimize"),
    ("round_p95_s", "s", "95th percentile of the same", "minimize"),
    ("goodput", "", "Committed samples / computed samples", "maximize"),
    ("retention", "", "samples_per_s / the twin's", "maximize"),
    ("retention_normalised", "", "retention / live share of peers", "maximize"),
)
COMMUNICATION = _group(
    "communication",
    ("payload_bytes_per_round", "B", "Gradient payload sent per peer and round", "minimize"),
    ("payload_bytes_per_round_predicted", "B", "The same from shapes alone", None),
    ("state_bytes_per_round", "B", "State-averaging payload sent per peer and round", "minimize"),
    ("wire_bytes_per_round", "B", "Bytes on the interface, where a testbed counts them", None),
    ("payload_bytes_per_sample", "B", "All payload per committed sample", "minimize"),
    ("compression_ratio", "x", "All payload if nothing were compressed / measured", "maximize"),
    ("gradient_compression_ratio", "x", "The same of gradients alone", "maximize"),
    ("averaging_p50_s", "s", "Median time of a gradient all-reduce", "minimize"),
    ("averaging_p95_s", "s", "95th percentile of the same", "minimize"),
    ("rounds", "", "Rounds committed", None),
    ("rounds_failed", "", "Rounds in which a peer fell back or skipped", None),
    ("rounds_partial", "", "Rounds in which some parts were not averaged", None),
    ("rejected", "", "Gradients, parameters and states that peers refused", None),
    ("rejected_peers", "", "Whose these were, with their counts", None),
    ("weights_distance_max", "", "Largest relative distance between replicas after a round", None),
)
FAULTS = _group(
    "faults",
    ("faults_planned", "", "Faults in the plan", None),
    ("faults_fired", "", "Faults that fired", None),
    ("faults_verified", "", "Faults proved to have taken effect", None),
    ("detect_p50_s", "s", "Fault to first survivor's progress", None),
    ("detect_p95_s", "s", "95th percentile of the same", None),
    ("stall_p50_s", "s", "Longest time that a survivor went without a round", None),
    ("stall_p95_s", "s", "95th percentile of the same", None),
    ("recover_p50_s", "s", "Fault to 90 % of live-capacity throughput", None),
    ("recover_p95_s", "s", "95th percentile of the same", None),
    ("rejoin_p50_s", "s", "Peer start to its first accepted contribution", None),
    ("rejoin_p95_s", "s", "95th percentile of the same", None),
    ("censored", "", "Faults whose recovery was not seen", None),
    ("samples_lost", "", "Samples computed and not committed", None),
    ("state_transfer_bytes", "B", "State that peers downloaded from others", None),
    ("invariants_violated", "", "Invariants found violated", None),
)
TIME = _group(
    "time",
    ("peer_seconds", "s", "Wall time x peers, of which the others are parts", None),
    ("productive_s", "s", "Computing what was committed", None),
    ("badput_matchmaking_s", "s", "Waiting for a group", None),
    ("badput_averaging_s", "s", "Waiting for an all-reduce", None),
    ("badput_state_transfer_s", "s", "Loading the state from others", None),
    ("badput_retry_s", "s", "Doing what came to nothing", None),
    ("badput_stalled_s", "s", "Stopped, or waiting for others", None),
    ("badput_down_s", "s", "No peer in the slot", None),
    ("evaluation_s", "s", "Evaluating, which the training clock leaves out", None),
)
ROBUSTNESS = _group(
    "robustness",
    ("worst_case", "", "Worst value of the first objective over the scenarios", None),
    ("worst_retention", "", "Least retention over the scenarios", None),
    ("regret", "", "Largest distance to a scenario's best configuration", None),
)
PROVENANCE = _group(
    "provenance",
    ("git_revision", "", "Revision of the code that ran", None),
    ("code", "", "Fingerprint of the user's own code and data", None),
    ("versions", "", "Versions of the packages that matter", None),
    ("hardware", "", "Machine that ran it", None),
    ("started", "", "Start of the first replicate (UTC)", None),
    ("ended", "", "End of the last replicate (UTC)", None),
)

COLUMNS: tuple[Column, ...] = (
    *CONFIGURATION,
    *REPLICATION,
    *CONVERGENCE,
    *THROUGHPUT,
    *COMMUNICATION,
    *FAULTS,
    *TIME,
    *ROBUSTNESS,
    *PROVENANCE,
)
#: What the report adds to folded rows, which no replicate has by itself.
FOLDED_ONLY: frozenset[str] = frozenset(
    ("n", "n_failed", "n_lost", "pareto", *(column.name for column in ROBUSTNESS))
)
BY_NAME: dict[str, Column] = {column.name: column for column in COLUMNS}
OBJECTIVES: tuple[str, ...] = tuple(column.name for column in COLUMNS if column.better)

#: What ``trials.parquet`` holds besides, one row per replicate.
REPLICATE_COLUMNS: tuple[str, ...] = (
    "trial",
    "replicate",
    "seed",
    "attempt",
    "state",
    "stop_reason",
)
