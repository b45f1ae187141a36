"""The rules that tables name, and the reader of tables.

A table names a rule with its arguments, separated by spaces: `same train.steps`,
`choice plan.engine vllm sglang`. Each function here returns such a rule.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import cast

from flowrl.config.check_files import shape_of
from flowrl.config.tree import Value
from flowrl.config.yaml_tree import read_yaml_file
from flowrl.foreign_configs.translate import Outcome, Rule, Settings, Status, Table
from flowrl.synonyms import meanings
from flowrl.wording import listing

__all__ = ["ARGUMENTS", "ESTIMATORS", "load_table", "settings_of"]

_CLIPS = {"clip": ("clip_low", "clip_high"), "clip_low": ("clip_low",), "clip_high": ("clip_high",)}

ARGUMENTS: Mapping[str, Mapping[str, Sequence[str]]] = {
    "grpo": {
        **_CLIPS,
        **{name: (name,) for name in ("aggregation", "std", "drop_zero_variance")},
        "kl_loss": ("kl",),
    },
    "gspo": _CLIPS,
    "cispo": {"clip_low": ("eps_low",), "clip_high": ("eps_high",)},
    "ppo": {
        **{name: (name,) for name in ("clip", "value_clip", "gamma", "lam")},
        "kl_reward": ("kl",),
    },
    "reinforce_pp": {"clip": ("clip",), "kl_reward": ("kl",)},
    "remax": {"kl_reward": ("kl",)},
    "rloo": {},
}
"""By workflow and meaning, the arguments of the workflow; it fixes what it has no argument for."""

ESTIMATORS: Mapping[str, tuple[str, Mapping[str, object]]] = {
    **{name: (name, {}) for name in ("grpo", "gspo", "cispo", "ppo", "rloo", "remax")},
    "group_norm": ("grpo", {}),
    "gae": ("ppo", {}),
    "reinforce_plus_plus": ("reinforce_pp", {}),
    "reinforce_plus_plus_baseline": ("reinforce_pp", {"args.baseline": True}),
}
"""By the frameworks' names of an advantage estimator, the workflow and its arguments."""


def mapped(writes: Mapping[str, object], note: str = "") -> Outcome:
    """Returns the outcome of a key that means the same here."""
    return Outcome(status=Status.MAPPED, writes=writes, note=note)


def changed(writes: Mapping[str, object], note: str) -> Outcome:
    """Returns the outcome of a key whose value has another unit or effect here."""
    return Outcome(status=Status.CHANGED, writes=writes, note=note)


def left_out(note: str) -> Outcome:
    """Returns the outcome of a known key that writes nothing."""
    return Outcome(status=Status.LEFT_OUT, note=note)


UNSET = left_out("not set")


def left(reason: str) -> Rule:
    """The key has no counterpart."""
    return lambda value, settings: left_out(reason)


def same(target: str) -> Rule:
    """The value is the same here."""
    return lambda value, settings: UNSET if value is None else mapped({target: value})


def items(*targets: str) -> Rule:
    """The value is a list, of a value for each target."""
    return lambda value, settings: (
        mapped(dict(zip(targets, value, strict=False))) if isinstance(value, list) else UNSET
    )


def with_(key: str) -> Rule:
    """The rule of another key reads the value."""
    return lambda value, settings: mapped({}, f"read together with {key}")


def only(*values: str) -> Rule:
    """One of these values says what is always so here; others have no counterpart."""

    def rule(value: Value, settings: Settings) -> Outcome:
        if _word(value) in values or (isinstance(value, float) and str(int(value)) in values):
            return mapped({}, "always so here")
        return left_out(f"here always {' or '.join(values)}")

    return rule


def _word(value: Value) -> str:
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def _choices(words: Sequence[str]) -> dict[str, object]:
    pairs = (word.partition("=") for word in words)
    plain: dict[str, object] = {"true": True, "false": False}
    return {name: plain.get(to, to) if equals else name for name, equals, to in pairs}


def choice(target: str, *words: str) -> Rule:
    """The value is one of these words; `a=b` is called b here."""
    return _chosen(lambda settings: [target], words)


def argument(meaning: str, *words: str) -> Rule:
    """The value is an argument of the workflow; words as those of a choice, or any value."""
    return _chosen(
        lambda settings: [f"args.{name}" for name in ARGUMENTS[settings.workflow].get(meaning, ())],
        words,
    )


def _chosen(targets: Callable[[Settings], Sequence[str]], words: Sequence[str]) -> Rule:
    choices = _choices(words)

    def rule(value: Value, settings: Settings) -> Outcome:
        names = targets(settings)
        if not names:
            return left_out(f"the workflow {settings.workflow} has no such argument")
        if choices and _word(value) not in choices:
            return left_out(f"choices of {names[0]} are {listing(map(str, choices.values()))}")
        return mapped(dict.fromkeys(names, choices.get(_word(value), value)))

    return rule


def critic(name: str, *words: str) -> Rule:
    """Another rule, for workflows with a critic."""
    inner = RULES[name](*words)
    return lambda value, settings: (
        inner(value, settings)
        if settings.workflow == "ppo"
        else left_out(f"the workflow {settings.workflow} has no critic")
    )


def penalty(place: str, switch: str = "") -> Rule:
    """The coefficient of a KL penalty in `kl_loss`, `kl_reward` or, by the workflow, `kl`."""

    def rule(value: Value, settings: Settings) -> Outcome:
        if switch and not settings.is_on(switch):
            return left_out(f"without effect unless {switch} is true")
        own = next((name for name in ARGUMENTS[settings.workflow] if name.startswith("kl_")), None)
        if own is None:
            return left_out(f"the workflow {settings.workflow} has no KL penalty")
        if not value or own.startswith(place):
            return mapped({"args.kl": value})
        there, here = (name.removeprefix("kl_") for name in (place, own))
        note = f"a term of the {there} there, of the {here} in the workflow {settings.workflow}"
        return changed({"args.kl": value}, note)

    return rule


def filtered_groups() -> Rule:
    """The switch of dynamic sampling: groups of equal scores are replaced by others."""
    drop = argument("drop_zero_variance")

    def rule(value: Value, settings: Settings) -> Outcome:
        is_on = value not in (None, False)
        outcome = drop(is_on, settings)
        if is_on and outcome.writes:
            return mapped({**outcome.writes, "train.refill": True})
        return outcome

    return rule


def interval(target: str) -> Rule:
    """Steps between two events; none for a number below 1."""
    return lambda value, settings: mapped({target: max(value, 0) if isinstance(value, int) else 0})


def positive(target: str) -> Rule:
    """A number that is unlimited below 1."""
    return lambda value, settings: (
        mapped({target: value})
        if isinstance(value, int) and value > 0
        else left_out(f"unlimited there; {target} has a limit here")
    )


def share(target: str, of: str) -> Rule:
    """A number that is here a share of that of another key."""

    def rule(value: Value, settings: Settings) -> Outcome:
        if not isinstance(value, int | float):
            return UNSET
        return mapped({target: round(value / settings.number(of), 6)})

    return rule


def sampling(name: str, off: str) -> Rule:
    """A sampling option that changes the distribution of tokens, unless it has the value `off`."""

    def rule(value: Value, settings: Settings) -> Outcome:
        is_off = isinstance(value, int | float) and (
            value == float(off) or (name == "top_k" and value <= 0)
        )
        if is_off:
            return mapped({}, "always so here unless train.sampling has the option")
        writes = {f"train.sampling.{name}": value, "train.truncated": "ignore"}
        return changed(
            writes,
            "tokens have another distribution than their logprobs; train.truncated=ignore trains "
            "with that bias, train.truncated=repeat without",
        )

    return rule


def prompts(target: str) -> Rule:
    """A factor of the prompts of a step, of which the table names all."""
    return lambda value, settings: mapped({target: settings.prompts})


def _prompts_of_update(value: float, unit: str, factors: Sequence[str], has: Settings) -> float:
    for factor in factors:
        name, _, above_one = factor.partition(":")
        if not above_one or has.number(above_one) > 1:
            value *= has.number(name)
    return value / has.number(has.table.group) if unit == "samples" else value


def mini_batches(unit: str, *factors: str) -> Rule:
    """The size of an update, in prompts or in samples; here it is their number in a step.

    An update has the value times the values of `factors`; of a factor `A:B` only where B is above
    1.
    """

    def rule(value: Value, settings: Settings) -> Outcome:
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            return UNSET
        step = settings.prompts
        size = _prompts_of_update(value, unit, factors, settings)
        asked = max(1, round(step / size))
        updates = max(n for n in range(1, min(asked, step) + 1) if step % n == 0)
        note = f"{asked} updates do not divide {step} prompts" if updates != asked else ""
        return mapped({"train.mini_batches": updates}, note)

    return rule


def steps(target: str, size: str) -> Rule:
    """A number of steps, of which each has several updates; here of updates."""
    updates = mini_batches("prompts")

    def rule(value: Value, settings: Settings) -> Outcome:
        if not isinstance(value, int) or value <= 0:
            return UNSET
        of_step = updates(settings.values.get(size), settings).writes["train.mini_batches"]
        assert isinstance(of_step, int)
        return mapped({target: value * of_step})

    return rule


def epochs(target: str, steps: str = "") -> Rule:
    """Passes over the data, unless the key `steps` overrides them."""

    def rule(value: Value, settings: Settings) -> Outcome:
        if settings.values.get(steps) is not None:
            return left_out(f"{steps} overrides it")
        return mapped({target: value})

    return rule


def estimator() -> Rule:
    """The advantage estimator, which chooses the workflow."""

    def rule(value: Value, settings: Settings) -> Outcome:
        stages = {"stages": [settings.workflow]}
        if str(value) in ESTIMATORS:
            return mapped(stages | dict(ESTIMATORS[str(value)][1]))
        similar = meanings("fl.advantage", str(value))
        program = f"; a program may call {listing(similar)}" if similar else ""
        return changed(stages, f"no ready-made workflow has this estimator{program}")

    return rule


def model(role: str = "actor") -> Rule:
    """The folder, or the name on the Hub, of a model."""

    def rule(value: Value, settings: Settings) -> Outcome:
        path, target = str(value), f"roles.{role}.model"
        shape = None if Path(path).is_dir() else shape_of(Path(path).name)
        if shape is None:
            return mapped({target: path}, "a Hugging Face folder; flowrl downloads nothing")
        return changed(
            {target: str(shape)},
            f"no such folder here: the shape of this model can be planned. To run, give a folder "
            f"with weights, {target}=FOLDER",
        )

    return rule


def critic_model(actor: str) -> Rule:
    """The model of the critic; `actor` is the key of the actor's."""
    own = model("critic")

    def rule(value: Value, settings: Settings) -> Outcome:
        if settings.workflow != "ppo":
            return left_out(f"the workflow {settings.workflow} has no critic")
        if value == settings.values.get(actor):
            return mapped({"roles.critic.copy_of": "actor"})
        found = own(value, settings)
        writes = {**found.writes, "roles.critic.copy_of": None}
        return Outcome(status=found.status, writes=writes, note=found.note)

    return rule


def files(target: str) -> Rule:
    """A file of rows, or a list of them, for `data.train` or `data.eval`."""

    def rule(value: Value, settings: Settings) -> Outcome:
        if value is None:
            return UNSET
        paths = [str(path) for path in (value if isinstance(value, list) else [value])]
        return mapped(_sources(target, dict(zip(_names(paths), paths, strict=True))))

    return rule


def named_files() -> Rule:
    """Pairs of a name and a file of held-out rows."""

    def rule(value: Value, settings: Settings) -> Outcome:
        words = [str(word) for word in value] if isinstance(value, list) else []
        if not words or len(words) % 2:
            return left_out("no pairs of a name and a file")
        return mapped(_sources("data.eval", dict(zip(words[::2], words[1::2], strict=True))))

    return rule


def _sources(target: str, paths: Mapping[str, str]) -> dict[str, object]:
    (_, first), *others = paths.items()
    if target == "data.train" and others:
        return {target: {"kind": "mixture", "sources": dict(paths)}}
    return {target: first, **{f"eval.sets.{name}.data": path for name, path in others}}


def _names(paths: Sequence[str]) -> list[str]:
    """Returns a name for each file: its own, or its folder's where files are called alike."""
    stems = [Path(path).stem for path in paths]
    names = stems if len(set(stems)) == len(stems) else [Path(path).parent.name for path in paths]
    plain = [re.sub(r"\W+", "_", name) for name in names]
    return [
        f"{name}_{place}" if plain.count(name) > 1 else name for place, name in enumerate(plain)
    ]


def tokenised() -> Rule:
    """Data that the framework has turned into tokens beforehand."""
    return lambda value, settings: changed(
        {"data.train": str(value)},
        "tokens of an earlier step there; name the file of rows they come from, data.train=FILE",
    )


def template(target: str) -> Rule:
    """The name of a field, which is a template here."""
    return lambda value, settings: mapped({target: f"{{{value}}}"})


def rewards(weights: str = "") -> Rule:
    """The name of a reward function, or a list of them, with their weights."""

    def rule(value: Value, settings: Settings) -> Outcome:
        listed = value if isinstance(value, list) else [] if value is None else [value]
        names = [str(name) for name in listed]
        factors = settings.values.get(weights)
        factors = factors if isinstance(factors, list) else [1.0] * len(names)
        kinds = settings.table.rewards
        terms = {
            f"rewards.terms.{_term_name(kinds[name])}": {"kind": kinds[name], "weight": factor}
            for name, factor in zip(names, factors, strict=False)
            if name in kinds
        }
        return _scored(terms, [name for name in names if name not in kinds])

    return rule


def _term_name(kind: str) -> str:
    return "format" if kind.endswith("format") else "accuracy"


def _scored(terms: Mapping[str, Mapping[str, object]], missing: Sequence[str]) -> Outcome:
    """Returns the outcome of reward functions; without a term, the rule `math` scores."""
    notes = []
    if missing:
        notes = [
            f"no term is {listing(missing)}: use a function of your own, {{use: FILE.py:NAME}}"
        ]
    if not terms or any(term["kind"] == "math" for term in terms.values()):
        notes.append("the rule math, flowrl's own, scores here")
    writes = terms or {"rewards.terms.accuracy": {"kind": "math"}}
    return changed(writes, "; ".join(notes)) if notes else mapped(writes)


def reward_by_source(rows: str) -> Rule:
    """The reward function that verl chooses by the data_source of each row."""

    def rule(value: Value, settings: Settings) -> Outcome:
        paths = settings.values.get(rows)
        kinds = {
            next(
                (kind for name, kind in settings.table.rewards.items() if name in str(path)), "math"
            )
            for path in (paths if isinstance(paths, list) else [paths])
        }
        term = {"kind": kinds.pop() if len(kinds) == 1 else "math"}
        return changed(
            {"rewards.terms.accuracy": term},
            "the data_source of a row chooses its function there; one rule scores all rows here, "
            "by the names of the files",
        )

    return rule


def reward_function(name: str, default: str) -> Rule:
    """The file of a reward function; `name` is the key of its name."""

    def rule(value: Value, settings: Settings) -> Outcome:
        if not value:
            return UNSET
        use = f"{value}:{settings.values.get(name) or default}"
        return mapped({"rewards.terms.accuracy": {"use": use}}, "it runs unchanged")

    return rule


def overlong(max_tokens: str, buffer: str, factor: str) -> Rule:
    """The switch of DAPO's penalty on long responses."""

    def rule(value: Value, settings: Settings) -> Outcome:
        if value is not True:
            return left_out("off")
        numbers = {"max_tokens": max_tokens, "buffer": buffer, "factor": factor}
        term = {"kind": "overlong"} | {to: settings.number(key) for to, key in numbers.items()}
        return mapped({"rewards.terms.overlong": term})

    return rule


def trackers() -> Rule:
    """The names of trackers."""

    def rule(value: Value, settings: Settings) -> Outcome:
        names = [str(name) for name in (value if isinstance(value, list) else [value])]
        known = [name for name in names if name in ("tensorboard", "wandb")]
        others = [name for name in names if name not in (*known, "console")]
        note = f"no tracker here: {listing(others)}" if others else ""
        return mapped({"tracking.to": known} if known else {}, note)

    return rule


def tracker(name: str) -> Rule:
    """The switch of a tracker."""
    return lambda value, settings: (
        mapped({"tracking.to": [name]}) if value is True else left_out("off")
    )


def project(switch: str) -> Rule:
    """The project of Weights & Biases; `switch` is the key that turns it on."""
    return lambda value, settings: (
        mapped({"tracking.options.wandb.project": value})
        if value
        and ("wandb" in str(settings.values.get(switch)) or settings.values[switch] is True)
        else left_out("runs have no project without wandb")
    )


RULES: Mapping[str, Callable[..., Rule]] = {
    function.__name__.rstrip("_"): function
    for function in (
        *(same, items, with_, only, choice, argument, critic, penalty, filtered_groups, interval),
        *(positive, share, sampling, prompts, mini_batches, steps, epochs, estimator, model),
        *(critic_model, files, named_files, tokenised, template, rewards, reward_by_source),
        *(reward_function, overlong, trackers, tracker, project),
    )
}


def load_table(name: str) -> Table:
    """Returns the table of a framework."""
    raw = read_yaml_file(Path(__file__).parent / "tables" / f"{name}.yaml").plain
    return Table.model_validate(raw)


def settings_of(table: Table, values: Mapping[str, Value]) -> Settings:
    """Returns the settings of a file, with the workflow that its estimator chooses."""
    merged = {**cast("Mapping[str, Value]", table.defaults), **values}
    named = str(merged.get(table.estimator, "grpo"))
    rules = {key: RULES[name](*words) for key, (name, *words) in _split(table.rules).items()}
    for reason, keys in _split(table.left_out).items():
        rules |= dict.fromkeys(keys, left(reason))
    workflow, _ = ESTIMATORS.get(named, ("grpo", {}))
    return Settings(values=merged, table=table, rules=rules, workflow=workflow)


def _split(texts: Mapping[str, str]) -> dict[str, list[str]]:
    return {key: text.split() for key, text in texts.items()}
