"""``rayhive scenario run``: break a swarm, watch it heal, see what it cost."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rayhive.cli.scenario import Config, Name, Peers
from rayhive.cli.study import Sets
from rayhive.cli.text import Address, complain

if TYPE_CHECKING:
    from rayhive.spec.replicate import ReplicateSpec
    from rayhive.sweep.study import Study

#: What a replicate's summary shows, where it is known.
FIGURES = ("final_loss", "time_to_target_s", "samples_per_s", "round_p50_s")
#: What that of a faulted one shows besides.
FAULTED_FIGURES = (
    "detect_p95_s",
    "stall_p95_s",
    "recover_p95_s",
    "rejoin_p95_s",
    "censored",
    "goodput",
    "retention",
    "retention_normalised",
    "samples_lost",
    "loss_delta",
)


def run(
    name: Name,
    seed: Annotated[int, typer.Option(help="Seed of the plan, the data and the weights.")] = 0,
    peers: Peers = None,
    config: Config = None,
    set_: Sets = None,
    address: Address = None,
    out: Annotated[
        Path | None,
        typer.Option(help="The run folder; by default runs/NAME-TIME.", show_default=False),
    ] = None,
    twin: Annotated[
        bool,
        typer.Option(help="Run the same without faults first, to say what they cost."),
    ] = True,
) -> None:
    """Run one scenario: what broke, the proof, how fast it healed, what still holds, a picture.

    Example: `rayhive scenario run kill-one --seed 1`

    Exit code 1 if the replicate failed, a fault did not take effect, or an invariant is violated.
    """
    study = scenario_study(name, seed, peers, config, list(set_ or []), twin)
    folder = out if out is not None else new_folder(study.config.name)
    broken = run_study(study, folder, address)
    raise typer.Exit(1 if broken else 0)


def new_folder(name: str) -> Path:
    """Return where a run goes that is never gone on with: NAME-TIME, below runs."""
    return Path("runs") / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"


def scenario_study(
    name: str, seed: int, peers: int | None, file: Path | None, sets: list[str], twin: bool
) -> Study:
    """Return the study that ``scenario run`` runs: one configuration, one replicate of each."""
    import yaml

    from rayhive.faults.library import load_scenario
    from rayhive.sweep.scenario_study import scenario_config
    from rayhive.sweep.study import make_study

    scenario = load_scenario(name)
    config = scenario_config(scenario, name, file, sets, peers)
    data = {**yaml.safe_load(config.to_yaml()), "seed": seed}
    if "objectives" not in config.model_fields_set:
        data["objectives"] = {"samples_per_s": "maximize"}
    study = make_study(data, None if file is None else str(file))
    if twin or not study.twin_added:
        return study
    faulted = tuple(each for each in study.config.scenarios if each != "none")
    return replace(study, config=study.config.model_copy(update={"scenarios": faulted}))


def run_study(study: Study, folder: Path, address: str | None) -> bool:
    """Run a study, tell its stories, and return whether anything is wrong with one of them."""
    from rayhive.sweep.signals import Interrupted, Interruption
    from rayhive.sweep.sweep import preflight, run_sweep

    preflight(study, folder, address)
    try:
        with Interruption() as interruption:
            run_sweep(study, folder, StoryProgress(), interruption, address)
    except Interrupted as stop:
        complain(f"{stop.reason}; what is finished is kept in {folder}")
        raise typer.Exit(stop.exit_code) from None
    broken = any([_tell(row, folder) for row in _rows(folder)])
    _tell_grid(study.config.scenarios, folder)
    return broken


def _tell_grid(scenarios: Sequence[str], folder: Path) -> None:
    """Print what a notice is worth, where several lengths of it were tried."""
    from rayhive.errors import RayhiveError
    from rayhive.report.notice_grid import SCENARIO, notice_grid, notice_html, notice_lines

    if sum(SCENARIO.fullmatch(name) is not None for name in scenarios) < 2:
        return
    try:
        points = notice_grid(folder)
        print()
        for line in notice_lines(points):
            print(line)
        (folder / "notice-grid.html").write_text(notice_html(points), encoding="utf-8")
        print(f"picture: {folder / 'notice-grid.html'}")
    except RayhiveError as error:
        complain(str(error))


def _rows(folder: Path) -> list[Mapping[str, Any]]:
    from rayhive.report.frames import write_parquet
    from rayhive.report.results import load_results

    results = load_results(folder)
    write_parquet(results, folder)
    return [
        {str(key): value for key, value in row.items()}
        for row in results.replicates.to_dict("records")
    ]


def _tell(row: Mapping[str, Any], folder: Path) -> bool:
    """Print what became of one replicate; return whether something is wrong."""
    from rayhive.sweep.run_folder import RunFolder

    return tell(RunFolder(folder).replicate(row["trial"], row["replicate"], row["scenario"]), row)


def tell(place: Path, row: Mapping[str, Any] | None = None, always: bool = False) -> bool:
    """Print the story of one replicate; return whether something is wrong.

    Args:
        place: Its folder.
        row: Its row; made of its events if it is not given.
        always: Print it also of a replicate in which nothing was to break and nothing did.
    """
    from rayhive.metrics.rows import replicate_row
    from rayhive.metrics.timeline import FINISHED
    from rayhive.report.timeline_text import last_timeline, timeline_lines

    row = replicate_row(place) if row is None else row
    violated = [e for e in last_timeline(place).of("invariant") if not e["ok"]]
    wrong = row["state"] not in FINISHED or bool(violated)
    if row["scenario"] == "none" and not wrong and not always:
        return False
    print()
    for line in timeline_lines(place):
        print(line)
    names = FIGURES if row["scenario"] == "none" else FAULTED_FIGURES
    found = ((name, _figure(row, name)) for name in names)
    told = [f"{name} {text}" for name, text in found if text is not None]
    if told:
        print(f"\n{', '.join(told)}")
    _draw(place)
    return wrong


def _figure(row: Mapping[str, Any], name: str) -> str | None:
    """Print a number, or what is known of one that was not seen; None where nothing is."""
    import pandas as pd

    from rayhive.report.table_model import bound_text
    from rayhive.sweep.progress_plain import figure

    known = {key: None if pd.isna(value) else value for key, value in row.items()}
    value = known.get(name)
    return bound_text(known, name) if value is None else figure(name, float(value))


def _draw(place: Path) -> None:
    from rayhive.errors import RayhiveError
    from rayhive.report.timeline_picture import write_timeline_picture

    picture = place / "timeline.html"
    try:
        write_timeline_picture(place, picture)
    except RayhiveError as error:
        complain(str(error))
    else:
        print(f"picture: {picture}")


class StoryProgress:
    """Prints what breaks and heals while it does."""

    def __init__(self) -> None:
        self._read = 0
        self._began: float | None = None

    def began(self, trials: int, replicates: int) -> None:
        """Say how many replicates there will be."""
        self.note(f"{replicates} replicate{'s' if replicates > 1 else ''}")

    def replicate_started(self, spec: ReplicateSpec, adopted: bool) -> None:
        """Say which one runs now."""
        self._read, self._began = 0, None
        what = "the twin, in which nothing breaks" if spec.plan is None else spec.scenario
        plan = "" if spec.plan is None else f", plan {spec.plan.hash[:16]}"
        seconds = spec.budget.seconds_per_replicate
        self.note(f"{what}{plan}: {spec.swarm.peers} peers, at most {seconds:g} s of training")

    def replicate_status(self, spec: ReplicateSpec, handle: Any) -> None:
        """Print the events that belong to the story and have come since."""
        from rayhive.report.timeline_text import event_text

        for event in self._fresh(Path(spec.folder) / "events.jsonl"):
            if event["kind"] == "barrier_released":
                self._began = event["t"]
                self.note("training begins")
            elif self._began is not None and (text := event_text(event)) is not None:
                self.note(f"{event['t'] - self._began:8.2f} s  {text}")

    def _fresh(self, log: Path) -> Iterator[dict[str, Any]]:
        from rayhive.events import load_event

        if not log.exists():  # it is on another node
            return
        with log.open("rb") as file:
            file.seek(self._read)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._read += len(line)
                yield load_event(line.decode())

    def replicate_finished(self, spec: ReplicateSpec, row: Mapping[str, Any], kept: bool) -> None:
        """Say how it ended."""
        reason = f" ({row['stop_reason']})" if row.get("stop_reason") else ""
        self.note(f"{spec.scenario}: {row['state']}{reason}")

    def trial_finished(self, record: Any, values: Any, reason: str | None) -> None:
        """Say nothing: there is one trial."""

    def note(self, text: str) -> None:
        """Print a line."""
        print(text, file=sys.stderr, flush=True)
