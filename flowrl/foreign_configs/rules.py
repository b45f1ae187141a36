"""The rules that tables name, and the reader of tables.

A table names a rule with its arguments, separated by spaces: `same train.steps`,
`choice plan.engine vllm sglang`. A rule is a function of the value, the settings, and these.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

from flowrl.config.check_files import shape_of
from flowrl.config.tree import Value
from flowrl.config.yaml_tree import read_yaml_file
from flowrl.foreign_configs.translate import Outcome, Rule, Settings, Status, Table
from flowrl.synonyms import meanings
from flowrl.wording import listing

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


def same(value: Value, settings: Settings, *targets: str) -> Outcome:
    """The value, or the items of a list for several targets, are the same here."""
    values = value if isinstance(value, list) and len(targets) > 1 else [value] * len(targets)
    return UNSET if value is None else mapped(dict(zip(targets, values, strict=False)))


def with_(value: Value, settings: Settings, key: str) -> Outcome:
    """The rule of another key reads the value."""
    return mapped({}, f"read together with {key}")


def only(value: Value, settings: Settings, *words: str) -> Outcome:
    """One of these values says what is always so here; others have no counterpart."""
    if _word(value) in words:
        return mapped({}, "always so here")
    return left_out(f"only {' or '.join(words)} has a counterpart")


def _word(value: Value) -> str:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def choice(value: Value, settings: Settings, target: str, *words: str) -> Outcome:
    """The value is one of these words; `a=b` is called b here. Without words it is any value."""
    return _chosen(value, [target], words)


def argument(value: Value, settings: Settings, meaning: str, *words: str) -> Outcome:
    """The value is an argument of the workflow, with words as those of a choice."""
    names = ARGUMENTS[settings.workflow].get(meaning, ())
    if not names:
        return left_out(f"the workflow {settings.workflow} has no such argument")
    return _chosen(value, [f"args.{name}" for name in names], words)


def _chosen(value: Value, targets: Sequence[str], words: Sequence[str]) -> Outcome:
    pairs = [word.partition("=") for word in words]
    choices = {name: to if equals else name for name, equals, to in pairs}
    if choices and _word(value) not in choices:
        return left_out(f"choices of {targets[0]} are {listing(choices.values())}")
    return mapped(dict.fromkeys(targets, choices.get(_word(value), value)))


def critic(value: Value, settings: Settings, name: str, *words: str) -> Outcome:
    """Another rule, for workflows with a critic."""
    if settings.workflow == "ppo":
        return RULES[name](value, settings, *words)
    return left_out(f"the workflow {settings.workflow} has no critic")


def penalty(value: Value, settings: Settings, place: str, switch: str = "") -> Outcome:
    """The coefficient of a KL penalty in `kl_loss`, `kl_reward` or, by the workflow, `kl`."""
    if switch and not settings.is_on(switch):
        return left_out(f"without effect unless {switch} is true")
    own = _kl_place(settings)
    if own is None:
        return left_out(f"the workflow {settings.workflow} has no KL penalty")
    if not value or own.startswith(place):
        return mapped({"args.kl": value})
    there, here = (name.removeprefix("kl_") for name in (place, own))
    note = f"a term of the {there} there, of the {here} in the workflow {settings.workflow}"
    return changed({"args.kl": value}, note)


def kl_form(value: Value, settings: Settings) -> Outcome:
    """The estimator of the KL penalty, which is fixed by the workflow."""
    own = _kl_place(settings)
    names = {"kl_loss": ("low_var_kl", "k3"), "kl_reward": ("kl", "k1")}.get(own or "", ())
    if value in names:
        return mapped({}, "always so here")
    return left_out(
        f"the workflow {settings.workflow} has {names[-1] if names else 'no KL penalty'}"
    )


def _kl_place(settings: Settings) -> str | None:
    """Returns `kl_loss` or `kl_reward`; None for a workflow without a penalty."""
    return next((name for name in ARGUMENTS[settings.workflow] if name.startswith("kl_")), None)


def filtered_groups(value: Value, settings: Settings) -> Outcome:
    """The switch of dynamic sampling: groups of equal scores are replaced by others."""
    is_on = value not in (None, False)
    outcome = argument(is_on, settings, "drop_zero_variance")
    return mapped({**outcome.writes, "train.refill": True}) if is_on else outcome


def interval(value: Value, settings: Settings, target: str) -> Outcome:
    """Steps between two events; none for a number below 1."""
    return mapped({target: max(value, 0) if isinstance(value, int) else 0})


def positive(value: Value, settings: Settings, target: str) -> Outcome:
    """A number that is unlimited below 1."""
    if isinstance(value, int) and value > 0:
        return mapped({target: value})
    return left_out(f"unlimited there; {target} has a limit here")


def share(value: Value, settings: Settings, target: str, of: str) -> Outcome:
    """A number that is here a share of that of another key."""
    if not isinstance(value, int | float):
        return UNSET
    return mapped({target: round(value / settings.number(of), 6)})


def sampling(value: Value, settings: Settings, name: str, off: str) -> Outcome:
    """A sampling option that changes the distribution of tokens, unless it has the value `off`."""
    if isinstance(value, int | float) and (value == float(off) or (name == "top_k" and value <= 0)):
        return mapped({}, "always so here, unless train.sampling has the option")
    return changed(
        {f"train.sampling.{name}": value, "train.truncated": "ignore"},
        "tokens have another distribution than their logprobs; train.truncated=ignore trains with "
        "that bias, train.truncated=repeat without",
    )


def prompts(value: Value, settings: Settings, target: str) -> Outcome:
    """A factor of the prompts of a step, of which the table names all."""
    return mapped({target: settings.prompts})


def mini_batches(value: Value, settings: Settings, unit: str, *factors: str) -> Outcome:
    """The size of an update, in prompts or in samples; here it is their number in a step.

    An update has the value times the values of `factors`; of a factor `A:B` only where B is above
    1.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        return UNSET
    size: float = value
    for factor in factors:
        name, _, above_one = factor.partition(":")
        if not above_one or settings.number(above_one) > 1:
            size *= settings.number(name)
    if unit == "samples":
        size /= settings.number(settings.table.group)
    step = settings.prompts
    asked = max(1, round(step / size))
    updates = max(n for n in range(1, min(asked, step) + 1) if step % n == 0)
    note = f"{asked} updates do not divide {step} prompts" if updates != asked else ""
    return mapped({"train.mini_batches": updates}, note)


def steps(value: Value, settings: Settings, target: str, size: str) -> Outcome:
    """A number of steps, here of updates; `size` is the key of the prompts of an update."""
    if not isinstance(value, int) or value <= 0:
        return UNSET
    return mapped({target: value * max(1, round(settings.prompts / settings.number(size)))})


def epochs(value: Value, settings: Settings, target: str, steps: str = "") -> Outcome:
    """Passes over the data, unless the key `steps` overrides them."""
    if settings.values.get(steps) is not None:
        return left_out(f"{steps} overrides it")
    return mapped({target: value})


def estimator(value: Value, settings: Settings) -> Outcome:
    """The advantage estimator, which chooses the workflow."""
    stages = {"stages": [settings.workflow]}
    if str(value) in ESTIMATORS:
        return mapped(stages | dict(ESTIMATORS[str(value)][1]))
    similar = meanings("fl.advantage", str(value))
    program = f"; a program may call {listing(similar)}" if similar else ""
    return changed(stages, f"no ready-made workflow has this estimator{program}")


def model(value: Value, settings: Settings, role: str = "actor") -> Outcome:
    """The folder, or the name on the Hub, of a model."""
    path, target = str(value), f"roles.{role}.model"
    shape = None if Path(path).is_dir() else shape_of(Path(path).name)
    if shape is None:
        return mapped({target: path}, "a Hugging Face folder; flowrl downloads nothing")
    return changed(
        {target: str(shape)},
        f"no such folder here: the shape of this model can be planned. To run, give a folder with "
        f"weights, {target}=FOLDER",
    )


def critic_model(value: Value, settings: Settings, actor: str) -> Outcome:
    """The model of the critic; `actor` is the key of the actor's."""
    if value == settings.values.get(actor):
        return mapped({"roles.critic.copy_of": "actor"})
    found = model(value, settings, "critic")
    return replace(found, writes={**found.writes, "roles.critic.copy_of": None})


def files(value: Value, settings: Settings, target: str) -> Outcome:
    """A file of rows, or a list of them, for `data.train` or `data.eval`."""
    if value is None:
        return UNSET
    paths = [str(path) for path in (value if isinstance(value, list) else [value])]
    return _sources(target, dict(zip(_names(paths), paths, strict=True)))


def named_files(value: Value, settings: Settings) -> Outcome:
    """Pairs of a name and a file of held-out rows."""
    words = [str(word) for word in value] if isinstance(value, list) else []
    if not words or len(words) % 2:
        return left_out("no pairs of a name and a file")
    return _sources("data.eval", dict(zip(words[::2], words[1::2], strict=True)))


def _sources(target: str, paths: Mapping[str, str]) -> Outcome:
    (_, first), *others = paths.items()
    if target == "data.train" and others:
        return mapped({target: {"kind": "mixture", "sources": dict(paths)}})
    return mapped({target: first, **{f"eval.sets.{name}.data": path for name, path in others}})


def _names(paths: Sequence[str]) -> list[str]:
    """Returns a name for each file: its own, or its folder's where files are called alike."""
    stems = [Path(path).stem for path in paths]
    names = stems if len(set(stems)) == len(stems) else [Path(path).parent.name for path in paths]
    plain = [re.sub(r"\W+", "_", name) for name in names]
    return [
        f"{name}_{place}" if plain.count(name) > 1 else name for place, name in enumerate(plain)
    ]


def tokenised(value: Value, settings: Settings) -> Outcome:
    """Data that the framework has turned into tokens beforehand."""
    return changed(
        {"data.train": str(value)},
        "tokens of an earlier step there; name the file of rows they come from, data.train=FILE",
    )


def template(value: Value, settings: Settings, target: str) -> Outcome:
    """The name of a field, which is a template here."""
    return mapped({target: f"{{{value}}}"})


def rewards(value: Value, settings: Settings, weights: str = "") -> Outcome:
    """The name of a reward function, or a list of them, with their weights."""
    listed = value if isinstance(value, list) else [] if value is None else [value]
    factors = settings.values.get(weights)
    factors = factors if isinstance(factors, list) else [1.0] * len(listed)
    kinds = settings.table.rewards
    terms: dict[str, object] = {}
    for name, factor in zip(map(str, listed), factors, strict=False):
        if name in kinds:
            own = "format" if kinds[name].endswith("format") else "accuracy"
            terms[f"rewards.terms.{own}"] = {"kind": kinds[name], "weight": factor}
    notes = []
    if missing := [str(name) for name in listed if str(name) not in kinds]:
        notes = [
            f"no term is {listing(missing)}: use a function of your own, {{use: FILE.py:NAME}}"
        ]
    if not terms or "math" in [kinds.get(str(name)) for name in listed]:
        notes.append("the rule math, flowrl's own, scores here")
    writes = terms or {"rewards.terms.accuracy": {"kind": "math"}}
    return changed(writes, "; ".join(notes)) if notes else mapped(writes)


def reward_by_source(value: Value, settings: Settings, rows: str) -> Outcome:
    """The reward function that verl chooses by the data_source of each row."""
    paths = settings.values.get(rows)
    known = settings.table.rewards
    kinds = {
        next((kind for name, kind in known.items() if name in str(path)), "math")
        for path in (paths if isinstance(paths, list) else [paths])
    }
    return changed(
        {"rewards.terms.accuracy": {"kind": kinds.pop() if len(kinds) == 1 else "math"}},
        "the data_source of a row chooses its function there; one rule scores all rows here, by "
        "the names of the files",
    )


def reward_function(value: Value, settings: Settings, name: str, default: str) -> Outcome:
    """The file of a reward function; `name` is the key of its name."""
    if not value:
        return UNSET
    use = f"{value}:{settings.values.get(name) or default}"
    return mapped({"rewards.terms.accuracy": {"use": use}}, "it runs unchanged")


def overlong(value: Value, settings: Settings, max_tokens: str, *keys: str) -> Outcome:
    """The switch of DAPO's penalty on long responses."""
    if value is not True:
        return left_out("off")
    names = ("max_tokens", "buffer", "factor")
    numbers = zip(names, map(settings.number, (max_tokens, *keys)), strict=True)
    return mapped({"rewards.terms.overlong": {"kind": "overlong", **dict(numbers)}})


def trackers(value: Value, settings: Settings) -> Outcome:
    """The names of trackers."""
    names = [str(name) for name in (value if isinstance(value, list) else [value])]
    known = [name for name in names if name in ("tensorboard", "wandb")]
    others = [name for name in names if name not in (*known, "console")]
    note = f"no tracker here: {listing(others)}" if others else ""
    return mapped({"tracking.to": known} if known else {}, note)


def tracker(value: Value, settings: Settings, name: str) -> Outcome:
    """The switch of a tracker."""
    return mapped({"tracking.to": [name]}) if value is True else left_out("off")


def project(value: Value, settings: Settings, switch: str) -> Outcome:
    """The project of Weights & Biases; `switch` is the key that turns it on."""
    if value and ("wandb" in str(settings.values.get(switch)) or settings.is_on(switch)):
        return mapped({"tracking.options.wandb.project": value})
    return left_out("runs have no project without wandb")


RULES: Mapping[str, Callable[..., Outcome]] = {
    rule.__name__.rstrip("_"): rule
    for rule in (
        *(same, with_, only, choice, argument, critic, penalty, kl_form, filtered_groups),
        *(interval, positive, share, sampling, prompts, mini_batches, steps, epochs, estimator),
        *(model, critic_model, files, named_files, tokenised, template, rewards),
        *(reward_by_source, reward_function, overlong, trackers, tracker, project),
    )
}


def load_table(name: str) -> Table:
    """Returns the table of a framework."""
    raw = read_yaml_file(Path(__file__).parent / "tables" / f"{name}.yaml").plain
    return Table.model_validate(raw)


def settings_of(table: Table, values: Mapping[str, Value]) -> Settings:
    """Returns the settings of a file, with the workflow that its estimator chooses."""
    merged = {**cast("Mapping[str, Value]", table.defaults), **values}
    rules = {key: _rule(*text.split()) for key, text in table.rules.items()}
    for reason, keys in table.left_out.items():
        rules |= dict.fromkeys(keys.split(), _without_counterpart(reason))
    workflow, _ = ESTIMATORS.get(str(merged.get(table.estimator, "grpo")), ("grpo", {}))
    return Settings(values=merged, table=table, rules=rules, workflow=workflow)


def _rule(name: str, *words: str) -> Rule:
    return lambda value, settings: RULES[name](value, settings, *words)


def _without_counterpart(reason: str) -> Rule:
    return lambda value, settings: left_out(reason)
