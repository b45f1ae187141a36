"""Tokenizers against `transformers.AutoTokenizer` on the same folders, and new model folders."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as FastTokenizer

from flowrl.config.data import DataConfig
from flowrl.config.roles import (
    BpeTokenizer,
    CharTokenizer,
    FreshModel,
    RoleConfig,
    fresh_config_json,
    vocabulary_of,
)
from flowrl.data import (
    Row,
    RowNeeds,
    Tokenizer,
    check_model_folder,
    encode_prompts,
    load_rows,
    prepare_model_folder,
)
from flowrl.errors import ConfigError, DataError

HERE = Path(__file__).parent
TEXTS = [
    "What is 23 + 45?",
    "  two  spaces, a\ttab\nand lines\r\n\n",
    "don't I'LL 1,234.50$ — naïve Ünïcode 漢字 🙂",
    "<eos> <bos>",
    "x",
]
CHAT = (
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] | trim }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


@pytest.fixture(scope="module")
def auto():
    """`AutoTokenizer.from_pretrained`; imported once, since it takes seconds."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained


def up_to(num_tokens: int) -> DataConfig:
    return DataConfig(train="x", max_prompt_tokens=num_tokens)


def rows_of(*pairs: tuple[str, str]) -> list[Row]:
    return [
        Row(index=i, prompt=p, answer=s, solution=s, fields={}, where=f"d.jsonl:{i + 1}")
        for i, (p, s) in enumerate(pairs)
    ]


def gsm8k():
    data = DataConfig(train=str(HERE / "gsm8k_train.jsonl"), prompt="{question}\n")
    return load_rows(data.train, data, split="train")


def fresh(folder: Path, spec, rows, architecture="qwen2") -> Path:
    role = RoleConfig(model=FreshModel(architecture=architecture, max_length=4096), tokenizer=spec)
    return prepare_model_folder(role, folder, rows)


def foreign_folder(folder: Path, **config: object) -> Path:
    """A folder as other people's models bring it: BOS in front, special tokens, a template."""
    fast = FastTokenizer(models.BPE(unk_token=None))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    special = [AddedToken(t, special=True) for t in ("<bos>", "<eos>", "<|user|>", "<|end|>")]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    fast.train_from_iterator(TEXTS * 3, trainer)
    fast.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", 0)]
    )
    fast.enable_truncation(4)
    folder.mkdir()
    fast.save(str(folder / "tokenizer.json"))
    base = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": {"content": "<eos>", "__type": "AddedToken"},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(base | config))
    return folder


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "llama"])
def test_a_new_bpe_tokenizer_equals_autotokenizer_and_round_trips(tmp_path, auto, architecture):
    spec = BpeTokenizer(kind="bpe", vocab_size=640)
    ours = Tokenizer.load(fresh(tmp_path / "m", spec, gsm8k(), architecture))
    theirs = auto(tmp_path / "m")
    assert ours.vocab_size == len(theirs) == 640
    assert ours.end_id == theirs.eos_token_id == 0
    assert ours.stop_ids == (0,)
    for text in [*TEXTS, *(row.solution for row in gsm8k())]:
        ids = ours.encode_prompt(text)
        assert ids.dtype == "int64"
        assert ids.tolist() == theirs(text)["input_ids"]
        assert ours.encode_response(text).tolist() == [*ids.tolist(), 0]
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    solution = gsm8k()[3].solution
    assert ours.decode(ours.encode_response(solution)) == solution


def test_occurrences_of_a_text_end_at_tokens(tmp_path):
    ours = Tokenizer.load(fresh(tmp_path / "m", BpeTokenizer(kind="bpe", vocab_size=640), gsm8k()))

    def ended(separator: str, text: str) -> list[str]:
        """The text up to each token at which an occurrence ends."""
        ids = ours.encode(text)
        return [ours.decode(ids[: end + 1]) for end in ours.ends_of(separator, ids)]

    plain = "First 1 + 1 = 2.\n\nThen 2 + 3 = 5.\n\nSo 5"
    assert [len(text) for text in ended("\n\n", plain)] == [18, 35]
    # Several tokens make up the character of two bytes, and one of four.
    torn = "Größe: 2 Füße 😀.\n\n→ 5\n\n"
    found = ended("\n\n", torn)
    assert found == ["Größe: 2 Füße 😀.\n\n", torn]
    assert ended("ß", torn) == ["Größ", "Größe: 2 Füß"]
    assert ended("7", plain) == []
    assert ours.ends_of("\n", ours.encode("\n\n\n"))[-1] == len(ours.encode("\n\n\n")) - 1
    assert ours.ends_of("\n", ours.encode("")) == []


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "llama"])
def test_a_new_character_tokenizer_equals_autotokenizer(tmp_path, auto, architecture):
    spec = CharTokenizer(kind="char", alphabet="0123456789+= \n")
    rows = rows_of(("2 3+45=", "0\n68"))
    ours = Tokenizer.load(fresh(tmp_path / "m", spec, rows, architecture))
    theirs = auto(tmp_path / "m")
    assert ours.vocab_size == len(theirs) == 16
    for text in ("23+45=", "1 +\n\n2  =", " "):
        ids = ours.encode_prompt(text).tolist()
        assert ids == ["0123456789+= \n".index(c) for c in text] == theirs(text)["input_ids"]
        assert ours.decode(ids) == text == theirs.decode(ids)


def test_the_demo_vocabulary_has_sixteen_tokens_known_before_any_data(tmp_path):
    spec = CharTokenizer(kind="char", alphabet="0123456789+=")
    assert vocabulary_of(spec) == (16, 12)
    tokenizer = Tokenizer.load(fresh(tmp_path / "m", spec, rows_of(("23+45=", "068"))))
    assert (tokenizer.vocab_size, tokenizer.end_id, tokenizer.stop_ids) == (16, 12, (12,))
    assert tokenizer.encode_response("068").tolist() == [0, 6, 8, 12]


def test_every_id_but_the_end_has_a_text_so_no_token_hides_in_a_right_answer(tmp_path):
    specs = (
        CharTokenizer(kind="char", alphabet="0123456789+="),
        BpeTokenizer(kind="bpe", vocab_size=400),
    )
    for spec in specs:
        rows = rows_of(("1+1=", "2"))
        tokenizer = Tokenizer.load(fresh(tmp_path / spec.kind, spec, rows))
        size, end = vocabulary_of(spec)
        assert tokenizer.vocab_size == size
        texts = tokenizer.decode_many([[i] for i in range(size)])
        assert [i for i in range(size) if not texts[i]] == [end]


def test_a_character_outside_the_alphabet_names_file_line_and_character(tmp_path):
    spec = CharTokenizer(kind="char", alphabet="0123456789+=")
    folder = fresh(tmp_path / "m", spec, rows_of(("1+1=", "2")))
    tokenizer = Tokenizer.load(folder, alphabet_key="roles.pupil.tokenizer.alphabet")
    with pytest.raises(DataError) as caught:
        encode_prompts(
            rows_of(("1+1=", "2"), ("7*8=", "56")),
            tokenizer,
            up_to(9),
        )
    assert str(caught.value).startswith("d.jsonl:2: ")
    assert "'*'" in str(caught.value)
    assert "add them to roles.pupil.tokenizer.alphabet" in str(caught.value)
    with pytest.raises(DataError) as caught:
        Tokenizer.load(folder).encode("7*8")
    assert "alphabet" not in str(caught.value)


@pytest.mark.parametrize(
    ("needs", "bad"),
    [
        (RowNeeds(answer=False, solution=False), {2}),
        (RowNeeds(), {2, 3}),
        (RowNeeds(rejected=True), {2, 3, 4}),
    ],
)
def test_rows_of_unknown_characters_count_as_bad_rows_where_they_are_read(tmp_path, needs, bad):
    texts = [("1+1=", "2", "3"), ("7*8=", "5", "6"), ("1+2=", "drei", "4"), ("2+2=", "4", "?")]
    path = tmp_path / "d.jsonl"
    lines = [{"prompt": p, "answer": a, "rejected": r} for p, a, r in texts]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    spec = CharTokenizer(kind="char", alphabet="0123456789+=")
    tokenizer = Tokenizer.load(fresh(tmp_path / "m", spec, ()))

    def encoded(limit):
        rows = load_rows(
            str(path), DataConfig(train=str(path), max_bad_rows=limit), split="train", needs=needs
        )
        return rows, encode_prompts(rows, tokenizer, up_to(9), needs=needs)

    rows, prompts = encoded(len(bad))
    assert {int(problem.where.rpartition(":")[2]) for problem in rows.problems} == bad
    assert [p.row.index + 1 for p in prompts.prompts] == [n for n in range(1, 5) if n not in bad]
    with pytest.raises(DataError, match=rf"at most {len(bad) - 1} bad rows"):
        encoded(len(bad) - 1)


def test_bpe_training_gives_the_same_files_in_every_process():
    program = (
        "import sys, hashlib;"
        "from flowrl.config.data import DataConfig; from flowrl.config.roles import BpeTokenizer;"
        "from flowrl.data import load_rows; from flowrl.data.model_folder import build_tokenizer;"
        "d = DataConfig(train=sys.argv[1], prompt='{question}');"
        "f = build_tokenizer(BpeTokenizer(kind='bpe', vocab_size=900),"
        " load_rows(d.train, d, split='train'), max_length=99);"
        "print(hashlib.sha256(repr(sorted(f.items())).encode()).hexdigest())"
    )
    data = str(HERE / "gsm8k_train.jsonl")
    command = [sys.executable, "-c", program, data]
    runs = {subprocess.run(command, capture_output=True, check=True).stdout for _ in range(3)}
    assert len(runs) == 1


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize("tie", [True, False])
def test_transformers_makes_the_model_that_the_config_describes(architecture, tie):
    from transformers import AutoConfig, AutoModelForCausalLM

    model = FreshModel(
        architecture=architecture, num_heads=4, num_kv_heads=2, max_length=77, tie_embeddings=tie
    )
    written = fresh_config_json(model, 16, 12)
    config = AutoConfig.for_model(**written)
    made = AutoModelForCausalLM.from_config(config)
    assert type(made).__name__ == written["architectures"][0]
    assert made.get_input_embeddings().weight.shape == (16, 64)
    tied = made.get_output_embeddings().weight is made.get_input_embeddings().weight
    assert tied is tie
    for key in ("num_key_value_heads", "max_position_embeddings", "eos_token_id", "head_dim"):
        assert getattr(config, key) == written[key]
    assert config.rope_parameters["rope_theta"] == written["rope_theta"]


def test_a_model_folder_appears_whole_is_kept_and_loads_in_transformers(tmp_path):
    from transformers import AutoConfig, GenerationConfig

    spec = CharTokenizer(kind="char", alphabet="01+=")
    folder = fresh(tmp_path / "deep" / "m", spec, rows_of(("1+1=", "10")))
    assert [p.name for p in tmp_path.joinpath("deep").iterdir()] == ["m"]
    assert AutoConfig.from_pretrained(folder).vocab_size == 8
    assert GenerationConfig.from_pretrained(folder).eos_token_id == 4
    before = (folder / "tokenizer.json").stat().st_mtime_ns
    assert fresh(folder, spec, rows_of(("0+0=", "0"))) == folder
    assert (folder / "tokenizer.json").stat().st_mtime_ns == before


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"add_bos_token": False},
        {"add_bos_token": True, "add_eos_token": True},
        {"pad_token": "<pad>"},
        {"added_tokens_decoder": {"400": {"content": "<tool>", "special": False}}},
    ],
)
def test_a_foreign_tokenizer_equals_autotokenizer(tmp_path, auto, config):
    folder = foreign_folder(tmp_path / "m", **config)
    ours, theirs = Tokenizer.load(folder), auto(folder)
    assert ours.vocab_size == len(theirs)
    for text in [*TEXTS, "<tool> <pad>"]:
        ids = theirs(text, truncation=False)["input_ids"]
        assert ours.encode_prompt(text).tolist() == ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.decode_many([[5, 6], []]) == theirs.batch_decode([[5, 6], []])


@pytest.mark.parametrize("place", ["config", "list", "file"])
def test_a_chat_template_equals_apply_chat_template(tmp_path, auto, place):
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": CHAT}]
    options = {"config": {"chat_template": CHAT}, "list": {"chat_template": named}, "file": {}}
    folder = foreign_folder(tmp_path / "m", **options[place])
    if place == "file":
        (folder / "chat_template.jinja").write_text(CHAT)
    ours, theirs = Tokenizer.load(folder), auto(folder)
    for text in TEXTS:
        expected = theirs.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        assert ours.encode_prompt(text, "auto").tolist() == expected
        assert ours.encode_prompt(text, "always").tolist() == expected
        assert ours.encode_prompt(text, "never").tolist() == theirs(text)["input_ids"]


TOOL_USE = "{{ tools | tojson }}" + CHAT

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


@pytest.mark.parametrize("place", ["list", "file", "one"])
@pytest.mark.parametrize("tools", [[], [TOOL]])
def test_a_conversation_with_tools_equals_apply_chat_template(tmp_path, auto, place, tools):
    named = [{"name": "default", "template": CHAT}, {"name": "tool_use", "template": TOOL_USE}]
    config = {"list": {"chat_template": named}, "one": {"chat_template": TOOL_USE}, "file": {}}
    folder = foreign_folder(tmp_path / "m", **config[place])
    if place == "file":
        (folder / "additional_chat_templates").mkdir()
        (folder / "chat_template.jinja").write_text(CHAT)
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text(TOOL_USE)
    messages = [
        {"role": "system", "content": " Short.\n"},
        {"role": "user", "content": "x?"},
        {"role": "assistant", "content": "y"},
        {"role": "user", "content": "<|end|> z"},
    ]
    expected = auto(folder).apply_chat_template(
        messages, tools=tools or None, add_generation_prompt=True, return_dict=False
    )
    ours = Tokenizer.load(folder)
    assert ours.encode_prompt(messages, tools=tools).tolist() == expected


def test_variables_of_a_template_and_the_prefix_of_responses_are_part_of_the_prompt(tmp_path):
    template = "{{ messages[-1].content }}{% if not enable_thinking %}<none>{% endif %}: "
    ours = Tokenizer.load(foreign_folder(tmp_path / "m", chat_template=template))
    thinks = ours.encode_prompt("x", args={"enable_thinking": True}, prefix="<think>\n")
    assert ours.decode(thinks) == "x: <think>\n"
    assert ours.decode(ours.encode_prompt("x", prefix="<think>")) == "x<none>: <think>"
    assert ours.encode_prompt("x", "never", prefix="yz").tolist() == (
        ours.encode_prompt("xyz", "never").tolist()
    )


def test_a_template_that_leaves_out_a_system_message_is_refused(tmp_path):
    template = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    ours = Tokenizer.load(foreign_folder(tmp_path / "m", chat_template=template))
    messages = [{"role": "system", "content": "Short."}, {"role": "user", "content": "x"}]
    with pytest.raises(DataError, match="leaves out the message of 'system'"):
        ours.encode_prompt(messages)
    assert len(ours.encode_prompt(messages[1:]))


def test_a_conversation_without_a_chat_template_is_one_user_turn_or_refused(tmp_path):
    ours = Tokenizer.load(foreign_folder(tmp_path / "m"))
    user = {"role": "user", "content": "x"}
    assert ours.encode_prompt([user]).tolist() == ours.encode_prompt("x").tolist()
    with pytest.raises(DataError, match="of several messages needs a chat template") as caught:
        ours.encode_prompt([{"role": "system", "content": "s"}, user])
    assert "the roles system, user" in str(caught.value)


def test_templates_have_the_filters_blocks_and_functions_that_transformers_gives_them(
    tmp_path, auto
):
    template = (
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}\n"
        "  {% generation %}{{ m | tojson }}{% endgeneration %}\n{% endfor %}\n"
        "{% set ns = namespace(n=1) %}{% set ns.n = 2 %}{{ ns.n }}"
        "{{ tools is none }}{{ eos_token }}"
    )
    folder = foreign_folder(tmp_path / "m", chat_template=template)
    expected = auto(folder).apply_chat_template(
        [{"role": "user", "content": "<é>"}], add_generation_prompt=True, return_dict=False
    )
    assert Tokenizer.load(folder).encode_prompt("<é>").tolist() == expected


PRINTS = "{{ messages[0].content | trim }}"


def test_prompts_do_not_change_with_the_day(tmp_path):
    dated = foreign_folder(
        tmp_path / "dated", chat_template="{{ strftime_now('%d %b %Y') }}" + PRINTS
    )
    fixed = foreign_folder(tmp_path / "fixed", chat_template="26 Jul 2024" + PRINTS)
    assert Tokenizer.load(dated).encode_prompt("x").tolist() == (
        Tokenizer.load(fixed).encode_prompt("x").tolist()
    )


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('system turn needed') }}",
        "{{ messages[0].absent.deep }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
    ],
)
def test_a_template_that_refuses_or_reaches_out_is_a_data_error(tmp_path, template):
    tokenizer = Tokenizer.load(foreign_folder(tmp_path / "m", chat_template=template))
    with pytest.raises(DataError, match="the chat template fails"):
        tokenizer.encode_prompt("x")
    assert len(tokenizer.encode_prompt("x", "never"))


def test_a_chat_template_that_leaves_the_prompt_out_is_refused(tmp_path):
    template = "<user>{{ messages[0].text }}</user>"
    tokenizer = Tokenizer.load(foreign_folder(tmp_path / "m", chat_template=template))
    with pytest.raises(DataError, match="it prints the same text for every prompt"):
        tokenizer.encode_prompt("x")
    trims = Tokenizer.load(foreign_folder(tmp_path / "n", chat_template=PRINTS))
    assert trims.encode_prompt(" x\n").tolist() == trims.encode_prompt("x").tolist()


def test_a_template_that_does_not_parse_is_a_data_error(tmp_path):
    with pytest.raises(DataError, match=r"tokenizer_config\.json: the chat template fails"):
        Tokenizer.load(foreign_folder(tmp_path / "m", chat_template="{% for %}"))


def test_always_without_a_template_says_what_to_set(tmp_path):
    tokenizer = Tokenizer.load(foreign_folder(tmp_path / "m"))
    with pytest.raises(DataError, match=r"data\.chat_template=auto"):
        tokenizer.encode_prompt("x", "always")


@pytest.mark.parametrize(
    ("files", "stop_ids"),
    [
        ({}, (1,)),
        ({"generation_config.json": {"eos_token_id": [3, 1, 2]}}, (1, 3, 2)),
        ({"generation_config.json": {}, "config.json": {"eos_token_id": 3}}, (1, 3)),
        ({"config.json": {"text_config": {"eos_token_id": 2}}}, (1, 2)),
    ],
)
def test_stop_tokens_are_the_tokenizers_and_the_models(tmp_path, files, stop_ids):
    folder = foreign_folder(tmp_path / "m")
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    tokenizer = Tokenizer.load(folder)
    assert (tokenizer.end_id, tokenizer.stop_ids) == (1, stop_ids)


def test_a_folder_without_any_end_token_is_refused(tmp_path):
    folder = foreign_folder(tmp_path / "m", eos_token=None)
    with pytest.raises(DataError, match="nothing says which token ends"):
        Tokenizer.load(folder)


def test_a_folder_with_a_slow_tokenizer_only_says_how_to_convert_it(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(DataError, match=r"no tokenizer\.json[\s\S]*tokenizer\.model[\s\S]*convert"):
        Tokenizer.load(tmp_path)
    with pytest.raises(DataError, match="no such model folder"):
        Tokenizer.load(tmp_path / "none")


def test_broken_files_are_named(tmp_path):
    folder = foreign_folder(tmp_path / "m")
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(DataError, match=r"tokenizer_config\.json: cannot be read as JSON"):
        Tokenizer.load(folder)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"tokenizer\.json: the tokenizer cannot be read"):
        Tokenizer.load(folder)


def test_tools_are_never_left_out_where_there_is_no_chat_template(tmp_path):
    spec = CharTokenizer(kind="char", alphabet="0123456789+=")
    tokenizer = Tokenizer.load(fresh(tmp_path / "m", spec, rows_of(("1+1=", "2"))))
    for prompt in ("1+1=", [{"role": "user", "content": "1+1="}]):
        assert len(tokenizer.encode_prompt(prompt)) == 4
        with pytest.raises(DataError, match="a conversation with tools needs a chat template"):
            tokenizer.encode_prompt(prompt, tools=[TOOL])
        with pytest.raises(DataError, match=r"data\.chat_args are variables of a chat template"):
            tokenizer.encode_prompt(prompt, args={"enable_thinking": False})


def test_prompts_that_are_too_long_are_left_out_and_counted_never_cut(tmp_path):
    spec = CharTokenizer(kind="char", alphabet="0123456789+=")
    rows = rows_of(("1+1=", "2"), ("1+1+1+1+1=", "5"), ("12+1=", "13"))
    tokenizer = Tokenizer.load(fresh(tmp_path / "m", spec, rows))
    found = encode_prompts(rows, tokenizer, up_to(5))
    assert [item.group for item in found.items()] == ["0/0", "0/2"]
    assert found.num_too_long == 1
    with pytest.raises(DataError, match="the shortest has 4"):
        encode_prompts(rows, tokenizer, up_to(3))


def test_prompts_that_are_too_long_are_cut_at_the_left_or_refused_on_request(tmp_path):
    spec = CharTokenizer(kind="char", alphabet="0123456789+=")
    rows = rows_of(("1+1=", "2"), ("1+2+3+4=", "10"))
    tokenizer = Tokenizer.load(fresh(tmp_path / "m", spec, rows))
    cut = DataConfig(train="x", max_prompt_tokens=4, overlong="cut_left")
    found = encode_prompts(rows, tokenizer, cut)
    assert [tokenizer.decode(item.prompt_ids) for item in found.items()] == ["1+1=", "3+4="]
    assert found.num_too_long == 1
    refused = cut.model_copy(update={"overlong": "refuse"})
    with pytest.raises(DataError, match=r"d\.jsonl:2: the prompt is too long") as caught:
        encode_prompts(rows, tokenizer, refused)
    assert "set data.max_prompt_tokens=8 or more" in str(caught.value)


def test_a_conversation_that_the_template_refuses_is_a_bad_row_with_its_line(tmp_path):
    template = (
        "{% if messages[0].role == 'tool' %}{{ raise_exception('no tool first') }}{% endif %}"
    )
    tokenizer = Tokenizer.load(foreign_folder(tmp_path / "m", chat_template=template + CHAT))
    row = rows_of(("x", "y"))[0]
    rows = [replace(row, messages=({"role": "tool", "content": "x"},)), row]
    with pytest.raises(DataError, match=r"d\.jsonl:1: the chat template fails") as caught:
        encode_prompts(rows, tokenizer, up_to(99))
    assert "no tool first" in str(caught.value)


def test_a_model_folder_of_the_users_is_checked_before_anything_heavy(tmp_path):
    folder = foreign_folder(tmp_path / "m")
    role = RoleConfig(model=str(folder))
    with pytest.raises(ConfigError, match=r"roles\.actor\.model: the model folder lacks config"):
        prepare_model_folder(role, tmp_path / "unused", [])
    (folder / "config.json").write_text("{}")
    (folder / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"no safetensors[\s\S]*pickled weights are never loaded"):
        prepare_model_folder(role, tmp_path / "unused", [])
    (folder / "model.safetensors").write_bytes(b"")
    assert prepare_model_folder(role, tmp_path / "unused", []) == folder
    with pytest.raises(ConfigError, match=r"roles\.judge\.model: no such model folder"):
        check_model_folder(tmp_path / "none", where="roles.judge.model")


def test_a_role_without_model_or_tokenizer_says_what_it_needs(tmp_path):
    with pytest.raises(ConfigError, match=r"roles\.actor\.model: the role has no model"):
        prepare_model_folder(RoleConfig(), tmp_path / "m", [])
    with pytest.raises(ConfigError, match=r"roles\.actor\.tokenizer: a new model needs"):
        prepare_model_folder(RoleConfig(model=FreshModel()), tmp_path / "m", [])


def test_the_data_package_imports_neither_torch_nor_transformers():
    program = (
        "import sys; import flowrl.data;"
        "print(sorted({'torch', 'transformers', 'ray'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert result.stdout.strip() == b"[]"
