"""Draw one column of a run as a picture for a page: the rows with their 95 % intervals.

    python benchmarks/study_picture.py runs/tradeoffs docs/results/tradeoffs.svg

Rows are in the order of the column. Of a row whose replicates did not all reach the target, only
the number that did is written: their mean time would leave out the others.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pandas as pd

import rayhive
from benchmarks.pictures import Interval, write_intervals


def intervals(rows: pd.DataFrame, column: str) -> list[Interval]:
    """Return the rows of a table, the best first."""
    found = []
    for row in rows.to_dict("records"):
        missed = column == "time_to_target_s" and row["reached"] < row["n"]
        note = f"{row['reached']} of {row['n']} reached the target" if missed else ""
        low, high = row[f"{column}_low"], row[f"{column}_high"]
        value = None if missed or pd.isna(row[column]) else float(row[column])
        ends = None if value is None or pd.isna(low) else (float(low), float(high))
        style = "c1" if pd.notna(row["baseline"]) else "c0"
        found.append(Interval(str(row["configuration"]), value, ends, style, note))
    return sorted(found, key=lambda each: (each.value is None, each.value or 0.0))


def main() -> None:
    """Read a run and write the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", help="the run folder")
    parser.add_argument("out", type=Path, help="the SVG file")
    parser.add_argument("--column", default="time_to_target_s", help="a measured column")
    parser.add_argument("--label", default="time to the target [s]", help="text at the axis")
    parser.add_argument("--scenario", default="none", help="rows of this scenario")
    args = parser.parse_args()
    rows = rayhive.load(args.run).configurations
    rows = rows[rows["scenario"] == args.scenario]
    title = f"{args.label} by configuration, mean and 95 % interval"
    write_intervals(args.out, title, args.label, intervals(rows, args.column))


if __name__ == "__main__":
    main()
