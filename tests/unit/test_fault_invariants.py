"""Exceptions and exact bounds of the invariants."""

from __future__ import annotations

import pytest

from rayhive.events import InvariantChecked
from rayhive.invariants import INVARIANTS, check_all
from rayhive.invariants.replicas_agree import tolerance_of
from rayhive.spec import Configuration
from rayhive.timeline import Timeline
from tests.fixtures.faulted import ALL, REST, Story, kill_and_restart, planned
from tests.fixtures.logs import make_spec


def result(story: Story, name: str) -> InvariantChecked:
    return next(r for r in check_all(story.spec, story.timeline.events) if r.name == name)


def test_every_invariant_is_checked_in_the_order_of_names() -> None:
    results = check_all(kill_and_restart().spec, kill_and_restart().timeline.events)
    assert [result.name for result in results] == sorted(INVARIANTS.names())


# -- replicas ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("codec", "delay", "every", "state_codec", "tolerance"),
    [
        ("none", "none", 1, "none", 1e-5),
        ("none", "gradients", 4, "none", 1e-5),
        ("uniform8", "none", 4, "none", 1e-5),
        ("float16", "state", 1, "none", 1e-5),
        ("none", "none", 1, "float16", 0.02),
        ("size_adaptive", "none", 2, "uniform8", 0.3),
    ],
)
def test_the_tolerance_follows_the_codecs(
    codec: str, delay: str, every: int, state_codec: str, tolerance: float
) -> None:
    configuration = Configuration(
        codec=codec, delay=delay, average_state_every=every, state_codec=state_codec
    )
    story = Story(configuration=configuration)
    log = Timeline(story.spec, story.timeline.events)
    assert tolerance_of(log, "peer-0", "peer-1") == pytest.approx(tolerance, abs=1.1e-5)


@pytest.mark.parametrize(
    ("arithmetic", "state_codec", "tolerance"),
    [
        (("a", "a"), "none", 0.0),
        (("a", "b"), "none", 1e-5),
        (("a", None), "none", 1e-5),
        ((None, None), "none", 1e-5),
        (("a", "a"), "float16", 0.02),
    ],
)
def test_peers_that_round_alike_are_equal_to_the_bit(
    arithmetic: tuple[str | None, ...], state_codec: str, tolerance: float
) -> None:
    story = Story(configuration=Configuration(state_codec=state_codec), peers=2)
    for peer, value in zip(("peer-0", "peer-1"), arithmetic, strict=True):
        if value is not None:
            story.of("peer_ready", peer)[0]["arithmetic"] = value
    assert tolerance_of(story.timeline, "peer-0", "peer-1") == tolerance


@pytest.mark.parametrize("equal", [True, False])
def test_a_replica_that_is_equal_needs_no_further_averaging(equal: bool) -> None:
    """Others averaged parameters without it, which changed nothing."""
    story = Story(configuration=Configuration(average_state_every="auto"))
    story.rounds(*(float(n) for n in range(1, 16)), peers=ALL)
    story.finish(15.0, ALL)
    others = [e for e in story.of("state_round") if e["round"] == 3 and e["peer"] != "peer-2"]
    kept = [e for e in story.events if e["kind"] != "state_round" or e in others]
    story.events = kept
    if not equal:
        apart(story, 0.1, *range(3, 16))
    found = result(story, "replicas_agree").violations
    assert found == (
        [] if equal else ["peer-2: not made equal to the other replicas in its last 13 rounds"]
    )


def apart(story: Story, distance: float, *rounds: int) -> None:
    for event in story.of("weights", "peer-2"):
        if event["round"] in rounds:
            event["sketch"] = [10.0, 10.0 * distance]


@pytest.mark.parametrize(("distance", "ok"), [(0.9e-5, True), (1.1e-5, False)])
def test_a_difference_from_rounding_is_tolerated(distance: float, ok: bool) -> None:
    story = Story()
    story.rounds(1.0, 2.0, peers=ALL)
    apart(story, distance, 2)
    assert result(story, "replicas_agree").ok is ok


@pytest.mark.parametrize("outcome", ["partial", "local", "skipped"])
def test_replicas_may_differ_between_a_failed_round_and_the_next_averaging(outcome: str) -> None:
    story = Story()
    story.rounds(1.0, 2.0, 3.0, 4.0, peers=ALL)
    story.of("round", "peer-2")[1]["outcome"] = outcome  # round 2
    failed = "partial" if outcome == "partial" else "failed"
    story.of("state_round", "peer-2")[1]["outcome"] = failed
    apart(story, 0.1, 2)
    assert result(story, "replicas_agree").ok
    apart(story, 0.1, 2, 3)
    assert not result(story, "replicas_agree").ok


def test_with_delays_an_averaging_takes_effect_one_round_later() -> None:
    story = Story(configuration=Configuration(delay="state"))
    story.rounds(1.0, 2.0, 3.0, 4.0, 5.0, peers=ALL)
    story.of("round", "peer-2")[1]["outcome"] = "partial"
    apart(story, 0.1, 2)
    assert result(story, "replicas_agree").ok
    apart(story, 0.1, 3)
    assert not result(story, "replicas_agree").ok


def test_a_replica_that_loaded_a_state_may_differ_until_its_next_averaging() -> None:
    story = kill_and_restart()
    story.of("state_round", "peer-1.1")[0]["outcome"] = "failed"  # round 10
    for event in story.of("weights", "peer-1.1"):
        if event["round"] == 10:
            event["sketch"] = [9.0, 0.0]
    assert result(story, "replicas_agree").ok
    story.of("weights", "peer-1.1")[1]["sketch"] = [9.0, 0.0]
    assert result(story, "replicas_agree").violations == [
        "peer-0 and peer-1.1 differ by 0.1 after round 11, at most 1e-05",
        "peer-2 and peer-1.1 differ by 0.1 after round 11, at most 1e-05",
    ]


@pytest.mark.parametrize(("rounds_in_company", "ok"), [(1, True), (10, True), (11, False)])
def test_a_lone_survivor_is_astray_only_once_a_replacement_trains(
    rounds_in_company: int, ok: bool
) -> None:
    killed = ["peer-0", "peer-2"]
    story = Story([planned(kind="kill", who=tuple(killed), heal_after_s=20.0)])
    story.rounds(1.0, 2.0, peers=ALL)
    story.fire(2.5, 0, killed)
    for peer in killed:
        story.lose(2.5, peer)
    story.rounds(*(3.0 + n for n in range(20)), peers=["peer-1"], outcome="alone")
    story.train(22.6, "peer-0.1", round=22)
    story.rounds(*(23.0 + n for n in range(rounds_in_company)), peers=["peer-1"], outcome="alone")
    story.finish(40.0, ("peer-1", "peer-0.1"))
    assert result(story, "replicas_agree").ok is ok, result(story, "replicas_agree").violations


# -- components --------------------------------------------------------------------------------


def test_no_component_is_checked_while_peers_may_still_find_each_other() -> None:
    story = Story([planned(kind="partition", heal_after_s=2.0)])
    story.rounds(1.0, 2.0, peers=ALL)
    story.fire(2.5, 0, ["peer-1"])
    story.rounds(3.0, 4.0, peers=REST)
    story.heal(4.5, 0, ["peer-1"])
    story.rounds(*(5.0 + n for n in range(9)), peers=REST)
    story.finish(14.0, ALL)
    assert result(story, "one_component").checked == 0
    story.events = [event for event in story.events if event["kind"] != "peer_finished"]
    story.rounds(*(15.0 + n for n in range(5)), peers=REST)
    story.finish(20.0, ALL)
    found = result(story, "one_component")
    assert found.violations == [f"{p}: saw 2 and averaged with 2 of 3 peers" for p in REST]


@pytest.mark.parametrize("healed", [None, 23.0])
def test_a_partition_that_lasts_to_the_end_is_no_violation(healed: float | None) -> None:
    half, other = ("peer-0", "peer-1"), ("peer-2", "peer-3")
    story = Story([planned(kind="partition", who=other, heal_after_s=healed)], peers=4)
    story.rounds(1.0, 2.0, peers=(*half, *other))
    story.fire(2.5, 0, list(other))
    story.rounds(*(4.0 + n for n in range(20)), peers=half)
    story.round = 2
    story.rounds(*(4.5 + n for n in range(20)), peers=other)
    for event in story.of("weights"):
        if event["round"] > 2:
            event["sketch"] = [10.0, 0.5 if event["peer"] in half else 0.7]
    if healed is not None:
        story.heal(healed, 0, list(other))
    story.finish(24.6, (*half, *other))
    for name in ("one_component", "replicas_agree"):
        assert result(story, name).ok, result(story, name).violations


def test_one_smaller_group_is_no_second_component() -> None:
    story = Story()
    story.rounds(*(10.0 + n for n in range(5)), peers=ALL)
    for event in story.of("round"):
        if event["round"] == 5:
            event |= {"group_size": 2, "live_peers": 2}
    story.finish(14.0, ALL)
    assert result(story, "one_component").ok


@pytest.mark.parametrize(("met", "ok"), [(3, True), (2, False)])
def test_rounds_of_a_quorum_need_not_have_all_peers(met: int, ok: bool) -> None:
    names = [f"peer-{number}" for number in range(5)]
    story = Story(peers=5, configuration=Configuration(min_peers=3))
    story.rounds(*(10.0 + n for n in range(5)), peers=names, group_size=met)
    story.finish(14.0, names)
    assert result(story, "one_component").ok == ok


# -- progress ----------------------------------------------------------------------------------


def waiting(seconds: float) -> Story:
    story = Story()
    story.rounds(1.0, 2.0, 3.0, 3.0 + seconds, peers=ALL)
    story.finish(3.0 + seconds, ALL)
    return story


def test_the_bound_is_one_averaging_with_all_its_timeouts() -> None:
    swarm = make_spec().swarm
    bound = swarm.matchmaking_time + swarm.averaging_timeout
    normal = Story([planned()])
    normal.rounds(1.0, 2.0, 3.0, peers=ALL)
    normal.fire(3.0, 0, ["peer-1"])
    normal.lose(3.0, "peer-1")
    normal.rounds(3.0 + bound + 2.9, peers=REST)
    normal.finish(3.0 + bound + 2.9, REST)
    assert result(normal, "survivors_progress").ok
    last = normal.of("transition", "peer-0")[-1]
    last["t"] += 0.2
    assert result(normal, "survivors_progress").ok, "the clock stood still: an evaluation"
    last["clock_s"] += 0.2
    assert not result(normal, "survivors_progress").ok


@pytest.mark.parametrize(("who", "kind"), [("peer-3", "join"), ("peer-1.1", "kill")])
def test_a_peer_that_came_later_makes_progress(who: str, kind: str) -> None:
    target = who.partition(".")[0]
    story = Story([planned(kind=kind, who=(target,))])
    story.rounds(1.0, 2.0, peers=ALL)
    story.fire(2.0, 0, [who if kind == "join" else target])
    if kind == "kill":
        story.lose(2.0, target)
    others = [name for name in ALL if name != target]
    story.join(2.1, 2.5, who, cause="f0")
    story.rounds(3.0, 4.0, peers=[*others, who])
    story.rounds(405.0, peers=others)
    story.finish(405.0, [*others, who])
    found = result(story, "survivors_progress")
    assert any(text.startswith(f"{who}: no round for 401") for text in found.violations)


# -- joiners ---------------------------------------------------------------------------------


def test_a_peer_without_time_to_contribute_is_exempt() -> None:
    story = Story()
    story.rounds(1.0, 2.0, peers=ALL)
    story.spawn(3.0, "peer-3")
    story.rounds(*(3.0 + n for n in range(1, 15)), peers=ALL)
    story.finish(22.9, ALL)
    assert result(story, "replacement_contributes").ok
    story.of("peer_finished")[-1]["t"] += 0.2  # 20 seconds since it was spawned
    assert not result(story, "replacement_contributes").ok


# -- the log -----------------------------------------------------------------------------------


def test_a_peer_that_leaves_before_training_may_lack_its_first_events() -> None:
    story = Story()
    story.rounds(1.0, 2.0, peers=ALL)
    story.spawn(3.0, "peer-3")
    story.say(3.5, "left", "peer-3", round=0, handed_over=0, lost=0)
    story.say(3.6, "peer_finished", "peer-3", round=0, samples=0, clock_s=0.0, reason="notice")
    story.rounds(4.0, 5.0, peers=ALL)
    story.finish(6.0, ALL)
    assert result(story, "log_complete").ok


@pytest.mark.parametrize(("left", "ok"), [(59.9, True), (60.2, False)])
def test_a_heal_is_missing_only_if_there_was_time_for_it(left: float, ok: bool) -> None:
    story = Story([planned(kind="pause", heal_after_s=2.0)])
    story.rounds(1.0, peers=ALL)
    story.fire(1.5, 0, ["peer-1"])
    story.finish(3.5 + left, ALL)
    assert result(story, "log_complete").ok is ok
    story.say(4.0, "fault_failed", fault="f0", phase="heal", error="gone")
    assert result(story, "log_complete").ok


@pytest.mark.parametrize(
    ("state", "why", "left", "ok"),
    [
        ("failed", "peer-0: Connection closed by peer", 1.0, True),
        ("failed", "peer-0: Connection closed by peer", 60.2, False),
        ("completed", "rounds", 1.0, False),
        ("completed", "target", 1.0, True),
        ("completed", "target", 60.2, False),
    ],
)
def test_a_replicate_that_ends_at_once_may_lack_the_proof(
    state: str, why: str, left: float, ok: bool
) -> None:
    """As DDP does: the members that are left fail before the fault is verified."""
    story = Story([planned()])
    story.rounds(1.0, peers=ALL)
    story.fire(1.5, 0, ["peer-1"])
    story.events = [event for event in story.events if event["kind"] != "fault_verified"]
    story.lose(1.5, "peer-1")
    story.finish(1.5 + left, [name for name in ALL if name != "peer-1"])
    story.say(1.6 + left, "outcome", state=state, stop_reason=why)
    assert result(story, "log_complete").ok is ok


def test_events_of_two_threads_may_come_in_either_order() -> None:
    story = Story()
    story.rounds(1.0, peers=ALL)
    story.finish(1.0, ALL)
    story.of("state_round", "peer-0")[0]["t"] -= 0.4
    assert result(story, "log_complete").ok
    story.of("state_round", "peer-0")[0]["t"] -= 0.2
    assert not result(story, "log_complete").ok


@pytest.mark.parametrize(("late_s", "ok"), [(2.9, True), (3.2, False)])
def test_an_event_may_be_as_late_as_its_peer_was_stopped(late_s: float, ok: bool) -> None:
    story = Story([planned(kind="pause", heal_after_s=2.5)])
    story.rounds(1.0, peers=ALL)
    story.fire(1.1, 0, ["peer-1"])
    story.heal(3.6, 0, ["peer-1"])
    story.rounds(4.0, peers=ALL)
    story.of("state_round", "peer-1")[1]["t"] -= late_s
    story.finish(5.0, ALL)
    assert result(story, "log_complete").ok is ok, result(story, "log_complete").violations


@pytest.mark.parametrize(("distance", "ok"), [(0.1, True), (0.49, True), (0.51, False)])
def test_replicas_of_pairs_stay_within_a_spread(distance: float, ok: bool) -> None:
    story = Story(configuration=Configuration(local_steps=4, group_size=2))
    story.rounds(*(float(n) for n in range(1, 16)), peers=ALL)
    apart(story, distance, 14)
    found = result(story, "replicas_agree")
    assert found.ok is ok and found.checked == 45


def test_replicas_of_pairs_are_not_compared_for_a_while_after_an_own_step() -> None:
    story = Story(configuration=Configuration(local_steps=4, group_size=2))
    story.rounds(*(float(n) for n in range(1, 16)), peers=ALL)
    story.of("round", "peer-2")[2]["outcome"] = "local"  # round 3
    apart(story, 0.9, *range(3, 14))
    assert result(story, "replicas_agree").ok
    apart(story, 0.9, 14)
    assert not result(story, "replicas_agree").ok
