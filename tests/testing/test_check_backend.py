"""The checks of plug-ins: sound ones pass, and faults of real engines are found."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from flowrl.backend.registry import find
from flowrl.cli import check_backend as command
from flowrl.errors import BackendError, ConfigError
from flowrl.specs import AdamW
from flowrl.testing import check_backend, processes
from flowrl.testing.backend_check import run_checks
from flowrl.testing.checked_engine import CheckedEngine, CheckFailed, Models
from flowrl.testing.engine_checks import ENGINE_CHECKS, FIRST, NotDeclared, check_tied
from flowrl.testing.processes import check_processes
from flowrl.testing.trainer_checks import TRAINER_CHECKS
from flowrl_backends.torch.trainer import TorchTrainer
from tests.testing.plain_engine import PlainPlugin, ServedEngine


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models.make(tmp_path_factory.mktemp("models"), timeout_s=60.0)


def run_check(name: str, fault: str, models: Models, **declared: Any) -> str:
    plugin = PlainPlugin(fault)
    plugin.capabilities = replace(plugin.capabilities, **declared)
    if name == "tied":
        return check_tied(plugin, models)
    engine = CheckedEngine(plugin, models)
    engine.load(FIRST, models.first)
    return ENGINE_CHECKS[name](engine)


@pytest.mark.parametrize(
    ("fault", "check", "found"),
    [
        ("logprobs at 1", "logprobs", "differ by up to"),
        ("logprobs after top-k", "truncated sampling", "differ by up to"),
        ("seeds of the batch", "same tokens in any batch", "have other tokens alone"),
        ("unversioned cache", "publication in flight", "differ by up to"),
        ("version before weights", "publication", "differ by up to"),
        ("tied embeddings", "tied", "differ by up to"),
        ("drops tokens", "abort", "ended with abort and 0 tokens"),
        ("no stop token", "stop tokens", "ended with stop, its stop tokens at positions"),
        ("takes unknown tokens", "bad requests", "outside the vocabulary was accepted"),
        ("wakes with its first weights", "sleep and wake", "differ by up to"),
        ("ends twice", "greedy", "which no running request has"),
        ("reports no weights", "greedy", "were not reported by `poll`"),
    ],
)
def test_a_fault_that_real_engines_had_is_found(models: Models, fault: str, check: str, found: str):
    run_check(check, "", models)
    with pytest.raises(CheckFailed, match=found) as caught:
        run_check(check, fault, models)
    assert caught.value.meaning


@pytest.mark.parametrize(
    ("fault", "found"),
    [
        ("hides its death", r"raised nothing within 0\.1 s after the processes were killed"),
        ("blames the user", "the engine raises BackendError: poll: the server"),
        ("leaves its process", r"1 of 1 processes run 0 s after close\(\)"),
    ],
)
def test_a_run_learns_of_the_death_of_an_engines_processes(
    models: Models, monkeypatch: pytest.MonkeyPatch, fault: str, found: str
):
    short = replace(models, timeout_s=0.1)
    sound = check_processes(PlainPlugin("", ServedEngine), short, None)
    assert sound == "its 1 processes end with close(), and their death is noticed"
    monkeypatch.setattr(processes, "_GONE_S", 0.0)
    with pytest.raises(CheckFailed, match=found) as caught:
        check_processes(PlainPlugin(fault, ServedEngine), short, None)
    assert caught.value.meaning
    for process in ServedEngine.started:
        process.kill()
        process.wait()


class OtherSampling:
    """The torch plug-in, whose engines sample with other options than they are asked for."""

    def __init__(self, **options: Any) -> None:
        self.name, self.capabilities = "faulty", find("torch").capabilities
        self._options = options

    def open_generate(self, context: Any, shared: Any) -> Any:
        engine = find("torch").open_generate(context, shared)
        submit = engine.submit
        engine.submit = lambda requests: submit(
            [replace(r, sampling=replace(r.sampling, **self._options)) for r in requests]
        )
        return engine


@pytest.mark.parametrize(
    ("check", "options", "found"),
    [
        (
            "logprobs of the sampler",
            {"logprobs": "model"},
            "from those over the tokens that it kept",
        ),
        ("stop texts", {"stop": ""}, r"and 24 tokens, where '\w\w' is complete with token \d+"),
    ],
)
def test_what_few_engines_declare_is_checked_where_it_is_declared(
    models: Models, check: str, options: Any, found: str
):
    with pytest.raises(CheckFailed, match=found):
        ENGINE_CHECKS[check](CheckedEngine(OtherSampling(**options), models))
    with pytest.raises(NotDeclared):
        run_check(check, "", models)


def test_an_engine_that_ends_nothing_is_told_after_the_time_limit(models: Models):
    with pytest.raises(CheckFailed, match=r"24 of 24 requests had no end after 0\.1 s"):
        run_check("logprobs", "ends nothing", replace(models, timeout_s=0.1))


def wrong_rate(trainer: TorchTrainer) -> None:
    begin = trainer.begin
    trainer.begin = lambda adamw, n: begin(_twice(adamw), n)  # type: ignore[method-assign]


def _twice(adamw: AdamW) -> AdamW:
    return replace(adamw, learning_rate=2 * adamw.learning_rate)


def wrong_temperature(trainer: TorchTrainer) -> None:
    logprobs = trainer.logprobs
    trainer.logprobs = lambda batch, temperature: logprobs(batch, 1.0)  # type: ignore


def old_export(trainer: TorchTrainer) -> None:
    weights = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    export = trainer.export

    def stale(folder: Path) -> None:
        new = {name: value.clone() for name, value in trainer.model.state_dict().items()}
        trainer.model.load_state_dict(weights)
        export(folder)
        trainer.model.load_state_dict(new)

    trainer.export = stale  # type: ignore[method-assign]


def unshared(trainer: TorchTrainer) -> None:
    """Updates a copy of the parameters that an engine reads."""
    update, seen = trainer.update, trainer.model

    def elsewhere(batch: Any, spec: Any) -> Any:
        trainer.model = deepcopy(seen)
        trainer.begin(AdamW(learning_rate=1e-3), 8)
        return update(batch, spec)

    trainer.update = elsewhere  # type: ignore[method-assign]


def forgotten_moments(trainer: TorchTrainer) -> None:
    restore = trainer.restore

    def without(folder: Path) -> None:
        restore(folder)
        trainer.reset_optimizer()

    trainer.restore = without  # type: ignore[method-assign]


def size_of_micro_batches(trainer: TorchTrainer) -> None:
    update = trainer.update

    def scaled(batch: Any, spec: Any) -> Any:
        return [
            replace(step, grad_norm=step.grad_norm / spec.micro_batch)
            for step in update(batch, spec)
        ]

    trainer.update = scaled  # type: ignore[method-assign]


class FaultyTrainers:
    """The torch plug-in, whose trainers are changed."""

    def __init__(self, change: Any) -> None:
        self._torch, self._change = find("torch"), change
        self.name, self.capabilities = "faulty", self._torch.capabilities
        self.check, self.open_generate = self._torch.check, self._torch.open_generate

    def open_train(self, context: Any) -> Any:
        trainer = self._torch.open_train(context)
        self._change(trainer)
        return trainer


@pytest.mark.parametrize(
    ("change", "check", "found"),
    [
        (wrong_temperature, "trainer logprobs", "differ by up to"),
        (wrong_rate, "gradients", "weights after one AdamW update differ"),
        (size_of_micro_batches, "micro-batches", "with micro-batches of 1, 3 and 8"),
        (forgotten_moments, "save and restore", "weights differ after save, restore"),
        (old_export, "gradients", "weights after one AdamW update differ"),
        (old_export, "export", "logprobs differ by up to"),
        (unshared, "weights in place", "and are those of the weights before the update"),
    ],
)
def test_a_fault_of_a_trainer_is_found(models: Models, change: Any, check: str, found: str):
    with pytest.raises(CheckFailed, match=found) as caught:
        TRAINER_CHECKS[check](FaultyTrainers(change), models)
    assert caught.value.meaning


def test_the_torch_plugin_passes_but_for_what_is_slow(monkeypatch: pytest.MonkeyPatch):
    keep(monkeypatch, *ENGINE_CHECKS, *set(TRAINER_CHECKS) - {"large vocabulary"})
    results = list(run_checks("torch"))
    assert [one for one in results if one.status != "passed"] == []
    assert len(results) == len(ENGINE_CHECKS) + len(TRAINER_CHECKS) + 1


@pytest.mark.slow
def test_logprobs_over_a_large_vocabulary_are_made_in_chunks(
    models: Models, monkeypatch: pytest.MonkeyPatch
):
    check = TRAINER_CHECKS["large vocabulary"]
    check(find("torch"), models)
    monkeypatch.setattr("flowrl_backends.torch.predict._FORWARD_TOKENS", 1 << 20)
    with pytest.raises(CheckFailed, match="all logits at once"):
        check(find("torch"), models)


def test_all_failures_are_in_one_error(monkeypatch: pytest.MonkeyPatch):
    keep(monkeypatch, "truncated sampling")
    with pytest.raises(BackendError, match="'plain' fails 2 checks") as caught:
        check_backend(PlainPlugin("ends twice"))
    assert "truncated sampling: an end of 0/1" in str(caught.value.found)
    assert "the scheduler ends the run" in str(caught.value.found)


def keep(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Leaves out all checks of tables but these."""
    for name, table in (("ENGINE_CHECKS", ENGINE_CHECKS), ("TRAINER_CHECKS", TRAINER_CHECKS)):
        left = {check: run for check, run in table.items() if check in names}
        monkeypatch.setattr(f"flowrl.testing.backend_check.{name}", left)


def test_the_command_prints_each_check_and_what_a_failure_does_to_a_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    keep(monkeypatch, "greedy", "trainer logprobs")
    assert command.run("torch", {}, as_json=False) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines[:-1]] == [
        "passed        greedy",
        "passed        tied embeddings",
        "passed        processes",
        "passed        trainer logprobs",
    ]
    assert lines[-1] == "4 passed, 0 failed, 0 not declared"
    assert command.run("torch", {"tolerance": 1e-12}, as_json=True) == 1
    greedy, *_ = json.loads(capsys.readouterr().out)["checks"]
    assert (greedy["name"], greedy["status"]) == ("greedy", "failed")
    assert greedy["meaning"]


def test_what_can_not_be_checked_is_refused(tmp_path: Path):
    with pytest.raises(BackendError, match="'verify' neither generates nor trains"):
        check_backend("verify")
    with pytest.raises(ConfigError, match="no model folder"):
        command.run("torch", {"model": tmp_path}, as_json=False)


class PortOptions(BaseModel, frozen=True, extra="forbid"):
    port: int = 0


def test_a_plug_in_is_checked_with_its_options(models: Models):
    plugin = PlainPlugin()
    with pytest.raises(ConfigError, match=r"backend 'plain' has no options"):
        next(run_checks(plugin, options={"port": 1}))
    plugin.options = PortOptions
    with pytest.raises(ConfigError, match="unknown key 'ports' in options"):
        next(run_checks(plugin, options={"ports": 1}))
    options = command.read_options(["port=8", "args=[-v]"])
    assert options == {"port": 8, "args": ["-v"]}
    made = Models.context_of(models.first, device="cpu", dtype="float32", options=options)
    assert made.options == options
    with pytest.raises(ConfigError, match="'port' sets no option"):
        command.read_options(["port"])


@pytest.mark.parametrize("name", ["resume", "sleep and wake"])
def test_what_is_not_declared_is_not_checked(models: Models, name: str):
    with pytest.raises(NotDeclared):
        run_check(name, "", models, sleep=False, resume=False)


@pytest.mark.parametrize("name", ["same tokens in any batch", "resume", "abort", "sleep and wake"])
def test_logprobs_of_an_engine_without_seeds_are_compared_in_place_of_its_tokens(
    models: Models, name: str
):
    with pytest.raises(CheckFailed, match="other tokens"):
        run_check(name, "no seeds", models)
    found = run_check(name, "no seeds", models, seeds=False)
    assert found.endswith("seeds=False: logprobs were compared, not tokens")
    with pytest.raises(CheckFailed, match="differ by up to"):
        run_check(name, "logprobs of its own", models, seeds=False)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("truncated sampling", r"is none that top_p=0\.9 keeps"),
        ("stop tokens", "has a stop token before token 40 under min_tokens=40"),
    ],
)
def test_options_of_sampling_are_checked_where_they_are_declared(
    models: Models, name: str, found: str
):
    with pytest.raises(CheckFailed, match=found):
        run_check(name, "follows top-k alone", models)
    run_check(name, "follows top-k alone", models, sampling=frozenset({"top_k"}))


@pytest.mark.parametrize("name", ["resume", "abort", "publication", "publication in flight"])
def test_an_engine_that_cannot_forbid_stop_tokens_passes(models: Models, name: str):
    run_check(name, "follows top-k alone", models, sampling=frozenset({"top_k"}))
