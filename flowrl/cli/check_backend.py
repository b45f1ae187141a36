"""`flowrl backends check`: the conformance suite of plug-ins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from flowrl.config.tree import Origin
from flowrl.config.yaml_tree import read_yaml_value
from flowrl.errors import ConfigError
from flowrl.files import encode_json

if TYPE_CHECKING:
    from flowrl.testing.checked_engine import CheckSettings


def read_options(texts: Sequence[str]) -> dict[str, object]:
    """Returns the values of `KEY=VALUE` texts.

    Raises:
        ConfigError: One is none, or its value is not readable.
    """
    options: dict[str, object] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key.isidentifier():
            raise ConfigError(
                f"{text!r} sets no option",
                where="--option",
                expected="KEY=VALUE, such as port=80",
                hint="write the option of the plug-in, an equals sign and its value",
            )
        options[key] = read_yaml_value(value, Origin(override=text)).plain
    return options


def run(name: str, settings: CheckSettings, *, as_json: bool) -> int:
    """Prints the result of each check as it is there; returns 1 if one failed, else 0."""
    model = settings.get("model")
    if model is not None and not (model / "config.json").is_file():
        raise ConfigError(
            "no model folder",
            where="--model",
            found=f"{model} without a config.json",
            expected="a Hugging Face folder with config.json, weights and tokenizer files",
            hint="name such a folder, or leave --model out for a small random model",
        )
    from flowrl.testing.backend_check import run_checks

    results = []
    for result in run_checks(name, **settings):
        results.append(result)
        if not as_json:
            print(f"{result.status:<12}  {result.name}: {result.found}", flush=True)
            if result.meaning:
                print(f"{'':<12}  in a run: {result.meaning}", flush=True)
    failed = sum(result.status == "failed" for result in results)
    if as_json:
        print(encode_json({"backend": name, "checks": [asdict(one) for one in results]}), end="")
    else:
        passed = sum(result.status == "passed" for result in results)
        print(f"{passed} passed, {failed} failed, {len(results) - passed - failed} not declared")
    return int(failed > 0)
