"""Keys under the names of other trainers are told what they are called here."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pydantic import BaseModel

from flowrl.config.load import load_config
from flowrl.config.schema import RunConfig
from flowrl.errors import ConfigError
from flowrl.synonyms import SYNONYMS, meanings

BASE = """\
stages: [grpo]
data:
  train: {kind: arithmetic, split: train}
roles:
  actor:
    model: {hidden_size: 32, max_length: 32}
    tokenizer: {kind: char, alphabet: "0123456789+="}
rewards:
  terms: [{kind: exact_match}]
"""


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        (
            "train.batch_size=64",
            "it is called train.prompts_per_step (prompts; each has train.group_size samples)",
        ),
        ("optimizer.lr=1e-3", "it is called train.optimizer.learning_rate"),
        ("lr=1e-3", "it is called train.optimizer.learning_rate"),
        ("train.optimizer.lr=1e-3", "it is called train.optimizer.learning_rate"),
        ("roles.actor.optimizer.lr=1e-3", "it is called roles.actor.optimizer.learning_rate"),
        ("train.num-generations=8", "it is called train.group_size"),
        ("train.max_new_tokens=8", "it is called train.sampling.max_tokens"),
        ("algorithm.clip_range=0.2", "it is called algorithm.clip_low and algorithm.clip_high"),
        ("trainer.total_epochs=3", "it is called train.epochs"),
        ("kl_coef=0.1", "it is called args.kl (an argument of the workflow)"),
        # A key that is right but stands in the wrong section is told where it belongs, as ever.
        ("group_size=8", "did you mean train.group_size"),
    ],
)
def test_a_key_of_another_trainer_is_told_its_name(
    override: str, hint: str, tmp_path: Path
) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(BASE)
    with pytest.raises(ConfigError, match="unknown key") as caught:
        load_config(config, [override])
    assert str(caught.value.hint).startswith(hint)


def keys_of(model: type[BaseModel], prefix: str = "") -> set[str]:
    """All dotted keys of a config, sections too."""
    found: set[str] = set()
    for name, info in model.model_fields.items():
        found.add(prefix + name)
        inner = info.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            found |= keys_of(inner, f"{prefix}{name}.")
    return found


def test_every_name_leads_to_a_key_that_there_is() -> None:
    known = keys_of(RunConfig) | {"roles.actor.model"}
    for meant, names in SYNONYMS["key"].items():
        for key in meant.partition(" (")[0].split(" and "):
            assert re.fullmatch(r"args\.\w+", key) or key in known, key
        for name in names.split():
            assert name.isalnum()
            assert name.islower()
            assert meanings("key", name) == [meant]
