"""What one key alone cannot tell is found before a run starts, without a tensor library."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from flowrl.config.check import check_config
from flowrl.config.load import load_config
from flowrl.config.schema import RunConfig, TrainConfig
from flowrl.errors import ConfigError

BASE = """\
stages: [sft, grpo]
data:
  train: {kind: arithmetic, split: train}
  eval: {kind: arithmetic, split: eval}
roles:
  actor:
    model: {hidden_size: 32, max_length: 32}
    tokenizer: {kind: char, alphabet: "0123456789+="}
  reference: {copy_of: actor}
rewards:
  terms:
    - {kind: exact_match}
stage:
  sft:
    train: {steps: 10}
train: {prompts_per_step: 64, mini_batches: 4, sampling: {max_tokens: 4}}
"""


@pytest.fixture(autouse=True)
def in_an_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run.yaml").write_text(BASE)
    monkeypatch.chdir(tmp_path)


def check(*overrides: str) -> RunConfig:
    """The configuration, which passes."""
    loaded = load_config(Path("run.yaml"), overrides)
    check_config(loaded)
    return loaded.config


def message(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        check(*overrides)
    text = str(caught.value)
    assert 1 <= len(text.splitlines()) <= 4, text
    return text


def test_a_sound_config_passes_as_it_is_written() -> None:
    config = check()
    assert config.stages == ("sft", "grpo")
    assert config.stage_config("sft").train.steps == 10
    assert (config.train.prompts_per_step, config.train.mini_batches) == (64, 4)
    assert config.roles["reference"].copy_of == "actor"


def test_what_passes_passes_again_with_every_default_written_out(tmp_path: Path) -> None:
    # A run folder holds the resolved config, and a resumed run reads it back.
    loose = ["rewards.terms=[{kind: format, pattern: '.*'}]", "train={sampling: {max_tokens: 256}}"]
    loaded = load_config(Path("run.yaml"), loose)
    check_config(loaded)
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(loaded.config.model_dump_json(indent=1))
    again = load_config(resolved)
    check_config(again)
    assert again.config == loaded.config


def test_both_numbers_that_do_not_divide_are_named_with_the_nearest_that_do() -> None:
    text = message("train.prompts_per_step=30", "train.mini_batches=4")
    assert "train.prompts_per_step=30 is not a multiple of train.mini_batches=4" in text
    assert "prompts_per_step 28 or 32, or mini_batches 3 or 5" in text
    assert "command line (train.prompts_per_step=30)" in text


@pytest.mark.parametrize(
    ("prompts", "parts", "nearest"),
    [
        (7, 2, "prompts_per_step 6 or 8, or mini_batches 1 or 7"),
        (3, 8, "prompts_per_step 8, or mini_batches 3"),
        (64, 100, "prompts_per_step 100, or mini_batches 64"),
        (12, 5, "prompts_per_step 10 or 15, or mini_batches 4 or 6"),
    ],
)
def test_the_nearest_numbers_do_divide(prompts: int, parts: int, nearest: str) -> None:
    assert nearest in message(f"train.prompts_per_step={prompts}", f"train.mini_batches={parts}")


def test_sizes_of_an_earlier_stage_are_checked_under_their_own_keys() -> None:
    text = message("stage.sft.train.mini_batches=7")
    assert "stage.sft.train.prompts_per_step=64" in text
    assert "stage.sft.train.mini_batches=7" in text


def test_sizes_of_a_stage_without_keys_are_those_of_the_defaults() -> None:
    assert check("stages=[sft, warm, grpo]").stage_config("warm").train == TrainConfig()


def test_a_section_for_no_stage_is_answered_with_the_nearest_stage() -> None:
    text = message("stage.stf.train.steps=1")
    assert "no stage is called 'stf'" in text
    assert "did you mean 'sft'?" in text


def test_a_stage_left_out_on_the_command_line_takes_its_section_with_it() -> None:
    assert check("stages=[grpo]").stage == {}


def test_a_section_that_the_command_line_sets_needs_its_stage() -> None:
    assert "no stage is called 'sft'" in message("stages=[grpo]", "stage.sft.train.steps=1")


def test_a_section_for_the_last_stage_says_where_its_keys_stand() -> None:
    text = message("stage.grpo.train.steps=1")
    assert "'grpo' is the last stage, whose keys are at the top" in text


def test_a_missing_data_file_is_answered_with_the_nearest() -> None:
    Path("train.jsonl").write_text("{}\n")
    text = message("data.train=trian.jsonl")
    assert "command line (data.train=trian.jsonl): no such data file: trian.jsonl" in text
    assert "did you mean train.jsonl?" in text
    check("data.train=train.jsonl")


def test_a_near_miss_of_a_data_file_comes_before_the_origin_of_the_data() -> None:
    Path("train.jsonl").write_text("{}\n")
    text = message("data.train=trian.jsonl", "data.origin=the data set openai/gsm8k")
    assert "did you mean train.jsonl?" in text
    Path("train.jsonl").rename("other")
    text = message("data.train=trian.jsonl", "data.origin=the data set openai/gsm8k")
    assert "data.train is the data set openai/gsm8k; set data.train=FILE" in text


def test_a_missing_file_of_a_data_mapping_is_found_too() -> None:
    text = message("data.eval={kind: jsonl, path: gone/far.jsonl}")
    assert "no such data file: gone/far.jsonl" in text
    assert f"relative to the current directory, {Path.cwd()}" in text


def test_a_name_of_the_hub_as_a_path_says_how_it_is_read() -> None:
    text = message("data.train=openai/gsm8k")
    assert "set data.train='{kind: hub, name: openai/gsm8k, split: train}'" in text


def test_the_files_of_a_folder_a_pattern_and_a_mixture_are_looked_for() -> None:
    Path("rows").mkdir()
    check("data.train=rows")
    check("data.train=rows/*.jsonl")
    mixture = "data.train={kind: mixture, sources: {a: rows, b: gone.jsonl}}"
    assert "(data.train.sources.b)" in message(mixture) or mixture in message(mixture)
    assert "no such data file: gone.jsonl" in message(mixture)


def test_a_missing_model_folder_says_what_a_model_folder_is() -> None:
    text = message("roles.actor.model=FOLDER")
    assert "no such model folder: FOLDER" in text
    assert "config.json" in text


def test_a_hub_name_says_that_nothing_is_downloaded() -> None:
    text = message("roles.actor.model=some/model")
    assert "flowrl downloads nothing by itself" in text
    assert "hf download some/model --local-dir some/model" in text
    # To plan, one small file is enough; or none, where the clone has the sizes.
    assert "`hf download some/model config.json --local-dir some/model`" in text
    assert "configs/models" not in text
    folder = Path("configs/models")
    folder.mkdir(parents=True)
    for name in ("qwen2.json", "qwen2-7b.json"):
        (folder / name).write_text("{}")
    text = message("roles.actor.model=Qwen/Qwen2-7B-Instruct")
    assert "is enough: name configs/models/qwen2-7b.json, or `hf download" in text


def test_a_misspelt_model_folder_is_answered_with_the_nearest() -> None:
    Path("models/tiny").mkdir(parents=True)
    Path("models/tiny/config.json").write_text("{}")
    assert "did you mean models/tiny?" in message("roles.actor.model=models/tny")
    check("roles.actor.model=models/tiny")


def test_a_folder_without_a_model_shows_the_one_inside() -> None:
    Path("runs/a/model").mkdir(parents=True)
    Path("runs/a/model/config.json").write_text("{}")
    text = message("roles.actor.model=runs/a")
    assert "holds no config.json" in text
    assert "did you mean runs/a/model?" in text


def test_a_copy_of_no_role_is_answered_with_the_nearest() -> None:
    text = message("roles.reference.copy_of=actr")
    assert "no role is called 'actr'" in text
    assert "did you mean 'actor'?" in text


def test_a_role_cannot_have_a_model_and_be_a_copy() -> None:
    assert "reference has a model of its own" in message("roles.reference.model={hidden_size: 32}")


def test_roles_that_copy_each_other_are_refused() -> None:
    text = message("roles.actor={model: null, copy_of: reference}")
    assert "actor is a copy of reference, which is itself a copy" in text
    assert "actor -> reference -> actor" in text


def test_a_role_that_copies_itself_is_refused() -> None:
    assert "reference -> reference" in message("roles.reference.copy_of=reference")


def test_a_copy_of_a_copy_is_told_what_to_copy() -> None:
    text = message("roles.second.copy_of=reference")
    assert "second is a copy of reference, which is itself a copy" in text
    assert "copy actor, or give reference a model" in text


def test_a_reward_function_names_a_file_that_exists() -> None:
    term = "rewards.terms=[{{kind: python, function: '{}'}}]"
    assert "no such reward file: mine.py" in message(term.format("mine.py:score"))
    for malformed in ("mine.py", "mine:score", "mine.py:", "mine.py:a b"):
        assert "function must be FILE.py:NAME" in message(term.format(malformed))
    Path("mine.py").write_text("def score(prompt, response, answer, row): return 1.0\n")
    check(term.format("mine.py:score"))


def test_a_pattern_that_is_no_regular_expression_is_refused() -> None:
    text = message("rewards.terms=[{kind: format, pattern: '(a'}]")
    assert "pattern is no regular expression" in text


def test_two_reward_terms_cannot_share_a_name() -> None:
    text = message("rewards.terms=[{kind: exact_match}, {kind: numeric_match}]")
    assert "two reward terms are called 'accuracy'" in text


def test_a_reward_term_has_no_name_of_another_metric(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def f(response): return 1.0")
    for name in ("length", "truncated"):
        text = message(f"rewards.terms=[{{kind: exact_match, name: {name}}}]")
        assert f"a reward term is called {name!r}" in text
    mine = "{kind: python, function: 'mine.py:f'}"  # its default name is score
    check(f"rewards.terms=[{mine}]")
    other = "{kind: format, pattern: '.*'}"
    assert "the weighted sum of all terms" in message(f"rewards.terms=[{mine}, {other}]")
    assert "is called 'score'" in message(
        "rewards.terms=[{kind: python, function: 'mine.py:f', weight: 2}]"
    )


def test_a_metric_that_nothing_measures_is_refused() -> None:
    text = message("eval.metric=acuracy")
    assert "no reward term measures" in text
    assert "did you mean 'accuracy'?" in text
    assert "stage.sft.stop.metric" in message("stage.sft.stop={metric: format, at_least: 0.5}")
    check("eval.metric=score")
    check("eval.metric=pair_accuracy")


def test_a_stage_cannot_stop_at_what_nothing_measures() -> None:
    stop = "stage.sft.stop={at_least: 0.5}"  # the metric's default is accuracy
    check(stop)
    text = message(stop, "rewards.terms=[{kind: format, pattern: '.*'}]")
    assert "stage.sft.stop.metric is 'accuracy', which no reward term measures" in text
    text = message(stop, "data.eval=null")
    assert "stage 'sft' is to stop at a held-out metric, which nothing measures" in text
    assert "no data.eval" in text
    assert "no rewards.terms" in message("stop={at_least: 0.5}", "rewards.terms=[]")


def test_prompts_and_responses_must_fit_a_new_model() -> None:
    text = message("train.sampling.max_tokens=27")
    assert "prompts of 6 tokens" in text
    assert "do not fit roles.actor.model.max_length=32" in text
    assert "roles.actor.model.max_length=33" in text
    check("train.sampling.max_tokens=26")
    assert "prompts of 30 tokens (data.max_prompt_tokens)" in message("data.max_prompt_tokens=30")


def test_an_alphabet_must_hold_the_characters_of_sums() -> None:
    text = message("roles.actor.tokenizer.alphabet=0123456789")
    assert "lacks characters of sums: +=" in text


def test_a_missing_workflow_file_is_named() -> None:
    assert "no such workflow file: mine.py" in message("workflow=mine.py:grpo")
    assert "(stage.sft.workflow" in message("stage.sft.workflow=mine.py")
    Path("mine.py").write_text("")
    check("workflow=mine.py:grpo")


def test_a_missing_cluster_file_is_named() -> None:
    assert "no such cluster file: big.yaml" in message("cluster=big.yaml")


def test_all_mistakes_are_told_at_once() -> None:
    text = message("train.mini_batches=3", "data.train=gone.jsonl", "roles.actor.model=gone.json")
    assert "is not a multiple of" in text
    assert "and 2 more mistakes" in text
    assert "no such data file: gone.jsonl" in text
    assert "no such model config: gone.json" in text


def test_checking_a_config_imports_no_tensor_library() -> None:
    code = """
import sys
from pathlib import Path
from flowrl.config.check import check_config
from flowrl.config.load import load_config
check_config(load_config(Path("run.yaml"), []))
print([name for name in ("torch", "transformers", "ray", "numpy") if name in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "[]\n"


def test_a_stage_is_not_named_by_a_path() -> None:
    text = message("stages=[examples/mine.py]", "stage={}")
    assert "'examples/mine.py' names no stage" in text
    assert "the file as its `workflow`" in text


def test_a_reward_that_uses_its_time_is_no_stall() -> None:
    check("rewards.timeout_s=299")
    text = message("rewards.timeout_s=400")
    assert "a reward may take 400 s" in text
    assert "stops when nothing moves for 300 s" in text
    assert "runtime.stall_timeout_s=800" in text
    assert "(runtime.stall_timeout_s=1)" in message("runtime.stall_timeout_s=1")


@pytest.mark.parametrize(
    ("override", "word"),
    [
        ("roles.actor.model={hidden_size: 12, num_heads: 4, max_length: 32}", "even"),
        ("roles.actor.model.num_kv_heads=0", "at least 1"),
        ("roles.actor.tokenizer={kind: char, alphabet: '0120'}", "'0' is more than once"),
        ("roles.actor.tokenizer={kind: char, alphabet: '01é'}", "no ASCII character"),
        ("runtime.num_threads=100000", "at most 1024"),
        ("train.sampling.temperature=1e-40", "0.001 is the least above it"),
        ("eval.temperature=0.0009", "0 takes the likeliest token"),
    ],
)
def test_values_that_no_model_or_machine_can_have_are_refused(override: str, word: str) -> None:
    assert word in message(override)


def test_a_number_that_nobody_wrote_is_told_as_a_default() -> None:
    text = message("stage.sft.train.mini_batches=7")
    assert "command line (stage.sft.train.mini_batches=7): " in text
    assert "found: stage.sft.train.prompts_per_step left at its default" in text


def test_both_lines_of_numbers_that_do_not_divide_are_named() -> None:
    Path("run.yaml").write_text(BASE.replace("mini_batches: 4", "mini_batches: 5"))
    text = message()
    assert "run.yaml:16 (train.prompts_per_step) and run.yaml:16 (train.mini_batches)" in text


def test_a_response_may_not_have_to_be_longer_than_it_may_be() -> None:
    text = message("train.sampling.min_tokens=5")
    assert "min_tokens=5 is above max_tokens=4" in text
    assert "run.yaml:16 (train.sampling) with train.sampling.min_tokens=5 of the command" in text
    check("train.sampling.min_tokens=4")
    assert "stage.sft.train.sampling.min_tokens=257" in message(
        "stage.sft.train.sampling.min_tokens=257"
    )


SHAPED = (
    "rewards.terms=[{{kind: exact_match}}, {}, "
    "{{kind: overlong, max_tokens: 4, buffer: 2}}, {{kind: repetition}}]"
)


def test_terms_that_shape_others_name_them() -> None:
    check(SHAPED.format("{kind: stop_properly, of: accuracy}"))
    text = message(SHAPED.format("{kind: stop_properly, of: acuracy}"))
    assert "stop_properly is of 'acuracy', which is no reward term" in text
    assert "did you mean 'accuracy'?" in text
    text = message(SHAPED.format("{kind: cosine_length, of: overlong, max_tokens: 4}"))
    assert "cosine_length is of 'overlong', which does not come before it" in text
    assert "one of accuracy" in text
    assert "which does not come before it" in message(
        SHAPED.format("{kind: stop_properly, of: stop_properly}")
    )


def test_a_term_is_transformed_once_and_its_transformation_may_be_transformed() -> None:
    cosine = "{{kind: cosine_length, of: accuracy, max_tokens: 4}}, {}"
    text = message(SHAPED.format(cosine.format("{kind: stop_properly, of: accuracy}")))
    assert "cosine_length and stop_properly both take the place of accuracy" in text
    assert "of: cosine_length" in text
    check(SHAPED.format(cosine.format("{kind: stop_properly, of: cosine_length}")))


def test_a_reward_with_terms_of_its_own_is_checked_under_its_own_key() -> None:
    terms = "roles.style={{backend: verify, terms: [{}]}}"
    check(terms.format("{kind: format, pattern: '[0-9]*', name: length}"))
    text = message(terms.format("{kind: exact_match}, {kind: gsm8k}"))
    assert "command line (roles.style={backend" in text
    assert "two reward terms are called 'accuracy'" in text
    assert "is no regular expression" in message(terms.format("{kind: format, pattern: '('}"))
    assert "no such reward file: mine.py" in message(
        terms.format("{kind: python, function: 'mine.py:f'}")
    )
    text = message(terms.format(""))
    assert "terms must not be empty" in text


def test_terms_of_a_role_stand_at_their_line() -> None:
    lines = "  style:\n    backend: verify\n    terms:\n      - {kind: format, pattern: '('}\n"
    Path("run.yaml").write_text(BASE.replace("rewards:\n", f"{lines}rewards:\n"))
    assert "run.yaml:13 (roles.style.terms.0.pattern): pattern is no regular" in message()


def test_a_role_scores_with_its_own_terms_or_with_those_of_all() -> None:
    own = "roles.style={backend: verify, terms: [{kind: format, pattern: x}]}"
    config = load_config(Path("run.yaml"), [own]).config
    terms, key = config.terms_of("style")
    assert ([term.name for term in terms], key) == (["format"], "roles.style.terms")
    for role in ("actor", "verifier"):
        assert config.terms_of(role) == (config.rewards.terms, "rewards.terms")


def test_an_environment_names_a_function_of_a_file_that_exists() -> None:
    game = "roles.game={{backend: python, environment: {}, options: {{low: 0, name: x}}}}"
    text = message(game.format("'game.py:make'"))
    assert "no such environment file: game.py" in text
    assert "environment must be FILE.py:NAME" in message(game.format("game"))
    Path("game.py").write_text("def make(low, name): ...\n")
    check(game.format("'game.py:make'"))


def test_an_environment_has_no_model() -> None:
    Path("game.py").write_text("def make(low, name): ...\n")
    text = message("roles.game={environment: 'game.py:make', copy_of: actor}")
    assert "a role with an environment has no copy_of" in text


def test_one_plug_in_for_trainer_and_engine_has_one_set_of_options() -> None:
    for engine in ("null", "torch"):
        text = message(f"roles.actor.engine={engine}", "roles.actor.engine_options={port: 1}")
        assert "torch trains and generates, and has one set of options" in text
        assert "roles.actor.engine_options" in text
    check("roles.actor.engine=mine", "roles.actor.engine_options={port: 1}")


def test_an_environment_that_uses_its_time_is_no_stall() -> None:
    Path("game.py").write_text("def make(low, name): ...\n")
    game = "roles.game={{environment: 'game.py:make', timeout_s: {}}}"
    check(game.format(299))
    assert "an environment may take 300 s (roles.game.timeout_s)" in message(game.format(300))
    check("roles.actor.timeout_s=300")


def test_a_role_may_begin_as_a_copy_of_one_that_is_trained() -> None:
    assert check("roles.critic.copy_of=actor").roles["critic"].copy_of == "actor"


def test_built_in_sums_carry_no_solve_rate() -> None:
    text = message("data.difficulty={low: 0.2, high: 0.8}")
    assert "data.difficulty reads a field of rows" in text
    Path("rows.jsonl").write_text("{}")
    check("data.train=rows.jsonl", "data.difficulty={low: 0.2, high: 0.8}")


def test_a_template_that_no_source_reads_is_refused(tmp_path: Path) -> None:
    said = message("data.prompt=Q {prompt}")
    assert "(data.prompt=Q {prompt}): no data reads data.prompt" in said
    assert "leave data.prompt out" in said
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1", "answer": "1"}\n')
    rows = "data.train={kind: jsonl, path: rows.jsonl}"
    assert "write data.train.answer='sum' in its place" in message(rows, "data.answer=sum")
    check(rows, "data.train.answer=sum")
    check("data.eval=rows.jsonl", "data.prompt=Q {prompt}")
    check("data.prompt={prompt}")


def test_epochs_replace_the_steps_of_a_file_and_not_those_of_the_same_place(tmp_path: Path) -> None:
    assert check("stage.sft.train.epochs=2").stage["sft"].train.epochs == 2
    (tmp_path / "epochs.yaml").write_text("extends: run.yaml\nstage: {sft: {train: {epochs: 3}}}\n")
    check_config(load_config(Path("epochs.yaml"), []))
    both = "stage 'sft' has both steps and epochs"
    assert both in message("stage.sft.train.epochs=2", "stage.sft.train.steps=5")
    (tmp_path / "run.yaml").write_text(BASE.replace("steps: 10", "steps: 10, epochs: 2"))
    text = message()
    assert both in text
    assert "stage.sft.train.epochs=null takes the steps" in text
    check("stage.sft.train.epochs=null")
    check("stage.sft.train.steps=5", "stage.sft.train.epochs=null")
