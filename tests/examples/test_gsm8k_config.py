"""`configs/gsm8k_tiny.yaml` on 60 real problems, shrunk to seconds: the run, not its result."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import flowrl as fl
from flowrl.api import RunResult
from flowrl.config.load import load_config
from flowrl.config.rewards import FormatMatch
from flowrl.errors import ConfigError
from flowrl.observe.display import SilentDisplay
from flowrl.observe.run_folder import RunFolder

# A template in the manner of ChatML, and what it makes of the question.
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHAT_PROMPT = r"<|im_start|>user\n{question}\n<|im_end|>\n<|im_start|>assistant\n"

SMALL = (
    "data.max_prompt_tokens=400",
    "stage.sft.train.steps=6",
    "stage.sft.train.prompts_per_step=4",
    "stage.sft.train.optimizer.learning_rate=1.0e-2",
    "stage.sft.train.optimizer.warmup_updates=0",
    "stage.sft.stop.check_every=3",
    "stage.sft.stop.num=4",
    "train.steps=2",
    "train.prompts_per_step=4",
    "train.group_size=4",
    "train.sampling.max_tokens=12",
    "eval.num=8",
)
FRESH = (
    "roles.actor.model.hidden_size=16",
    "roles.actor.model.num_layers=1",
    "roles.actor.model.num_heads=2",
    "roles.actor.model.num_kv_heads=1",
    "roles.actor.model.intermediate_size=32",
    "roles.actor.model.max_length=512",
    "roles.actor.tokenizer.vocab_size=384",
)
# Random text has no format. Whether a letter occurs differs within a group, so updates are made.
EASY = (
    "rewards.terms=[{kind: gsm8k, name: accuracy}, {kind: format, pattern: '[^e]*', weight: 0.5}]",
    "stage.sft.stop=null",
)


@pytest.fixture(scope="module")
def config(repository: Path) -> Path:
    return repository / "configs" / "gsm8k_tiny.yaml"


@pytest.fixture(scope="module")
def problems(repository: Path) -> tuple[str, ...]:
    folder = repository / "tests" / "data"
    return (
        f"data.train={folder / 'gsm8k_train.jsonl'}",
        f"data.eval={folder / 'gsm8k_test.jsonl'}",
    )


@pytest.fixture(scope="module")
def fresh_run(
    config: Path, problems: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory
) -> RunResult:
    """The config as it is but for its sizes."""
    return _run(config, tmp_path_factory.mktemp("runs"), *problems, *SMALL, *FRESH)


def _run(config: Path, runs: Path, *overrides: str) -> RunResult:
    return fl.run(
        None, config, overrides=(f"runtime.runs={runs}", *overrides), display=SilentDisplay()
    )


def _chat_model(folder: Path, architecture: str, text: Path) -> Path:
    """A model with random weights, a fast tokenizer and a chat template, as libraries save them."""
    import torch
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        PreTrainedTokenizerFast,
        Qwen2Config,
        Qwen2ForCausalLM,
    )

    fast = Tokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    fast.train([str(text)], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=fast, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    kind, config_kind = {
        "qwen2": (Qwen2ForCausalLM, Qwen2Config),
        "llama": (LlamaForCausalLM, LlamaConfig),
    }[architecture]
    sizes = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    torch.manual_seed(0)
    kind(config_kind(**sizes)).save_pretrained(folder)
    return folder


def _responses(result: RunResult) -> list[str]:
    return [row.response for row in RunFolder.open(result.folder).samples()]


def test_reward_functions_of_verl_and_trl_run_unchanged(
    config: Path, problems: tuple[str, ...], tmp_path: Path
) -> None:
    rewards = tmp_path / "borrowed.py"
    rewards.write_text(
        "import re\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    found = re.findall(r'#### (-?[0-9.,]+)', solution_str[-300:])\n"
        "    right = bool(found) and found[-1] == ground_truth.split('#### ')[1]\n"
        "    return {'score': float(right), 'acc': right}\n"
        "def without_e(prompts, completions, completion_ids, question, **kwargs):\n"
        "    assert all(q in p for p, q in zip(prompts, question, strict=True))\n"
        "    assert all(len(ids) <= 12 for ids in completion_ids)\n"
        "    return [0.0 if 'e' in text else 1.0 for text in completions]\n"
    )
    terms = (
        f"{{use: '{rewards}:compute_score', name: accuracy}}, "
        f"{{use: '{rewards}:without_e', weight: 0.5}}"
    )
    own = ("stages=[grpo]", f"rewards.terms=[{terms}]", "eval.metric=without_e", "train.steps=1")
    small = [each for each in SMALL if not each.startswith("stage.")]
    result = _run(config, tmp_path / "runs", *problems, *small, *FRESH, *own)
    samples = list(RunFolder.open(result.folder).samples())
    assert {len(row.terms) for row in samples} == {2}
    assert {row.terms["without_e"] for row in samples} == {0.0, 1.0}
    for row in samples:
        assert row.terms["without_e"] == float("e" not in row.response)
        assert row.score == row.terms["accuracy"] + 0.5 * row.terms["without_e"]


def test_the_config_runs_both_stages_and_leaves_a_whole_run_folder(
    fresh_run: RunResult,
) -> None:
    folder = RunFolder.open(fresh_run.folder)
    assert [(row.stage, row.step) for row in folder.steps()] == [
        *(("sft", step) for step in range(1, 7)),
        *(("grpo", step) for step in (1, 2)),
    ]
    losses = [row.loss for row in folder.steps() if row.stage == "sft"]
    assert losses[-1] is not None
    assert losses[0] is not None
    assert losses[-1] < losses[0]
    assert all(
        {"accuracy", "format", "score"} <= row.metrics.keys() for row in folder.evaluations()
    )
    summary = json.loads((fresh_run.folder / "summary.json").read_text())
    assert summary["metric"] == "format"
    assert fresh_run.summary.headline.startswith("held-out sampled format: before 0.00 after ")


def test_the_exported_model_and_its_tokenizer_load_in_transformers_and_generate(
    fresh_run: RunResult,
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(fresh_run.folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(fresh_run.folder / "model")
    prompt = tokenizer("Tom has 3 apples.\n", return_tensors="pt")
    output = model.generate(**prompt, max_new_tokens=5, min_new_tokens=5, do_sample=False)
    assert output.shape[1] == prompt["input_ids"].shape[1] + 5
    assert tokenizer.decode(prompt["input_ids"][0]) == "Tom has 3 apples.\n"


@pytest.mark.parametrize("architecture", ["qwen2", "llama"])
def test_a_model_folder_is_trained_in_place_of_the_fresh_model(
    config: Path, problems: tuple[str, ...], tmp_path: Path, architecture: str
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    text = Path(problems[0].partition("=")[2])
    model = _chat_model(tmp_path / "model", architecture, text)
    result = _run(config, tmp_path / "runs", *problems, *SMALL, *EASY, f"roles.actor.model={model}")

    rows = list(RunFolder.open(result.folder).steps())
    assert [row.num_samples for row in rows if row.stage == "sft"] == [4] * 6
    assert any(row.grad_norm for row in rows if row.stage == "grpo")
    before = AutoModelForCausalLM.from_pretrained(model).state_dict()
    after = AutoModelForCausalLM.from_pretrained(result.folder / "model").state_dict()
    assert before.keys() == after.keys()
    assert any(not before[name].equal(after[name]) for name in before)
    exported = AutoTokenizer.from_pretrained(result.folder / "model")
    assert exported.chat_template == CHAT_TEMPLATE


def test_a_question_is_a_users_turn_of_the_folders_own_chat_template(
    config: Path, problems: tuple[str, ...], tmp_path: Path
) -> None:
    text = Path(problems[0].partition("=")[2])
    model = _chat_model(tmp_path / "model", "qwen2", text)
    common = (
        *problems,
        *SMALL,
        *EASY,
        f"roles.actor.model={model}",
        "stage.sft.train.steps=0",
        "train.steps=1",
    )

    wrapped = _run(config, tmp_path / "wrapped", *common)
    by_hand = _run(
        config,
        tmp_path / "by_hand",
        *common,
        "data.chat_template=never",
        f'data.prompt="{CHAT_PROMPT}"',
    )
    bare = _run(config, tmp_path / "bare", *common, "data.chat_template=never")

    assert _responses(wrapped) == _responses(by_hand)
    assert _responses(wrapped) != _responses(bare)


def test_every_solution_has_the_format_that_is_rewarded(config: Path, repository: Path) -> None:
    import re

    loaded = load_config(config)
    (pattern,) = (
        term.pattern for term in loaded.config.rewards.terms if isinstance(term, FormatMatch)
    )
    lines = (repository / "tests" / "data" / "gsm8k_train.jsonl").read_text().splitlines()
    solutions = [json.loads(line)["answer"] for line in lines]

    assert all(re.fullmatch(pattern, solution, re.DOTALL) for solution in solutions)
    for wrong in (
        "#### 5",
        "2 + 3 = 5\n#### 5 apples",
        "2 + 3 = 5\n####",
        "2 + 3 = 5 #### 5",
        "2 + 3 = 5\n#### 5\n",
        "2 + 3 = 5\n#### 5\n#### 5",
    ):
        assert not re.fullmatch(pattern, wrong, re.DOTALL), wrong


def test_without_the_data_the_error_says_where_it_comes_from(config: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        fl.compile(None, config, overrides=["data.train=nowhere/train.jsonl"])

    message = str(caught.value)
    assert "no such data file: nowhere/train.jsonl" in message
    assert "openai/gsm8k" in message
    assert "set data.train=FILE" in message
