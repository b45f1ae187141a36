"""Numbers that other libraries computed, and flowrl's for the same inputs.

A case holds inputs, options and results of one function of one library; `case` describes it,
`runner` compares, and one module per family computes flowrl's answer from the functions of
`flowrl.algo`. Conventions that only one library has are composed here, from public functions.
Run it with `python -m tests.proofs.oracles FILE_OR_FOLDER...`.
"""

from __future__ import annotations

from tests.proofs.oracles.case import Case, NotOffered
from tests.proofs.oracles.runner import Failed, Passed, Tally, Unread, judge, load, run

__all__ = ["Case", "Failed", "NotOffered", "Passed", "Tally", "Unread", "judge", "load", "run"]
