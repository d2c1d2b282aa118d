"""Claims that benchmarks print, their parser, and the file of results."""

from __future__ import annotations

import datetime
import os
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import bulk_rounds, run_all, soak
from benchmarks.claims import Claim, Verdict, parse_claims, parse_skip, print_fact
from benchmarks.results_file import Outcome, render, table, updated
from benchmarks.run_all import RESULTS, scripts
from benchmarks.runs import ratio_of_runs, ratio_of_turns
from rayhive.membership.links.lossless import coded

FAST = Claim("rounds of 2 peers: median", 0.1, 0.09, 0.11, "s", 0.12, at_least=False)
SLOW = Claim("samples/s of a | b", 0.9612, 0.95, 0.972, "x", 0.97, at_least=True)
NOW = datetime.datetime(2026, 1, 2, 3, 4, tzinfo=datetime.timezone.utc)


def _outcome(name: str, *lines: object, failure: str = "") -> Outcome:
    return Outcome(name, "\n".join(map(str, lines)), failure, seconds=12.3, load=0.5)


def test_a_claim_is_printed_with_its_bound_and_its_interval() -> None:
    assert str(FAST) == (
        "claim: rounds of 2 peers: median, at most 0.12 s: 0.1 s (95 % 0.09-0.11): held"
    )
    assert str(SLOW).endswith("at least 0.97x: 0.9612x (95 % 0.95-0.972): not held")


@given(
    text=st.from_regex(r"[a-z][a-z0-9 :,()/|-]{0,40}[a-z]", fullmatch=True),
    numbers=st.lists(st.floats(0, 1e12, allow_subnormal=False), min_size=3, max_size=3),
    unit=st.sampled_from(["x", "s", "", "%", "samples/s"]),
    bound=st.sampled_from([0.97, 30, 2, 1e-05, 1e9]),
    at_least=st.booleans(),
)
def test_a_printed_claim_is_parsed_again(
    text: str, numbers: list[float], unit: str, bound: float, at_least: bool
) -> None:
    claim = Claim(text, *numbers, unit, bound, at_least)
    (read,) = parse_claims(["noise", f"  {claim}\n", "claim: without a verdict"])
    assert read == Verdict(claim.promise, claim.measurement, claim.held)


def test_a_claim_without_a_number_is_parsed_again(capsys) -> None:
    print_fact("codec: hivemind's bytes", True)
    print_fact("codec: hivemind's error (95 %)", False)
    assert parse_claims(capsys.readouterr().out.splitlines()) == [
        Verdict("codec: hivemind's bytes", "", True),
        Verdict("codec: hivemind's error (95 %)", "", False),
    ]


def test_a_measurement_that_is_nan_does_not_hold() -> None:
    for at_least in (True, False):
        claim = Claim("ratio", float("nan"), float("nan"), float("inf"), "x", 1.0, at_least)
        assert not claim.held
        (read,) = parse_claims([str(claim)])
        assert not read.held


def test_a_skip_has_a_reason() -> None:
    assert parse_skip(["measuring", "skipped: no GPU here"]) == "no GPU here"
    assert parse_skip(["measuring", str(FAST)]) is None


def test_the_table_has_a_row_for_each_claim_failure_and_skip() -> None:
    outcomes = [
        _outcome("two", "noise", FAST, SLOW),
        _outcome("late", FAST, failure="it took longer than 5 s"),
        _outcome("silent", "nothing to say"),
        _outcome("absent", "skipped: no GPU here"),
    ]
    rows = table(outcomes).splitlines()[2:]
    assert [row.split(" | ")[0] for row in rows] == [
        "| two", "| two", "| late", "| late", "| silent", "| absent",
    ]  # fmt: skip
    assert rows[0].endswith("| 0.1 s (95 % 0.09-0.11) | yes |")
    assert rows[1].endswith("| **no** |") and "a \\| b" in rows[1]
    assert "**failed**: it took longer than 5 s" in rows[3]
    assert "**failed**: it ended without a claim" in rows[4]
    assert "skipped: no GPU here" in rows[5]
    assert [bool(outcome.problem) for outcome in outcomes] == [False, True, True, False]


def test_the_file_has_conditions_summary_and_every_output() -> None:
    text = render([_outcome("one", "p50 0.1 s", FAST), _outcome("two", SLOW)], NOW, "2 cores")
    assert "2026-01-02 03:04 UTC; 2 cores" in text
    assert text.index("| script |") < text.index("## one") < text.index("## two")
    assert f"```\np50 0.1 s\n{FAST}\n```" in text
    assert "12 s, load 0.50 before it began" in text


def test_an_update_replaces_the_results_of_its_scripts_and_keeps_the_others() -> None:
    before = render([_outcome("one", FAST, "a"), _outcome("zero", SLOW, FAST)], NOW, "2 cores")
    later = NOW + datetime.timedelta(days=1)

    text = updated(before, [_outcome("two", FAST), _outcome("one", SLOW, "b")], later)

    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")][1:]
    assert [row[0] for row in rows] == ["| one", "| two", "| zero", "| zero"]
    assert rows[0][3] == "**no** |" and "a \\| b" in rows[0][1]
    assert text.count("Run by itself: 2026-01-03 03:04 UTC.") == 2
    assert text.index("## one") < text.index("## two") < text.index("## zero")
    assert f"```\n{SLOW}\nb\n```" in text and f"```\n{FAST}\na\n```" not in text
    assert text.endswith(before[before.index("## zero") :])


def test_the_results_of_a_script_are_in_the_file_before_the_next_script_begins(
    tmp_path, monkeypatch
) -> None:
    file = tmp_path / "RESULTS.md"
    file.write_text(render([_outcome("one", FAST)], NOW, "2 cores"))
    seen = []

    def run(name: str, _: float) -> Outcome:
        seen.append(file.read_text())
        return _outcome(name, SLOW)

    monkeypatch.setattr(run_all, "RESULTS", file)
    monkeypatch.setattr(run_all, "run", run)
    monkeypatch.setattr("sys.argv", ["run_all.py", "soak", "overlap", "--update"])
    assert run_all.main() == 0
    assert "## soak" not in seen[0] and "## soak" in seen[1] and "## overlap" not in seen[1]
    assert "## overlap" in file.read_text() and "## one" in file.read_text()


def test_an_update_with_nothing_leaves_the_file_as_it_is() -> None:
    text = RESULTS.read_text()
    assert updated(text, [], NOW) == text


def test_every_script_that_can_be_run_is_found_and_nothing_else(tmp_path) -> None:
    assert {"round_latency", "strategy_overhead", "overlap"} <= set(scripts())
    assert not {"run_all", "claims", "swarm", "links", "__init__"} & set(scripts())
    (tmp_path / "b.py").write_text('x = 1\nif __name__ == "__main__":\n    pass\n')
    (tmp_path / "a.py").write_text('"""Not with if __name__ == in its text."""\n')
    assert scripts(tmp_path) == ["b"]


def test_a_script_that_fails_or_takes_too_long_is_named_and_the_others_still_run(
    tmp_path, monkeypatch, capfd
) -> None:
    guard = 'if __name__ == "__main__":'
    (tmp_path / "broken.py").write_text(f"{guard}\n    raise SystemExit('no link')\n")
    (tmp_path / "good.py").write_text(f"{guard}\n    print({str(FAST)!r})\n")
    (tmp_path / "stuck.py").write_text(f"{guard}\n    import time\n    time.sleep(600)\n")
    monkeypatch.setattr(run_all, "FOLDER", tmp_path)
    broken, good = (run_all.run(name, limit=60) for name in ("broken", "good"))
    stuck = run_all.run("stuck", limit=0.2)
    assert (broken.failure, good.failure) == ("exit code 1", "")
    assert "no link" in broken.output
    assert [claim.promise for claim in good.claims] == [FAST.promise]
    assert stuck.failure == "it took longer than 0.2 s"
    assert "claim: rounds of 2 peers" in capfd.readouterr().out


def test_an_unknown_name_is_an_error_with_the_nearest_one(monkeypatch, capsys) -> None:
    monkeypatch.setattr("sys.argv", ["run_all.py", "overlop"])
    with pytest.raises(SystemExit) as error:
        run_all.main()
    assert error.value.code == 2
    assert "did you mean overlap?" in capsys.readouterr().err


def test_a_ratio_of_runs_has_the_interval_of_students_t() -> None:
    ratio, low, high = ratio_of_runs([2.0, 2.0, 2.0], [1.0, 1.0, 1.0])
    assert (ratio, low, high) == pytest.approx((2.0, 2.0, 2.0))
    ratio, low, high = ratio_of_runs(np.exp([0.1, 0.3]), [1.0, 1.0])
    assert ratio == pytest.approx(np.exp(0.2))
    # t(0.975, 1) = 12.706; standard error of (0.1, 0.3) is 0.1
    assert (low, high) == pytest.approx((np.exp(0.2 - 1.2706), np.exp(0.2 + 1.2706)), rel=1e-3)
    with pytest.raises(ValueError, match="two repetitions"):
        ratio_of_runs([1.0], [1.0])


def test_a_ratio_of_turns_weighs_every_second_and_covers_the_truth() -> None:
    assert ratio_of_turns([2.0, 4.0], [1.0, 2.0])[0] == pytest.approx(2.0)
    assert ratio_of_turns([1.0, 9.0], [1.0, 1.0])[0] == pytest.approx(5.0)
    generator = np.random.default_rng(1)
    load = generator.uniform(1, 3, 60)  # hits both of a pair
    ratio, low, high = ratio_of_turns(1.5 * load, load * generator.normal(1, 0.05, 60))
    assert low < 1.5 < high and low < ratio < high
    assert high - low < 0.1


def _descriptors() -> soak.Size:
    return 0, Counter(soak.descriptors(os.getpid()))


def test_the_soak_counts_one_pipe_after_another_once_and_sees_a_leak() -> None:
    read, write = os.pipe()
    other = os.pipe()
    before = [_descriptors()]
    for number in (read, write):
        os.close(number)
    read, write = os.pipe()
    before.append(_descriptors())
    after = [_descriptors()]
    leak = os.dup(write)
    leaking = [_descriptors()]
    for number in (*other, read, write, leak):
        os.close(number)

    assert soak.growth_of(soak.standing(before)[1], soak.standing(after)[1]) == {}
    assert soak.growth_of(soak.standing(before)[1], soak.standing(leaking)[1]) == {"pipe": 1}


def test_bulk_gradients_fill_the_link_as_their_size_says() -> None:
    first, second = (bulk_rounds.random_numbers(50_000, seed).numpy() for seed in (1, 2))
    for numbers in (first, second, (first + second) / 2):
        coding = coded(numbers.data)
        assert coding is None or len(coding) > 0.9 * numbers.nbytes
    equal = coded(np.full_like(first, 2.0).data)
    assert equal is not None and len(equal) < 0.01 * first.nbytes
