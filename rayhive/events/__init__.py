"""Events: the record of a replicate, one JSON object on each line, and the only source of numbers.

Each kind of event is one record class. The events of the supervisor are in
:mod:`rayhive.events.supervisor`, the events of peers in :mod:`rayhive.events.peer` and
:mod:`rayhive.events.training`. The page ``docs/events.md`` lists them.
"""

from rayhive.events.event import (
    KINDS,
    VERSION,
    Event,
    EventLog,
    dump_event,
    is_held,
    load_event,
    make_event,
    of_kind,
    read_events,
)
from rayhive.events.peer import (
    Checkpoint,
    DHTReady,
    Left,
    Notice,
    PeerFailed,
    PeerFinished,
    PeerReady,
    Reunited,
    RolledBack,
    Spawned,
    StateLoaded,
    SteppedIn,
    SteppedOut,
    TrainingStarted,
)
from rayhive.events.supervisor import (
    BarrierReleased,
    FaultFailed,
    FaultFired,
    FaultHealed,
    FaultVerified,
    InvariantChecked,
    LinkCounted,
    NodeNoticed,
    NodesShared,
    OutcomeFound,
    PeerLost,
    PeerSpawned,
    Pruned,
    ReplicateFinished,
    ReplicateStarted,
    TrainingExtended,
)
from rayhive.events.training import (
    AveragingEvent,
    AveragingReason,
    Evaluation,
    Fallback,
    FaultActed,
    Progress,
    Rejected,
    Round,
    StateRound,
    Transition,
    Weights,
)
from rayhive.events.undone import APPLIED, GROUPED, lost_alone, reverted

#: Effects of faults whose targets live, apart from the other peers.
APART = frozenset({"stopped", "cut_off"})
