"""`python -m tests.proofs.oracles FILE_OR_FOLDER...`: recorded numbers against flowrl's.

Prints failures and refusals by case, a line per family, and last
`N passed, M failed, K not offered`. A file or a case that cannot be read fails. Exit status: 0
exactly when M is 0; 2 where a path leads to no file, and nothing is run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from flowrl.errors import FlowError
from tests.proofs.oracles.runner import load, run

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.proofs.oracles",
        description="Compares flowrl with numbers recorded from other libraries.",
    )
    parser.add_argument("paths", nargs="+", type=Path, metavar="FILE_OR_FOLDER")
    parser.add_argument("--quiet", action="store_true", help="print no cases, only the counts")
    options = parser.parse_args(arguments)
    try:
        tallies = run(load(options.paths))
    except FlowError as error:
        print(error, file=sys.stderr)
        return 2
    if not options.quiet:
        for family, tally in tallies.items():
            for name, reason in tally.failed:
                print(f"failed: {family}: {name}: {reason}")
            for name, reason in tally.not_offered:
                print(f"not offered: {family}: {name}: {reason}")
    for family, tally in tallies.items():
        print(f"{family}: {tally}")
    passed = sum(tally.passed for tally in tallies.values())
    failed = sum(len(tally.failed) for tally in tallies.values())
    refused = sum(len(tally.not_offered) for tally in tallies.values())
    print(f"{passed} passed, {failed} failed, {refused} not offered")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
