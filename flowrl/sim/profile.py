"""A profile: what the parts of a stage take on one machine, measured, as a JSON file.

`flowrl profile CONFIG` writes one, `flowrl simulate` reads it. It is plain data that can be written
by hand too, for machines one does not have: decode times by batch and context (as vendors and
estimators publish them), a prefill line, and lines for training and scoring.

`version` counts the format. A profile is of models, not of sizes: prompts, group sizes, slots and
numbers of engines may be other than those that it was measured with.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from flowrl.compiler import CompiledStage
from flowrl.config.problems import wrong_type
from flowrl.cost.demand import phase_of
from flowrl.errors import ConfigError
from flowrl.files import decode_json, encode_json, write_result
from flowrl.graph import Op
from flowrl.sim.costs import HostCost, LinearCost
from flowrl.sim.engine import PollRule
from flowrl.sim.episodes import EnvironmentTimes
from flowrl.sim.scorers import ScoreTimes
from flowrl.sim.sharing import Beside
from flowrl.sim.step_time import DecodeTable, LinearPrefill, TableStep
from flowrl.sim.times import EngineTimes, StageTimes
from flowrl.sim.workload import PromptLengths
from flowrl.wording import counted, nearest_file

PROFILE_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineNote:
    """Where and how a profile was measured.

    Attributes:
        load: Processes that wanted a core, on average over a minute: before and after.
        libraries: Versions by distribution.
    """

    devices: tuple[str, ...] = ()
    num_cores: int = 0
    load: tuple[float, float] = (0.0, 0.0)
    libraries: Mapping[str, str] = field(default_factory=dict)

    @property
    def was_busy(self) -> bool:
        """Whether others wanted the cores too; what is measured itself is a process or so more."""
        return bool(self.num_cores) and max(self.load) > self.num_cores + 0.5

    @property
    def doubt(self) -> str | None:
        """What is to be said of times where they are used; None where there is no doubt."""
        if not self.was_busy:
            return None
        return (
            f"measured on a busy machine (load {max(self.load):.3g} on "
            f"{counted(self.num_cores, 'core')}), so perhaps too long"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodePoint:
    """Seconds of a decode step of `batch` rows, each with `context` tokens."""

    batch: int
    context: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineProfile:
    """An engine of one replica.

    Attributes:
        decode: At least one point; see `DecodeTable` for what lies between them.
        prefill: Seconds in which rows enter, by rows and by tokens that are computed.
        longest_share: How far a step depends on its longest row and not on the mean one.
        leave_s: Seconds that a step takes longer because rows end with it.
        poll: Of an engine that a driver polls; None for a server.
        load_s: What it takes to go on with weights that changed in place.
        load_folder_s: Seconds in which an engine of its own process loads weights from a folder.
        apart: Seconds that rows take longer to enter where it is in a process of its own: requests
            and ends that travel, whoever waits for them.
        kv_tokens: Tokens whose keys and values it can hold; None where slots are the limit.
    """

    role: str
    decode: tuple[DecodePoint, ...]
    prefill: LinearPrefill = field(default_factory=LinearPrefill)
    longest_share: float = 0.0
    leave_s: float = 0.0
    poll: PollRule | None = None
    load_s: float = 0.0
    load_folder_s: float = 0.0
    apart: LinearPrefill = field(default_factory=LinearPrefill)
    kv_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OpProfile:
    """An operation on whole batches: `update`, `logprobs`, `values`, `score`, `sync`, `export`.

    `export` writes weights into a folder, for engines in processes of their own.

    Attributes:
        fit: Largest relative error of the line at what was measured.
        beside: What it loses to another thread of its process, and leaves that.
        beside_told: Whether that could be told; else it counts as standing still meanwhile.
    """

    role: str
    op: str
    cost: LinearCost
    fit: float = 0.0
    beside: Beside = field(default_factory=Beside)
    beside_told: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorerProfile:
    """A reward."""

    role: str
    times: ScoreTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentProfile:
    """What episodes are played with."""

    role: str
    times: EnvironmentTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchProfile:
    """A residency switch."""

    role: str
    what: str
    action: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """See the module.

    Attributes:
        name: Of the config, or whatever tells profiles apart.
        models: For each role with a model, what it is: a profile is of these models alone.
        host: What a driver takes whose engines are in its process.
        host_apart: What one takes whose engines are in processes of their own; None where nobody
            has measured it, and it is taken to be the same.
        prompts: Tokens of prompts, evenly picked from all of them.
    """

    version: int
    name: str
    engines: tuple[EngineProfile, ...]
    ops: tuple[OpProfile, ...] = ()
    scorers: tuple[ScorerProfile, ...] = ()
    environments: tuple[EnvironmentProfile, ...] = ()
    switches: tuple[SwitchProfile, ...] = ()
    host: HostCost = field(default_factory=HostCost)
    host_apart: HostCost | None = None
    prompts: tuple[int, ...] = (1,)
    models: Mapping[str, str] = field(default_factory=dict)
    machine: MachineNote = field(default_factory=MachineNote)

    @property
    def doubts(self) -> tuple[str, ...]:
        """What is to be said of its times where they are used."""
        busy = () if self.machine.doubt is None else (self.machine.doubt,)
        untold = [f"{op.role}.{op.op}" for op in self.ops if not op.beside_told]
        if not untold:
            return busy
        return (
            *busy,
            f"what {' and '.join(untold)} loses to a busy driver could not be measured, and counts "
            "as stopped",
        )


class _ProfileFile(BaseModel):
    """Its settings hold for the plain dataclasses inside it too."""

    model_config = ConfigDict(extra="forbid")

    profile: Profile


def save_profile(profile: Profile, path: Path) -> None:
    """Writes a profile."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_result(path, encode_json(asdict(profile)))


def load_profile(path: Path, *, named_by: str | None = None) -> Profile:
    """Reads a profile.

    Args:
        named_by: The key or option that names the file; None where it has its own name.

    Raises:
        ConfigError: the file cannot be read, or is no profile of this version; names the key.
    """
    try:
        raw = decode_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"the profile cannot be read: {error.strerror}",
            where=named_by or str(path),
            found=str(path) if named_by is not None else None,
            hint=nearest_file(path) or "`flowrl profile CONFIG` measures one",
        ) from error
    except ValueError as error:
        raise ConfigError(
            f"not JSON: {error}", where=str(path), hint="`flowrl profile CONFIG` writes one"
        ) from error
    version = raw.get("version") if isinstance(raw, dict) else None
    if version != PROFILE_VERSION:
        raise ConfigError(
            "not a profile of this format",
            where=f"{path}: version",
            found=repr(version),
            expected=str(PROFILE_VERSION),
            hint="measure it again with `flowrl profile CONFIG`",
        )
    try:
        text = json.dumps({"profile": raw})
        return _ProfileFile.model_validate_json(text, strict=True).profile
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"][1:])
        unknown = first["type"] in ("extra_forbidden", "unexpected_keyword_argument")
        raise ConfigError(
            "unknown key" if unknown else wrong_type(first),
            where=f"{path}: {key}",
            found=repr(first["input"])[:60],
            hint="measure it again with `flowrl profile CONFIG`",
        ) from error


def model_notes(stage: CompiledStage) -> dict[str, str]:
    """What each role's model is, in words that are equal where times are comparable."""
    notes: dict[str, str] = {}
    for node in stage.graph.nodes:
        if node.role is None or (phase_of(node) is None and node.op is not Op.SYNC):
            continue
        placement = stage.plan.placement(node.role)
        cost = stage.context.costs.get(node.role)
        kind = stage.plan.pool.device(placement.devices[0]).type
        params = "" if cost is None else f", {cost.shape.parameters.total} parameters"
        notes[node.role] = f"{placement.backend} on {kind}, {placement.dtype}{params}"
    return notes


def profile_times(profile: Profile, stage: CompiledStage, *, source: str) -> StageTimes:
    """The times of a stage, by a profile of its models.

    Args:
        source: Where the profile comes from, for people.

    Raises:
        ConfigError: it was measured with other models.
    """
    for role, note in model_notes(stage).items():
        measured = profile.models.get(role, note)
        if measured != note:
            raise ConfigError(
                f"the profile is of another model for role {role!r}",
                where=source,
                found=measured,
                expected=note,
                hint="measure this one with `flowrl profile CONFIG`",
            )
    return StageTimes(
        source=", ".join((source, *profile.doubts)),
        engines={engine.role: _engine_times(engine) for engine in profile.engines},
        ops={(op.role, op.op): op.cost for op in profile.ops},
        scorers={scorer.role: scorer.times for scorer in profile.scorers},
        environments={one.role: one.times for one in profile.environments},
        beside={(op.role, op.op): op.beside for op in profile.ops},
        switches={(s.role, s.what, s.action): s.seconds for s in profile.switches},
        host=profile.host,
        host_apart=profile.host_apart,
        prompts=PromptLengths(values=profile.prompts),
    )


def _engine_times(engine: EngineProfile) -> EngineTimes:
    step = TableStep(
        decode=DecodeTable((point.batch, point.context, point.seconds) for point in engine.decode),
        prefill=engine.prefill,
        longest_share=engine.longest_share,
        leave=engine.leave_s,
    )
    here, apart = engine.prefill, engine.apart
    longer = LinearPrefill(
        call_s=here.call_s + apart.call_s,
        row_s=here.row_s + apart.row_s,
        token_s=here.token_s + apart.token_s,
    )
    return EngineTimes(
        step=step,
        apart=replace(step, prefill=longer),
        poll=engine.poll,
        load_s=engine.load_s,
        load_folder_s=engine.load_folder_s,
        kv_tokens=engine.kv_tokens,
    )
