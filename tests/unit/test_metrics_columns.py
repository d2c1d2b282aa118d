"""Columns of every group, compared with numbers by hand (see tests.fixtures.logs)."""

from __future__ import annotations

import math
from typing import Any

import pytest

from rayhive.columns import Row
from rayhive.events import Event, make_event
from rayhive.metrics.rows import timeline_row
from rayhive.spec import Configuration, Link, NodeClass, SwarmConfig
from tests.fixtures.faulted import Story
from tests.fixtures.logs import Log, make_spec, timeline_of


def row(log: Log) -> Row:
    return timeline_row(timeline_of(log.spec, log.events()))


def without(log: Log, *kinds: str) -> Row:
    events = [event for event in log.events() if event["kind"] not in kinds]
    return timeline_row(timeline_of(log.spec, events))


@pytest.fixture
def plain() -> Row:
    return row(Log())


def test_convergence(plain: Row) -> None:
    assert plain["final_loss"] == pytest.approx((0.5 + 0.52) / 2, rel=1e-15)
    assert plain["reached"] is True
    assert plain["time_to_target_s"] == 4.1  # of the slower peer, after round 4
    assert plain["samples_to_target"] == 512


def test_the_first_evaluation_at_the_target_counts() -> None:
    early = row(Log(accuracies=(0.9, 0.5)))
    assert (early["time_to_target_s"], early["samples_to_target"]) == (2.6, 256)
    assert early["reached"] is True


def test_a_target_that_only_the_final_evaluation_reaches_is_reached() -> None:
    log = Log()
    events = log.events()
    for event in events:
        if event["kind"] == "evaluation":
            event["values"]["accuracy"] = 0.95 if event["final"] else 0.5
    late = timeline_row(timeline_of(log.spec, events))
    assert (late["time_to_target_s"], late["samples_to_target"]) == (4.5, 512)


def test_a_target_of_mode_min() -> None:
    log = Log()
    events = log.events()
    for event in events:
        if event["kind"] == "peer_ready":
            event["target"] = {"metric": "loss", "value": 0.51, "mode": "min"}
    assert timeline_row(timeline_of(log.spec, events))["time_to_target_s"] == 4.1


def test_a_missed_target_has_no_time() -> None:
    missed = row(Log(accuracies=(0.1, 0.2)))
    assert missed["reached"] is False
    assert missed["time_to_target_s"] is None
    assert missed["samples_to_target"] is None


def test_a_target_metric_without_measurements_is_not_reached() -> None:
    log = Log()
    events = log.events()
    for event in events:
        if event["kind"] == "peer_ready":
            event["target"] = {"metric": "perplexity", "value": 5.0, "mode": "min"}
    assert timeline_row(timeline_of(log.spec, events))["reached"] is False


def test_without_evaluations_there_is_no_loss_but_the_target_was_missed() -> None:
    blind = row(Log(losses=()))
    assert blind["final_loss"] is None
    assert blind["reached"] is False


def test_a_loss_that_is_not_a_number_is_none() -> None:
    assert row(Log(losses=(1.0, math.nan)))["final_loss"] is None


def test_throughput(plain: Row) -> None:
    assert plain["samples_per_s"] == 512 / 4.5
    assert plain["goodput"] == 512 / 544
    # 0.5 0.6 0.6 0.7 0.7 0.8: without the first transitions of 2.0 s
    assert plain["round_p50_s"] == pytest.approx(0.65)
    assert plain["round_p95_s"] == pytest.approx(0.775)


def test_skipped_samples_are_computed_and_not_committed() -> None:
    skipped = row(Log(rounds={(3, 0): {"outcome": "skipped"}, (3, 1): {"outcome": "skipped"}}))
    assert skipped["rounds"] == 3
    assert skipped["goodput"] == (512 - 128) / 544
    assert skipped["rounds_failed"] == 1
    assert skipped["rounds_complete"] == 3


def test_a_dead_peer_has_only_the_samples_of_its_rounds() -> None:
    log = Log()
    events = [
        event
        for event in log.events()
        if event["peer"] != "peer-1" or event["kind"] not in ("evaluation", "peer_finished")
    ]
    assert timeline_row(timeline_of(log.spec, events))["goodput"] == 512 / (272 + 256)


def test_wire_bytes_need_both_counts_of_every_node() -> None:
    def counted(when: str, **sent: int) -> Event:
        nodes = {node: {"tx_bytes": number, "rx_bytes": 0} for node, number in sent.items()}
        return make_event("link_counted", when=when, nodes=nodes)

    log = Log()
    events, steps = log.events(), 2 * 4  # peers x rounds
    twice = [*events, counted("start", a=1000, b=0), counted("end", a=41_000, b=40_000)]
    assert timeline_row(timeline_of(log.spec, twice))["wire_bytes_per_round"] == 80_000 / steps
    gone = [*events, counted("start", a=1000, b=0), counted("end", a=41_000)]
    assert timeline_row(timeline_of(log.spec, gone))["wire_bytes_per_round"] is None
    came = [*events, counted("start", a=1000), counted("end", a=41_000, b=40_000)]
    assert timeline_row(timeline_of(log.spec, came))["wire_bytes_per_round"] is None


def test_communication(plain: Row) -> None:
    assert plain["payload_bytes_per_round"] == 4000.0
    assert plain["payload_bytes_per_round_predicted"] == 4000.0
    assert plain["payload_matches"] is True
    assert plain["state_bytes_per_round"] == 1000.0
    assert plain["payload_bytes_per_sample"] == (4 * 8000 + 8 * 1000) / 512
    assert plain["gradient_compression_ratio"] == 4.0
    # all that was sent: parameters travel in full, so 16000 + 1000 B became 4000 + 1000 B
    assert plain["compression_ratio"] == 17 / 5
    # 0.2 0.21 0.3 0.31 0.4 0.41: without each peer's first
    assert plain["averaging_p50_s"] == pytest.approx(0.305)
    assert plain["averaging_p95_s"] == pytest.approx(0.4075)
    assert (plain["rounds"], plain["rounds_failed"], plain["rounds_partial"]) == (4, 0, 0)
    assert plain["wire_bytes_per_round"] is None


def test_rank_one_factors_compress_all_payload_less_than_twofold() -> None:
    """The quickstart's digits model: 71.83 times fewer bytes of gradients, parameters in full."""
    log, dense, factors = Log(payload=8436), 605_992, 8436
    events = log.events()
    for event in events:
        if event["kind"] == "peer_ready":
            event |= {"dense_payload_bytes": dense, "dense_state_bytes": dense}
        if event["kind"] == "state_round":
            event["sent_bytes"] = dense  # 2(N-1)/N of it, N = 2
    columns = timeline_row(timeline_of(log.spec, events))
    assert columns["gradient_compression_ratio"] == pytest.approx(71.83, abs=0.005)
    assert columns["compression_ratio"] == pytest.approx(2 * dense / (factors + dense))
    assert columns["compression_ratio"] == pytest.approx(1.97, abs=0.005)


@pytest.mark.parametrize(("every", "codec"), [(1, "none"), (1, "float16"), (2, "float16")])
def test_compression_ratio_includes_state_averaging(every: int, codec: str) -> None:
    """Three peers, statistics beside the parameters, every round or every other one."""
    swarm = SwarmConfig(peers=3, target_batch_size=128)
    configuration = Configuration(state_codec=codec, average_state_every=every)
    spec = make_spec(swarm=swarm, configuration=configuration)
    log, state = Log(spec=spec, payload=4000), 30_000
    events = [
        event
        for event in log.events()
        if event["kind"] != "state_round" or event["round"] % every == 0
    ]
    sent = 4 / 3 * state / (2 if codec == "float16" else 1)  # 2(N-1)/N
    for event in events:
        if event["kind"] == "peer_ready":
            event["dense_state_bytes"] = state
        if event["kind"] == "state_round":
            event |= {"group_size": 3, "sent_bytes": sent}
    columns = timeline_row(timeline_of(log.spec, events))
    dense = 4 / 3 * 16_000 + 4 / 3 * state / every
    assert columns["compression_ratio"] == pytest.approx(dense / (4 / 3 * 4000 + sent / every))
    assert columns["gradient_compression_ratio"] == pytest.approx(4.0)


@pytest.mark.parametrize("peers", [2, 3, 5, 7])
def test_without_a_codec_the_ratio_is_one_to_the_bit(peers: int) -> None:
    swarm = SwarmConfig(peers=peers, target_batch_size=128)
    log = Log(spec=make_spec(swarm=swarm), payload=16_000)
    events, state = log.events(), 30_001
    whole = 2 * (peers - 1) * state  # of the swarm, shared out unevenly
    for event in events:
        if event["kind"] == "peer_ready":
            event["dense_state_bytes"] = state
        if event["kind"] == "state_round":
            rest = whole % peers if event["peer"] == "peer-0" else 0
            event |= {"group_size": peers, "sent_bytes": whole // peers + rest}
    columns = timeline_row(timeline_of(log.spec, events))
    assert columns["compression_ratio"] == columns["gradient_compression_ratio"] == 1.0


def test_older_logs_have_the_ratio_if_state_was_not_compressed() -> None:
    spec = make_spec(configuration=Configuration(state_codec="float16"))
    assert row(Log(spec=spec))["compression_ratio"] is None
    assert row(Log())["compression_ratio"] == 17 / 5


@pytest.mark.parametrize("peers", [1, 2, 3, 4])
def test_measured_equals_predicted_to_the_bit(peers: int) -> None:
    spec = make_spec(swarm=SwarmConfig(peers=peers, target_batch_size=128))
    alone = {
        (n, 0): {"outcome": "alone", "group_size": None, "sent_bytes": 0} for n in (1, 2, 3, 4)
    }
    columns = row(Log(spec=spec, rounds=alone if peers == 1 else {}))
    assert columns["payload_bytes_per_round"] == columns["payload_bytes_per_round_predicted"]
    assert columns["payload_bytes_per_round"] == 2 * (peers - 1) * 4000 / peers
    assert columns["payload_matches"] is True
    ratio = None if peers == 1 else pytest.approx(4.0)
    assert columns["gradient_compression_ratio"] == ratio


def test_one_byte_too_many_is_noticed() -> None:
    columns = row(Log(rounds={(2, 1): {"sent_bytes": 3501}}))
    assert columns["payload_matches"] is False
    assert columns["payload_bytes_per_round"] == (4 * 8000 + 1) / 8


def test_an_estimated_prediction_is_not_compared() -> None:
    assert row(Log(exact=False))["payload_matches"] is None


@pytest.mark.parametrize(
    "fields",
    [
        {"outcome": "partial", "fraction": 0.6},
        {"outcome": "local", "group_size": None, "fraction": None, "sent_bytes": None},
        {"group_size": 1},
        {"retries": 1, "sent_bytes": 9000},
    ],
    ids=["partial", "local", "smaller group", "second attempt"],
)
def test_only_complete_rounds_are_compared_with_the_prediction(fields: dict[str, Any]) -> None:
    columns = row(Log(rounds={(2, 0): fields}))
    assert columns["rounds_complete"] == 3
    assert columns["payload_bytes_per_round"] == 4000.0
    assert columns["payload_matches"] is True
    assert columns["rounds"] == 4


@pytest.mark.parametrize(("size", "complete"), [(2, 2), (3, 2), (1, 0), (5, 0)])
def test_rounds_in_pairs_are_complete_if_no_peer_is_alone(size: int, complete: int) -> None:
    """Of five peers, two are a pair and the others a group of three."""
    story = Story(configuration=Configuration(local_steps=4, group_size=2), peers=5)
    names = [f"peer-{number}" for number in range(5)]
    story.rounds(1.0, 2.0, peers=names)
    for event in story.of("round"):
        event["group_size"] = size if event["peer"] in names[:2] else 3
    columns = timeline_row(story.timeline)
    assert columns["rounds_complete"] == complete


def test_partial_rounds_are_counted() -> None:
    partial = {"outcome": "partial", "fraction": 0.6}
    assert row(Log(rounds={(2, 0): partial, (2, 1): partial}))["rounds_partial"] == 1
    assert row(Log(rounds={(2, 0): {"fraction": 0.999}}))["rounds_partial"] == 1
    log = Log(rounds={(2, 0): partial})
    events = log.events()
    state = [event for event in events if event["kind"] == "state_round"]
    state[2] |= {"outcome": "partial", "fraction": 0.5}  # round 3 of peer 0
    assert timeline_row(timeline_of(log.spec, events))["rounds_partial"] == 2


def test_failed_rounds_of_gradients_and_of_state() -> None:
    log = Log(rounds={(1, 0): {"outcome": "local"}, (1, 1): {"outcome": "skipped"}})
    events = log.events()
    state = [event for event in events if event["kind"] == "state_round"]
    state[2] |= {"outcome": "failed", "fraction": 0.0}
    columns = timeline_row(timeline_of(log.spec, events))
    assert (columns["rounds_failed"], columns["rounds_partial"]) == (2, 0)


def test_a_swarm_without_state_averaging_sent_zero_bytes_of_state() -> None:
    columns = without(Log(), "state_round")
    assert (columns["state_bytes_per_round"], columns["state_rounds"]) == (0.0, 0)


def test_rounds_after_which_parameters_were_averaged_count_once() -> None:
    log = Log()
    events = [e for e in log.events() if e["kind"] != "state_round" or e["round"] in (2, 3)]
    for event in events:
        if event["kind"] == "state_round" and event["round"] == 3:
            event["outcome"] = "failed"
    assert timeline_row(timeline_of(log.spec, events))["state_rounds"] == 1


def test_weights() -> None:
    assert row(Log())["weights_distance_max"] == pytest.approx(0.004 / 10)
    assert without(Log(), "weights")["weights_distance_max"] is None


def test_weights_that_are_not_finite_are_left_out() -> None:
    log = Log()
    events = log.events()
    last = [event for event in events if event["kind"] == "weights"][-1]
    last |= {"finite": False, "norm": math.nan, "sketch": [math.nan] * 3}
    value = timeline_row(timeline_of(log.spec, events))["weights_distance_max"]
    assert value == pytest.approx(0.003 / 10)


def test_equal_weights_have_no_distance_even_at_zero() -> None:
    log = Log()
    events = log.events()
    for event in events:
        if event["kind"] == "weights":
            event |= {"norm": 0.0, "sketch": [0.0, 0.0, 0.0]}
    assert timeline_row(timeline_of(log.spec, events))["weights_distance_max"] == 0.0


def test_provenance(plain: Row) -> None:
    assert plain["git_revision"] == "abc1234"
    assert plain["versions"] == "rayhive 0.1.0, hivemind 1.1.12"
    assert plain["hardware"] == "2 x x86_64"
    assert plain["started"] == "2025-06-15T15:06:40Z"
    assert plain["ended"] == "2025-06-15T15:07:40Z"


def test_provenance_is_that_of_the_machines_of_the_peers() -> None:
    """The supervisor may be on a head node without the peers' GPUs."""
    log = Log()
    events = log.events()
    for number in range(2):
        facts = {"versions": {"torch": f"2.{number}"}, "hardware": f"{number} x H200"}
        spawned = make_event(
            "peer_spawned", f"peer-{number}", node="n", host="h", pid=1 + number, **facts
        )
        events.append(spawned.model_dump())
    columns = timeline_row(timeline_of(log.spec, events))
    assert columns["hardware"] == "0 x H200; 1 x H200"
    assert columns["versions"] == "torch 2.0; torch 2.1"


def test_provenance_falls_back_to_the_peers() -> None:
    log = Log()
    events = [event for event in log.events() if event["kind"] != "replicate_started"]
    for event in events:
        if event["kind"] == "peer_ready":
            event["hardware"] = f"machine of {event['peer']}"
    columns = timeline_row(timeline_of(log.spec, events))
    assert columns["hardware"] == "machine of peer-0; machine of peer-1"
    assert columns["started"] is None


def test_identity_and_configuration() -> None:
    shaped = NodeClass(count=1, link=Link(rate_mbit=20, delay_ms=80, loss=0.01))
    classes = {"slow": shaped, "fast": NodeClass(count=1)}
    columns = row(
        Log(
            spec=make_spec(
                trial=3,
                replicate=1,
                attempt=2,
                configuration=Configuration(codec="size_adaptive", threshold=512, delay="state"),
                swarm=SwarmConfig(peers=2, target_batch_size=128, node_classes=classes),
            )
        )
    )
    assert [columns[name] for name in ("trial", "replicate", "seed", "attempt")] == [3, 1, 1, 2]
    assert columns["configuration"] == "size_adaptive(512) delay-state"
    assert (columns["codec"], columns["threshold"], columns["delay"]) == (
        "size_adaptive",
        512,
        "state",
    )
    assert columns["powersgd_rank"] is None
    assert (columns["workload"], columns["data"], columns["peers"]) == ("digits", "real", 2)
    assert columns["link"] == "fast: unshaped; slow: 20 Mbit/s, 80 ms, 1 % lost"
    assert (columns["state"], columns["stop_reason"]) == ("completed", "rounds")


def test_a_group_returns_exactly_its_declared_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    from rayhive.metrics.groups.weights import Weights

    monkeypatch.setattr(Weights, "compute", lambda self, timeline: {"something": 1})
    with pytest.raises(AssertionError, match="weights"):  # no fault of the log
        row(Log())
