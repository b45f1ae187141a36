"""The learning tests on several seeds: what each measured before and after.

    python benchmarks/learning.py [--seeds 0 1 2] [--only EXPRESSION] [--results benchmarks/results]

Runs tests/learning once for each seed, one after another, and reads what the tests record. The seed
is that of the warm start, of the teacher and of every run. With `--results` the table is written as
JSON and Markdown; tests and seeds that were not run keep what an earlier call measured. It exits 1
where a test failed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias
from xml.etree import ElementTree

from arguments import result_folder
from flowrl.cluster.cpu import cpu_device
from flowrl.files import write_text_atomic

ROOT = Path(__file__).resolve().parent.parent

Row: TypeAlias = dict[str, object]
"""`test`, `measure`, `seed`, `before`, `after`, `passed`, `seconds` (of the whole test)."""

Key: TypeAlias = tuple[str, str, int]
"""Test, measure, seed."""


def measure(seed: int, only: str | None) -> tuple[list[Row], bool]:
    """Runs the tests with one seed; whether all passed."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "tests/learning", f"--junitxml={report}"]
        command += ["-o", "junit_family=xunit1", f"--basetemp={folder}/tests"]
        command += ["-k", only] if only else []
        environment = os.environ | {"FLOWRL_SEED": str(seed), "OMP_NUM_THREADS": "1"}
        code = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
        cases = ElementTree.parse(report).iter("testcase")
        return [row for case in cases for row in _rows(case, seed)], code == 0


def _rows(case: ElementTree.Element, seed: int) -> Iterator[Row]:
    failed = case.find("failure") is not None or case.find("error") is not None
    name = case.get("name", "").removeprefix("test_").replace("_", " ")
    for recorded in case.iter("property"):
        before, after = map(float, recorded.get("value", "").split())
        yield {
            "test": name,
            "measure": recorded.get("name", ""),
            "seed": seed,
            "before": before,
            "after": after,
            "passed": not failed,
            "seconds": round(float(case.get("time", 0)), 1),
        }


def _key(row: Row) -> Key:
    return str(row["test"]), str(row["measure"]), int(str(row["seed"]))


def table(rows: Mapping[Key, Row]) -> str:
    """A line for each measure of each test, a column for each seed, as Markdown."""
    seeds = sorted({seed for _, _, seed in rows})
    names = ("test", "measure", *(f"seed {seed}" for seed in seeds), "seconds")
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    for test, name in dict.fromkeys((test, name) for test, name, _ in rows):
        of_seed = {seed: rows.get((test, name, seed)) for seed in seeds}
        seconds = [str(row["seconds"]) for row in of_seed.values() if row is not None]
        cells = [test, name, *map(_cell, of_seed.values()), ", ".join(seconds)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    return f"{row['before']} → {row['after']}" + ("" if row["passed"] else " (failed)")


def write(rows: Mapping[Key, Row], folder: Path) -> None:
    """`learning.json` and `learning.md`."""
    machine = f"{cpu_device().name}, {os.cpu_count()} cores, one thread a process"
    report = {"machine": machine, "rows": list(rows.values())}
    write_text_atomic(folder / "learning.json", json.dumps(report, indent=2) + "\n")
    text = (
        "# What the learning tests measured\n\n"
        f"Before → after, on {machine}. Made by `python benchmarks/learning.py`; the tests say "
        "what each measure is, and how many steps lie between. Seconds are of the whole test, for "
        "each seed; those of the first tests include the models that all go on from.\n\n"
    )
    write_text_atomic(folder / "learning.md", text + table(rows))


def earlier(folder: Path | None) -> dict[Key, Row]:
    """What earlier calls wrote."""
    path = None if folder is None else folder / "learning.json"
    if path is None or not path.is_file():
        return {}
    return {_key(row): row for row in json.loads(path.read_text())["rows"]}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints, writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", help="tests by name, as pytest's -k takes them")
    parser.add_argument("--results", type=result_folder)
    options = parser.parse_args(arguments)
    rows = earlier(options.results)
    passed = True
    for seed in options.seeds:
        measured, all_passed = measure(seed, options.only)
        rows |= {_key(row): row for row in measured}
        passed = passed and all_passed
        if options.results is not None:
            write(rows, options.results)
    print("\n" + table(rows))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
