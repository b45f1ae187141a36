"""How many rows a minute `flowrl data check` reads on one core, beside decoding alone.

The rows are JSON lines in GSM8K's layout, each with a different question of about 200 characters
and a worked answer. The check parses them, renders and encodes prompts and solutions, and looks for
duplicates. The baseline, measured in turns in the same run, is `json.loads` of each line. Times are
processor times of this process.

    python benchmarks/data_check.py --output benchmarks/results/data_check.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from arguments import at_least_one, json_file
from flowrl.config.data import DataConfig
from flowrl.config.roles import CharTokenizer, FreshModel, RoleConfig
from flowrl.data import RowNeeds, Tokenizer, load_rows, prepare_model_folder
from flowrl.data.row_check import check_rows, every_bad_row
from flowrl.files import write_result

ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789 .,#+=*?"
NEEDS = RowNeeds(answer=True, solution=True)


def write_rows(path: Path, num: int) -> None:
    """Writes the rows as JSON lines."""
    story = "a farmer has some sheep and sells a few of them every day of the week, and then buys. "
    with path.open("w", encoding="utf-8") as file:
        for index in range(num):
            question = f"{story * 2}how many of {index} are left?"
            answer = f"he sells 7 a day, so {index}*7 are gone. #### {index}"
            file.write(json.dumps({"question": question, "answer": answer}) + "\n")


def processor_s(work: Callable[[], object]) -> float:
    """Returns the processor seconds of a call."""
    started = time.process_time()
    work()
    return time.process_time() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=at_least_one, default=20_000)
    parser.add_argument("--repetitions", type=at_least_one, default=3)
    parser.add_argument("--output", type=json_file)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "rows.jsonl"
        write_rows(path, given.rows)
        data = DataConfig(train=str(path), prompt="{question}", solution="{answer}")
        role = RoleConfig(
            model=FreshModel(), tokenizer=CharTokenizer(kind="char", alphabet=ALPHABET)
        )
        folder = prepare_model_folder(role, Path(name) / "model", (), name="actor")
        tokenizer = Tokenizer.load(folder)

        def check() -> None:
            rows = load_rows(data.train, data, split="train", needs=NEEDS, bad=every_bad_row())
            report = check_rows(rows, tokenizer, data, NEEDS, max_length=1024)
            assert report.num_usable == given.rows, report

        def decode() -> None:
            with path.open(encoding="utf-8") as file:
                for line in file:
                    json.loads(line)

        times = [(processor_s(check), processor_s(decode)) for _ in range(given.repetitions)]
    checked, decoded = (statistics.median(column) for column in zip(*times, strict=True))
    result = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "rows": given.rows,
        "check_s": checked,
        "json_loads_s": decoded,
        "ratio": checked / decoded,
        "rows_per_minute_and_core": 60 * given.rows / checked,
    }
    print(f"{result['rows_per_minute_and_core']:,.0f} rows a minute on one core")
    print(f"check / json.loads: {result['ratio']:.1f} (medians of {given.repetitions})")
    if given.output is not None:
        write_result(given.output, json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
