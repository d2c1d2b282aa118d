"""Events: what happened in a replicate, one JSON object a line, the only source of every number.

Every event has ``kind``, ``t`` (Unix time [s], on the clock of the process that made it) and
``peer`` (for example ``peer-0``; null for the supervisor). The rest depends on the kind; see
:data:`KINDS`.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from rayhive.errors import DamagedError

Event: TypeAlias = dict[str, Any]

#: Outcomes of a round in which a peer had company.
GROUPED = frozenset({"averaged", "partial"})
#: Effects of faults whose targets live, and cannot be with the others.
APART = frozenset({"stopped", "cut_off"})

#: Every kind of event and the fields that it has besides ``kind``, ``t`` and ``peer``.
KINDS: dict[str, str] = {
    # by the supervisor
    "replicate_started": "spec (the whole ReplicateSpec, the git_revision among it), versions, "
    "hardware",
    "peer_spawned": "node (Ray node id), host, pid, slot (logical peer), life (0, and one more "
    "each time that the slot is started again), cause (id of the fault that asked for it, or null)",
    "barrier_released": "peers",
    "link_counted": "when (start, end), nodes (Ray node id -> tx_bytes, rx_bytes, tx_packets, "
    "rx_packets and dropped of the interface that peers use): on a testbed",
    "training_extended": "seconds (that training went on after its budget of seconds, as faults "
    "were late), slip_s (the greatest delay of a fault)",
    "peer_lost": "exit_code (negative: the signal), reason",
    "fault_fired": "fault (id), fault_kind, effect (of its class: none, gone, stopped or cut_off), "
    "who (slots or nodes), lives (names of the peers it is about), planned (text), slip_rounds or "
    "slip_s (late by), done (what the kind says)",
    "fault_verified": "fault, ok, proof (what was seen)",
    "fault_healed": "fault, lives, done, seconds (since it fired)",
    "fault_failed": "fault, phase (setup, inject, verify, heal, teardown), error",
    "invariant": "name, ok, checked (number of things looked at), violations (texts)",
    "outcome": "state, stop_reason: those of replicate_finished, which follows when all is cleared",
    "replicate_finished": "state (completed, timed_out, diverged, failed, stopped, invalid, lost), "
    "stop_reason",
    # by a peer
    "spawned": "pid",
    "dht_ready": "peer_id, addresses",
    "peer_ready": "shapes (of the parameters in order), dense_payload_bytes, dense_state_bytes (of "
    "all that state averaging averages, as float32), "
    "predicted_payload_bytes_per_round, payload_exact, compressed_tensors, batch_size, target "
    "(metric, value, mode), data, versions, hardware, device, processes (role -> pid)",
    "training_started": "",
    "round": "round, samples (own samples that entered it), lost (own samples that it took and did "
    "not use), computed (own samples so far, pending ones among them), live_peers, outcome "
    "(averaged, partial, local, skipped, alone), accumulating_s (since the last transition), "
    "background_s (of these, spent waiting for the previous round's background work), "
    "clock_s (training time since training_started, without evaluation), loss (mean over the "
    "peer's batches); of a group also group_size, group (peer_id of its members), fraction (of "
    "the parts that were averaged), excluded (whether the own gradients were refused), retries, "
    "waited_s (for the result), matchmaking_s, averaging_s, phases, banned, failures, "
    "wasted_bytes (of attempts that failed), sent_bytes, received_bytes, counts_complete (whether "
    "the bytes are exact). With delayed gradients it comes late",
    "transition": "round, seconds (since the previous transition, without evaluation), update_s "
    "(optimizer and state averaging, as far as they are waited for), clock_s, computed: the peer "
    "goes on with the next round",
    "progress": "computed (own samples so far): now and then, between transitions",
    "state_round": "round, group_size, group, outcome, fraction, sent_bytes, received_bytes, "
    "averaging_s",
    "weights": "round, norm, sketch (64 numbers: see rayhive.peer.weights_sketch), finite",
    "evaluation": "round, samples (own, computed so far), clock_s, values (metric -> number), "
    "final (whether it is the one after the last round)",
    "state_loaded": "round_before, round_of_state, round (where it goes on), seconds, "
    "received_bytes (of states), lost (own samples that were thrown away), kept (own samples that "
    "enter the next round)",
    "stepped_out": "round (the last one that it has finished): the peer computes nothing just now, "
    "and the others go on without it",
    "stepped_in": "round_before, round (where it goes on), seconds (between its two batches)",
    "reunited": "round_before, round (where it goes on), apart (rounds that it did while it had "
    "lost peers who are here again; its parameters count for as much in the next averaging)",
    "fallback": "round, reason, choice (local, skip)",
    "sabotaged": "fault, round, what (what was done to this peer's part in the round)",
    "rejected": "round, offender (peer_id), tensors (gradients, parameters or state), reason "
    "(not_finite, norm, direction, checksum, ...), norm, bound, lean (mean cosine with others): "
    "what the offender sent did not reach this peer's average, or the state that it loaded",
    "notice": "deadline_s (how long until it is taken away), fault (id of the one that told it; "
    "null for a signal)",
    "left": "round, handed_over (samples that were averaged after the notice), lost (samples "
    "computed and thrown away)",
    "checkpoint": "round, path, ok, bytes, seconds, error (such as ENOSPC, or null): it was asked "
    "to write one",
    "peer_finished": "reason (rounds, target, seconds, stop, diverged, notice), round, samples "
    "(own, computed), pending (of these no round had yet), clock_s",
    "peer_failed": "error, traceback",
}


#: What a field of an event is, wherever it stands; each may also be null. Fields that are not
#: listed may be anything.
FIELDS: dict[str, str] = {
    name: expected
    for expected, names in {
        "whole number": "round samples computed lost kept life group_size peers retries "
        "round_before round_of_state apart handed_over pending pid live_peers checked batch_size",
        "number": "clock_s seconds accumulating_s background_s update_s waited_s loss "
        "matchmaking_s averaging_s fraction norm bound lean deadline_s slip_s slip_rounds "
        "sent_bytes received_bytes wasted_bytes bytes exit_code dense_payload_bytes "
        "dense_state_bytes predicted_payload_bytes_per_round",
        "text": "kind peer peer_id fault outcome state stop_reason slot host data name when effect "
        "fault_kind phase error traceback reason choice offender tensors",
        "yes or no": "final finite ok payload_exact counts_complete excluded",
        "mapping": "spec target nodes processes",
        "list": "shapes violations lives who addresses group",
        "list or mapping of numbers": "values sketch",
    }.items()
    for name in names.split()
}
_END_OF_TIME = 253_402_300_800.0  # the year 10000, which no date can be of


def make_event(kind: str, peer: str | None = None, **fields: Any) -> Event:
    """Return a new event that happens now.

    Raises:
        ValueError: ``kind`` is not in :data:`KINDS`.
    """
    if kind not in KINDS:
        raise ValueError(f"unknown kind of event: {kind!r}")
    return {"kind": kind, "t": time.time(), "peer": peer, **fields}


def dump_event(event: Mapping[str, Any]) -> str:
    """Return one line of JSON, without the line end; non-finite numbers become strings."""
    return json.dumps(_plain(event), separators=(",", ":"), allow_nan=False)


def load_event(line: str) -> Event:
    """Read one line that :func:`dump_event` wrote.

    Raises:
        ValueError: It is no event, or a field of it has another type than events have.
    """
    try:
        event = json.loads(line, object_hook=_restore)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(event, dict) or "kind" not in event or "t" not in event:
        raise ValueError("an event is an object with kind and t")
    event.setdefault("peer", None)
    if not _is_number(event["t"]) or not 0 <= event["t"] < _END_OF_TIME:
        raise ValueError("t is no time")
    for name, value in event.items():
        expected = FIELDS.get(name)
        if expected is not None and value is not None and not _CHECKS[expected](value):
            raise ValueError(f"{name} is no {expected}")
    return event


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_numbers(value: Any) -> bool:
    items = value.values() if isinstance(value, dict) else value
    return isinstance(value, (dict, list)) and all(_is_number(item) for item in items)


_CHECKS: dict[str, Callable[[Any], bool]] = {
    "number": _is_number,
    "whole number": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "text": lambda value: isinstance(value, str),
    "yes or no": lambda value: isinstance(value, bool),
    "list": lambda value: isinstance(value, list),
    "mapping": lambda value: isinstance(value, dict),
    "list or mapping of numbers": _is_numbers,
}


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": repr(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def _restore(value: dict[str, Any]) -> Any:
    return float(value["float"]) if value.keys() == {"float"} else value


class EventLog:
    """An append-only file of events that survives the death of its writer.

    Args:
        path: The file; created with its folder, appended to if it exists. What a writer that died
            left of its last line is removed, as nobody reads it: the next event would melt into it.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("a", encoding="utf-8")
        if self.path.stat().st_size:  # a device, which may have no end, has none
            written = self.path.read_bytes()
            if not written.endswith(b"\n"):
                self._file.truncate(written.rfind(b"\n") + 1)

    def append(self, event: Mapping[str, Any]) -> None:
        """Write one event and hand it to the operating system."""
        self._file.write(dump_event(event) + "\n")
        self._file.flush()

    def sync(self) -> None:
        """Return when everything written is on disk."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Sync and close."""
        if not self._file.closed:
            self.sync()
            self._file.close()


def read_events(path: str | Path) -> Iterator[Event]:
    """Yield the events of a log in the order of writing.

    A last line without its end is what a writer's death leaves: it is left out.

    Raises:
        DamagedError: A complete line is not an event; the line number is named.
    """
    with Path(path).open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                yield load_event(line.decode("utf-8"))
            except ValueError as error:
                raise DamagedError(path, f", line {number}: not an event: {error}") from error
