"""Times, samples and cost of faults, compared with numbers by hand."""

from __future__ import annotations

import pytest

from rayhive.events import Transition
from rayhive.metrics.aggregate import fold
from rayhive.metrics.fault_impact import impacts, rejoins
from rayhive.metrics.groups.convergence import evaluations
from rayhive.metrics.groups.faults import samples_lost
from rayhive.metrics.rows import timeline_row
from tests.fixtures.faulted import (
    AGAIN,
    ALL,
    REST,
    STATE_BYTES,
    Story,
    kill_and_restart,
    planned,
)


def seconds(value: float | None) -> object:
    """Times are differences of Unix times, which are exact to a quarter of a microsecond."""
    return pytest.approx(value, abs=1e-6)


def killed(at: float, *ends: float, before: tuple[float, ...] = (1.0, 2.0, 3.0, 4.0)) -> Story:
    """Return a swarm of three; peer 1 is killed, and the other peers' rounds end as given."""
    story = Story([planned()])
    story.rounds(*before, peers=ALL)
    story.fire(at, 0, ["peer-1"])
    story.lose(at + 0.1, "peer-1")
    story.rounds(*ends, peers=REST)
    story.finish(ends[-1] if ends else at + 9, REST)
    return story


def test_columns_of_a_kill_and_a_restart() -> None:
    story = kill_and_restart()
    row = timeline_row(story.timeline)
    assert (row["faults_planned"], row["faults_fired"], row["faults_verified"]) == (1, 1, 1)
    assert row["detect_p50_s"] == row["detect_p95_s"] == seconds(1.3)  # round 5, told at 5.8 s
    assert row["recover_p50_s"] == seconds(1.3)  # from then on two peers do two thirds
    assert row["rejoin_p50_s"] == seconds(5.8)  # spawned at 5.0 s, in round 10, told at 10.8 s
    assert row["censored"] == 0
    assert row["samples_lost"] == 32
    assert row["state_transfer_bytes"] == STATE_BYTES
    assert row["goodput"] == (12 * 2 * 64 + 7 * 64) / (12 * 2 * 64 + 7 * 64 + 32 + 3 * 6)
    # from the loss at 4.6 s to the next process at 5.0 s there are two of three
    assert row["live_share"] == pytest.approx(1 - 0.4 / 39, rel=1e-6)
    # the replacement trains from 8.4 s on, and is in no group in rounds 8 and 9
    assert row["participation"] == pytest.approx((10 + 2 * 2 / 3) / 12)


def test_a_round_with_the_target_is_no_progress() -> None:
    # peer 1 told its round 4 at 3.9 s; the others' transitions to round 4 come at 4.0 s
    (impact,) = impacts(killed(3.95, 5.5, 6.5, 7.5, 8.5).timeline)
    assert impact.detect_s == seconds(5.4 - 3.95)


def test_a_round_without_the_target_is_progress() -> None:
    story = Story([planned()])
    story.rounds(1.0, 2.0, 3.0, peers=ALL)
    story.fire(3.85, 0, ["peer-1"])  # in the middle of the all-reduce of round 4
    story.lose(3.9, "peer-1")
    story.rounds(5.0, peers=REST, outcome="partial", fraction=0.7)
    story.rounds(6.0, 7.0, 8.0, peers=REST)
    story.finish(8.0, REST)
    (impact,) = impacts(story.timeline)
    assert impact.detect_s == seconds(4.9 - 3.85)


def test_recovery_needs_throughput_for_three_rounds() -> None:
    # 1.0 s a round is 64 samples/s and peer; 1.5 s is two thirds of that
    story = killed(4.5, 5.5, 6.5, 8.0, 9.5, 10.5, 11.5, 12.5)
    (impact,) = impacts(story.timeline)
    # rounds 5 to 8 end at 5.4, 6.4, 7.9, 9.4 s: too slow; the three after 9.4 s are as fast as ever
    assert impact.recover_s == seconds(9.4 - 4.5)
    assert timeline_row(story.timeline)["censored"] == 0


def test_recovery_needs_ninety_per_cent() -> None:
    fast = killed(4.5, 5.5, *(5.5 + 1.10 * n for n in range(1, 5)))
    slow = killed(4.5, 5.5, *(5.5 + 1.12 * n for n in range(1, 5)))
    assert impacts(fast.timeline)[0].recover_s == seconds(0.9)  # 0.909 of what there was
    assert impacts(slow.timeline)[0].recover_s is None  # 0.893
    assert timeline_row(slow.timeline)["censored"] == 1


def test_too_few_rounds_after_the_fault_censor_the_recovery_but_not_the_detection() -> None:
    row = timeline_row(killed(4.5, 5.5, 6.5, 7.5).timeline)
    assert row["detect_p50_s"] == seconds(0.9)
    assert row["recover_p50_s"] is None
    assert row["censored"] == 1


def test_a_swarm_without_progress_detects_nothing() -> None:
    row = timeline_row(killed(4.5).timeline)
    assert (row["detect_p50_s"], row["recover_p50_s"], row["censored"]) == (None, None, 1)
    assert row["detect_s"] == row["stall_s"] == row["recover_s"] == ">9.0"  # it ended at 13.5 s


def test_recovery_is_unknown_without_a_baseline() -> None:
    early = killed(2.5, 3.5, 4.5, 5.5, 6.5, 7.5, before=(1.0, 2.0))
    assert impacts(early.timeline)[0].recover_s is None
    later = killed(3.5, 4.5, 5.5, 6.5, 7.5, before=(1.0, 2.0, 3.0))
    assert impacts(later.timeline)[0].recover_s == seconds(0.9)


def test_a_stopped_peer_is_not_live_until_it_is_healed() -> None:
    story = Story([planned(kind="pause", heal_after_s=5.0)])
    story.rounds(1.0, 2.0, 3.0, 4.0, peers=ALL)
    story.fire(4.5, 0, ["peer-1"])
    story.rounds(5.5, 6.5, 7.5, 8.5, peers=REST)
    story.heal(9.5, 0, ["peer-1"])
    story.rounds(9.5, peers=REST)
    story.finish(9.5, ALL)
    (impact,) = impacts(story.timeline)
    assert impact.healed is not None
    assert impact.recover_s == seconds(0.9)  # two of two do what two should
    row = timeline_row(story.timeline)
    assert row["live_share"] == pytest.approx(1 - 5.0 / 28.5)
    assert row["participation"] == 1.0


def test_a_slow_peer_is_live() -> None:
    story = Story([planned(kind="straggler")])
    story.rounds(1.0, 2.0, 3.0, 4.0, peers=ALL)
    story.fire(4.5, 0, ["peer-1"])
    story.rounds(5.5, 6.5, 7.5, 8.5, peers=REST)
    story.finish(8.5, ALL)
    (impact,) = impacts(story.timeline)
    assert impact.recover_s is None  # two do what three should
    row = timeline_row(story.timeline)
    assert row["live_share"] == pytest.approx(1.0)
    assert row["participation"] == pytest.approx((4 + 4 * 2 / 3) / 8)


def test_if_all_peers_are_targets_every_peer_is_a_survivor() -> None:
    story = Story([planned(kind="partition", who=ALL)])
    story.rounds(1.0, 2.0, 3.0, 4.0, peers=ALL)
    story.fire(4.5, 0, list(ALL))
    story.rounds(5.5, peers=ALL, outcome="alone", group_size=None, waited_s=None)
    story.finish(5.5, ALL)
    assert impacts(story.timeline)[0].detect_s == seconds(0.9)


def test_a_fault_with_notice_begins_when_its_target_is_gone() -> None:
    story = Story([planned(kind="preempt")])
    story.rounds(1.0, 2.0, peers=ALL)
    story.fire(2.2, 0, ["peer-1"])
    story.say(2.3, "notice", "peer-1", deadline_s=2.0)
    story.rounds(3.0, 4.0, peers=ALL)
    story.say(4.2, "left", "peer-1", round=4, handed_over=128, lost=0)
    story.rounds(5.0, 6.0, 7.0, 8.0, peers=REST)
    story.finish(8.0, REST)
    (impact,) = impacts(story.timeline)
    assert impact.detect_s == impact.recover_s == seconds(4.9 - 4.2)


def test_a_self_inflicted_fault_begins_with_its_sabotaged_event() -> None:
    story = Story([planned(kind="nan_gradient")])
    story.rounds(1.0, 2.0, 3.0, peers=ALL)
    story.say(3.5, "sabotaged", "peer-1", fault="f0", round=4, what={})
    story.fire(3.95, 0, ["peer-1"])  # told when the report has come
    story.rounds(4.0, 5.0, 6.0, 7.0, peers=ALL)
    story.finish(7.0, ALL)
    (impact,) = impacts(story.timeline)
    assert impact.detect_s == seconds(3.9 - 3.5)


def test_a_fault_begins_when_its_first_target_is_gone() -> None:
    story = Story([planned(who=("peer-1", "peer-2"))])
    story.rounds(1.0, 2.0, 3.0, 4.0, peers=ALL)
    story.lose(4.3, "peer-1")
    story.fire(4.5, 0, ["peer-1", "peer-2"])
    story.of("fault_fired")[0]["began"] = story.of("peer_lost")[0]["t"] - 0.1
    story.lose(4.6, "peer-2")
    story.rounds(5.5, peers=("peer-0",), outcome="alone")
    story.finish(5.5, ["peer-0"])
    (impact,) = impacts(story.timeline)
    assert impact.detect_s == seconds(5.4 - 4.3)


def test_an_unverified_fault_counts_as_fired_only() -> None:
    story = Story([planned(0), planned(1, round=9)])
    story.rounds(1.0, 2.0, peers=ALL)
    story.fire(2.5, 0, ["peer-1"], ok=False)
    story.finish(3.0, ALL)
    row = timeline_row(story.timeline)
    assert (row["faults_planned"], row["faults_fired"], row["faults_verified"]) == (2, 1, 0)
    assert impacts(story.timeline)[0].ok is False


def test_a_plan_without_fired_faults_has_no_times() -> None:
    story = Story([planned(round=9)])
    story.rounds(1.0, 2.0, peers=ALL)
    story.finish(2.0, ALL)
    row = timeline_row(story.timeline)
    assert (row["faults_planned"], row["faults_fired"], row["censored"]) == (1, 0, 0)
    assert row["detect_p50_s"] is None
    assert (row["samples_lost"], row["state_transfer_bytes"]) == (0, 0)


def test_without_a_plan_the_columns_of_faults_are_none() -> None:
    row = timeline_row(Story().timeline)
    names = ("faults_planned", "faults_fired", "censored", "samples_lost", "state_transfer_bytes")
    assert [row[name] for name in names] == [None] * len(names)


def test_violated_invariants_are_counted_from_their_events() -> None:
    story = Story()
    assert timeline_row(story.timeline)["invariants_violated"] is None
    for name, ok in (("a", True), ("b", False), ("c", False)):
        story.say(9.0, "invariant", name=name, ok=ok, checked=1, violations=[])
    assert timeline_row(story.timeline)["invariants_violated"] == 2


# -- who came ----------------------------------------------------------------------------------


def test_a_replacement_that_never_contributes_censors_its_fault() -> None:
    story = kill_and_restart()
    for event in story.of("round", "peer-1.1"):
        event["samples"] = 0
    row = timeline_row(story.timeline)
    assert (row["rejoin_p50_s"], row["censored"]) == (None, 1)


@pytest.mark.parametrize("outcome", ["alone", "local", "skipped"])
def test_a_round_without_a_group_is_no_contribution(outcome: str) -> None:
    story = kill_and_restart()
    story.of("round", "peer-1.1")[0]["outcome"] = outcome
    (rejoin,) = rejoins(story.timeline)
    assert rejoin.seconds == seconds(6.8)


def test_a_joiner_without_a_cause_is_a_rejoin() -> None:
    story = Story()
    story.rounds(1.0, 2.0, peers=ALL)
    story.join(1.5, 2.0, "peer-3")
    story.rounds(3.0, peers=(*ALL, "peer-3"))
    story.finish(3.0, (*ALL, "peer-3"))
    (rejoin,) = rejoins(story.timeline)
    assert (rejoin.peer, rejoin.cause) == ("peer-3", None)
    assert rejoin.seconds == seconds(1.4)


# -- samples -----------------------------------------------------------------------------------


def test_computed_samples_are_committed_or_pending_or_lost() -> None:
    timeline = kill_and_restart().timeline
    pending = 3 * 6
    assert samples_lost(timeline) == timeline.computed - timeline.committed() - pending == 32


def test_lost_samples_are_unknown_without_the_pending_ones() -> None:
    story = kill_and_restart()
    del story.of("peer_finished", "peer-0")[0]["pending"]
    assert timeline_row(story.timeline)["samples_lost"] is None


def test_skipped_rounds_are_lost() -> None:
    story = Story([planned(round=9)])
    story.rounds(1.0, peers=ALL, outcome="skipped")
    story.rounds(2.0, peers=ALL)
    story.finish(2.0, ALL)
    assert timeline_row(story.timeline)["samples_lost"] == 3 * 64


def test_steps_undone_by_a_loaded_state_are_not_committed() -> None:
    """A peer that was cut off trains alone, then loads the state of the other peers."""
    story = Story([planned(kind="partition")])
    story.rounds(1.0, peers=ALL)
    story.fire(1.5, 0, ["peer-1"])
    alone = {"outcome": "alone", "group_size": None, "waited_s": None}
    story.rounds(2.0, peers=("peer-1",), **alone)
    story.rounds(3.0, peers=REST)
    load = story.say(
        3.5, "state_loaded", "peer-1", round_before=2, round_of_state=3, round=3, seconds=0.1,
        lost=0, received_bytes=STATE_BYTES,
    )  # fmt: skip
    story.rounds(4.0, peers=ALL)
    story.finish(4.0, ALL)
    assert timeline_row(story.timeline)["samples_lost"] == 64
    load["kind"] = "fallback"  # had it been averaged with the others, its step would have stayed
    story.events = [event for event in story.events if event is not load]
    assert timeline_row(story.timeline)["samples_lost"] == 0


@pytest.mark.parametrize(("loads", "lost"), [(True, 2 * 2 * 64), (False, 0)])
def test_rounds_of_one_half_are_undone_if_it_loads_the_other_halfs_state(
    loads: bool, lost: int
) -> None:
    half, other = ("peer-0", "peer-1"), ("peer-2", "peer-3")
    story = Story([planned(kind="partition", who=other)], peers=4)
    story.rounds(1.0, peers=(*half, *other))
    story.fire(1.5, 0, list(other))
    story.rounds(3.0, 4.0, peers=half)
    story.round = 1
    story.rounds(3.5, 4.5, peers=other)
    for name in other if loads else ():
        story.say(
            5.0, "state_loaded", name, round_before=3, round_of_state=3, round=3, seconds=0.1,
            lost=0, received_bytes=STATE_BYTES,
        )  # fmt: skip
    story.rounds(6.0, peers=(*half, *other))
    story.finish(6.0, (*half, *other))
    assert timeline_row(story.timeline)["samples_lost"] == lost


# -- time --------------------------------------------------------------------------------------


def test_a_joiners_clock_is_shifted_to_the_swarms() -> None:
    story = kill_and_restart()
    story.evaluate(13.5, AGAIN, loss=0.05, final=True)
    timeline = story.timeline
    steps = timeline.by_peer(Transition)["peer-1.1"]
    assert [step.clock_s for step in steps] == pytest.approx([2.5, 3.5, 4.5])
    swarm = [timeline.clock_of(step) for step in steps]
    assert swarm == pytest.approx([10.9, 11.9, 12.9])
    assert timeline.clock_s == pytest.approx(13.0)
    assert evaluations(timeline)[-1].clock_s == pytest.approx(13.0)
    assert timeline_row(timeline)["time_to_target_s"] == pytest.approx(13.0)


def test_the_clock_continues_in_a_joiner_that_outlives_the_initial_peers() -> None:
    story = Story([planned(who=ALL)])
    story.rounds(1.0, 2.0, peers=ALL)
    story.join(1.2, 2.0, "peer-3")
    story.rounds(3.0, peers=(*ALL, "peer-3"))
    for name in ALL:
        story.lose(3.5, name)
    story.rounds(4.0, 5.0, 6.0, peers=("peer-3",))
    story.finish(6.0, ["peer-3"])
    row = timeline_row(story.timeline)
    assert story.timeline.clock_s == pytest.approx(6.0)
    assert row["samples_per_s"] == pytest.approx((3 * 3 + 4) * 64 / 6.0)


def test_evaluations_of_departed_peers_are_not_final() -> None:
    story = Story([planned(kind="preempt")])
    story.rounds(1.0, peers=ALL)
    story.say(1.0, "left", "peer-1", round=1, handed_over=64, lost=0)
    story.evaluate(1.5, ["peer-1"], loss=0.9, final=True)
    story.rounds(2.0, 3.0, peers=REST)
    story.finish(3.0, REST)
    story.evaluate(3.5, REST, loss=0.1, final=True)
    assert timeline_row(story.timeline)["final_loss"] == pytest.approx(0.1)


def test_the_payload_of_a_replaced_peer_matches_its_prediction() -> None:
    row = timeline_row(kill_and_restart().timeline)
    assert row["rounds_complete"] == 7  # without those of two peers
    assert row["payload_matches"] is True
    assert row["payload_bytes_per_round"] == 4000


# -- replicates together -----------------------------------------------------------------------


def test_times_of_faults_are_pooled_over_replicates() -> None:
    stories = [
        killed(4.5, 4.6 + late, *(4.6 + late + n for n in range(1, 5))) for late in (1.0, 2.0, 4.0)
    ]
    for number, story in enumerate(stories):
        story.spec = story.spec.model_copy(update={"replicate": number, "seed": number})
        story.end(20.0)
    (row,) = fold([timeline_row(story.timeline) for story in stories])
    assert row["n"] == 3
    assert [float(text) for text in str(row["detect_s"]).split()] == pytest.approx(
        [1.0, 2.0, 4.0], abs=1e-6
    )
    assert row["detect_p50_s"] == seconds(2.0)
    assert row["detect_p95_s"] == seconds(3.8)
    assert row["faults_fired"] == 3
