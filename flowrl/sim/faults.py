"""Faults of a simulated run: by rate, drawn from the seed, or by script. A YAML or JSON file.

    engines: {mean_time_between_s: 600, repair_s: 30}
    samples: {fail_share: 0.001}
    rewards: {fail_share: 0.001, slow_share: 0.01, slow_s: 5}
    script:
      - {at_s: 12.5, engine: 3, kind: lost, for_s: 20}
      - {at_s: 30, engine: 0, kind: slow, factor: 4, for_s: 10}

Engines are counted from 0. A lost engine comes back, empty, after `repair_s` or `for_s` seconds; a
script without `for_s` loses it for good. Times between the losses of an engine are exponential.
Whether a sample or its reward fails follows from the seed and the sample's id alone.
"""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from flowrl.config.problems import validated
from flowrl.config.section import Float, Int, Section
from flowrl.config.tree import Places
from flowrl.config.yaml_tree import FileKind, read_yaml_file
from flowrl.errors import ConfigError
from flowrl.ids import SampleId

FAULTS = FileKind(
    noun="file of faults",
    begins="begin with `engines:`, `samples:`, `rewards:` or `script:`, or leave --faults out",
    hint="give a file of faults (docs/simulation.md shows one), or leave --faults out",
    may_be_empty=True,
)

_Share = Annotated[Float, Field(ge=0, le=1)]


class EngineFaults(Section):
    """Engines that die at random.

    Attributes:
        mean_time_between_s: Of one engine, from its start or its repair to its loss; 0 is never.
        repair_s: Until it joins again.
    """

    mean_time_between_s: Float = Field(default=0.0, ge=0)
    repair_s: Float = Field(default=30.0, ge=0)


class SampleFaults(Section):
    """Attempts that break.

    Attributes:
        fail_share: Of attempts that end, those that end in an error.
    """

    fail_share: _Share = 0.0


class RewardFaults(Section):
    """Rewards that fail or take long.

    Attributes:
        fail_share: Of samples, those whose reward fails.
        slow_share: Of samples, those whose reward takes `slow_s` seconds longer.
    """

    fail_share: _Share = 0.0
    slow_share: _Share = 0.0
    slow_s: Float = Field(default=0.0, ge=0)


class ScriptedFault(Section):
    """One fault at a time of one's own.

    Attributes:
        kind: `lost`: gone with all it holds. `slow`: takes `factor` times as long. `silent`: does
            and says nothing; what becomes of it depends on the scheduler's patience.
        for_s: Seconds that it lasts; None is for good.
    """

    at_s: Float = Field(ge=0)
    engine: Int = Field(ge=0)
    kind: Literal["lost", "slow", "silent"]
    for_s: Annotated[Float, Field(ge=0)] | None = None
    factor: Float = Field(default=2.0, gt=0)


class Faults(Section):
    """All of them; the module has an example."""

    engines: EngineFaults = EngineFaults()
    samples: SampleFaults = SampleFaults()
    rewards: RewardFaults = RewardFaults()
    script: tuple[ScriptedFault, ...] = ()


def read_faults(path: Path, *, num_engines: int) -> Faults:
    """The faults of a file.

    Raises:
        ConfigError: it cannot be read, has an unknown key or a wrong value, or names an engine
            that is not there.
    """
    tree = read_yaml_file(path, FAULTS)
    where = Places.of(tree, path)
    faults = validated(Faults, tree.plain, where)
    for number, fault in enumerate(faults.script):
        if fault.engine >= num_engines:
            raise ConfigError(
                "no such engine",
                where=where(f"script.{number}.engine"),
                found=str(fault.engine),
                expected=f"0 to {num_engines - 1}",
                hint="engines are counted from 0; --engines N takes more of them",
            )
    return faults


def chance(seed: int, what: str, sample: SampleId, attempt: int = 0) -> float:
    """A number from 0 to 1 that depends on these alone."""
    text = f"{seed}\x1f{what}\x1f{sample}\x1f{attempt}".encode()
    return int.from_bytes(blake2b(text, digest_size=7).digest(), "big") / 2**56
