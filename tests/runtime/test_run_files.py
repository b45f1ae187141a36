"""A run remembers the files that it reads, and says of each what it was and is."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

import flowrl as fl
from flowrl import api
from flowrl.errors import CheckpointError
from flowrl.files import sha256_file
from flowrl.runtime.checkpoint.run_files import (
    INPUTS,
    InputFiles,
    fingerprint_of,
    imported_files,
    worker_files,
)
from tests.runtime.tiny_runs import tiny_config

PROGRAM = """
import flowrl as fl
from losses_of_mine import my_loss
from shared_by_mine import LOW

@fl.workflow
def mine(prompts: fl.Prompts, actor: fl.Policy, verifier: fl.Reward):
    rollout = actor.generate(prompts)
    actor.update(rollout, verifier.score(rollout), loss=my_loss(low=LOW))
"""

LOSS = """
import flowrl as fl

@fl.loss.own(needs=("advantages",))
def my_loss(logprobs, batch, *, low=0.1):
    return -logprobs * batch.advantages
"""

PLAY = """
import flowrl as fl

@fl.workflow
def play(prompts: fl.Prompts, actor: fl.Policy, game: fl.Environment, verifier: fl.Reward):
    rollout, scores = fl.interact(actor, game, prompts, max_turns=2)
    both = fl.weighted_sum((scores, 0.5), (verifier.score(rollout), 0.5))
    actor.update(rollout, both)
"""

SHAPE = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 16,
    "vocab_size": 13,
    "max_position_embeddings": 16,
    "tie_word_embeddings": True,
}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with files of every kind that a run reads."""
    files = {
        "mine.py": PROGRAM,
        "lib/losses_of_mine.py": LOSS,  # not beside, so that only the graph says where it is
        "shared_by_mine.py": "LOW = 0.2\n",
        "rewards/score.py": "from near import bonus\n\ndef score(response):\n    return bonus\n",
        "rewards/near.py": "bonus = 1.0\n",
        "train.jsonl": '{"prompt": "1+1=", "answer": "2"}\n',
        "held_out.jsonl": '{"prompt": "2+1=", "answer": "3"}\n',
        "model/config.json": json.dumps(SHAPE),
        "model/generation_config.json": '{"eos_token_id": 12}',
        "model/tokenizer.json": "{}",
        "model/tokenizer_config.json": "{}",
        "model/chat_template.jinja": "{{ messages[0].content }}",
        "model/model.safetensors": "weights",
        "model/README.md": "a model",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "run").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "lib")
    for module in ("losses_of_mine", "shared_by_mine"):  # of another test's project
        monkeypatch.delitem(sys.modules, module, raising=False)
    return tmp_path


def config_of(project: Path) -> dict[str, Any]:
    """Of `mine` in the project."""
    config = tiny_config(project / "runs") | {"stages": ["mine"], "workflow": "mine.py"}
    config |= {"stage": {}, "args": {}}
    config["roles"] = {
        "actor": {"backend": "torch", "model": "model"},
        "verifier": {"backend": "verify"},
    }
    config["data"] = {"train": "train.jsonl", "eval": {"kind": "jsonl", "path": "held_out.jsonl"}}
    config["data"]["max_prompt_tokens"] = 8
    config["rewards"] = {"terms": [{"kind": "python", "function": "rewards/score.py:score"}]}
    config["eval"] = {"metric": "score"}
    return config


def files_of(project: Path, config: Mapping[str, Any] | None = None) -> InputFiles:
    compiled = api.compile(None, config or config_of(project))
    return InputFiles(compiled.config, compiled.stages, project / "run")


def changed(files: InputFiles) -> list[str]:
    found = files.changes()
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("file", "key"),
    [
        ("mine.py", "workflow"),
        ("lib/losses_of_mine.py", "workflow"),
        ("shared_by_mine.py", "workflow"),
        ("rewards/score.py", "rewards.terms.score.function"),
        ("rewards/near.py", "rewards.terms.score.function"),
        ("train.jsonl", "data.train"),
        ("held_out.jsonl", "data.eval.path"),
        ("model/config.json", "roles.actor.model"),
        ("model/generation_config.json", "roles.actor.model"),
        ("model/tokenizer.json", "roles.actor.model"),
        ("model/tokenizer_config.json", "roles.actor.model"),
        ("model/chat_template.jinja", "roles.actor.model"),
        ("model/model.safetensors", "roles.actor.model"),
    ],
)
def test_a_changed_a_missing_and_a_new_file_is_named_with_what_it_was_and_is(
    project: Path, file: str, key: str
):
    files = files_of(project)
    files.write()
    assert files.changes() == []
    path = project / file
    text, was = path.read_text(), fingerprint_of(path)

    path.write_text(text.replace(text[-1], " " if text[-1] != " " else "x"))  # of the same size
    assert path.stat().st_size == was.nbytes
    assert files.changes() == [f"{file} was {was}; is {fingerprint_of(path)} ({key})"]

    path.unlink()
    if not file.endswith(".py") and file != "model/config.json" and not file.endswith(".jsonl"):
        # What a configuration cannot be compiled without says so itself.
        assert files_of(project).changes() == [f"{file} was {was}; is not there ({key})"]

        files_of(project).write()
        path.write_text(text)
        assert files_of(project).changes() == [f"{file} was not there; is {was} ({key})"]


def test_every_file_that_has_changed_is_named_and_refused_with_the_way_out(project: Path):
    files = files_of(project)
    files.write()
    (project / "rewards/near.py").write_text("bonus = 2.0\n\n")
    (project / "model/generation_config.json").write_text('{"eos_token_id": [12, 3]}')
    with pytest.raises(CheckpointError) as caught:
        files.refuse_changes(changed(files))
    said = str(caught.value)
    assert "rewards/near.py was 12 bytes" in said
    assert "is 13 bytes" in said
    assert "model/generation_config.json was 20 bytes" in said
    assert "model/tokenizer.json" not in said
    assert "--accept-changes" in said
    assert "accept_changes=True" in said
    files.write()
    assert files.changes() == []
    files.refuse_changes([])


def test_what_a_run_does_not_read_may_change(project: Path):
    files = files_of(project)
    files.write()
    (project / "model/README.md").write_text("another")
    (project / "rewards/other.py").write_text("")
    assert files_of(project).changes() == []


def test_an_environment_and_the_terms_of_a_role_are_of_the_files_too(project: Path):
    (project / "play.py").write_text(PLAY)
    (project / "game.py").write_text(
        "class Game:\n    def reset(self, row): ...\n    def step(self, text): ...\n"
    )
    (project / "own.py").write_text("def own(response):\n    return 1.0\n")
    config = config_of(project) | {"stages": ["play"], "workflow": "play.py"}
    config["roles"]["game"] = {"backend": "environment", "environment": "game.py:Game"}
    term = {"kind": "python", "function": "own.py:own", "name": "mine"}
    config["roles"]["verifier"]["terms"] = [term]
    files = files_of(project, config)
    files.write()
    (project / "game.py").write_text("class Game: ...\n")
    (project / "own.py").write_text("def own(response):\n    return 2.5\n")
    named = {(change.partition(" was ")[0], change.rpartition(" ")[2]) for change in changed(files)}
    assert named == {
        ("game.py", "(roles.game.environment)"),
        ("own.py", "(roles.verifier.terms.mine.function)"),
    }


def test_files_that_workers_run_are_sent_to_them_and_have_checksums_in_the_run_folder(
    project: Path,
):
    compiled = api.compile(None, config_of(project))
    InputFiles(compiled.config, compiled.stages, project / "run").write()
    sent = [
        str(file.relative_to(project)) for file in worker_files(compiled.config, compiled.stages)
    ]
    assert sent == ["lib/losses_of_mine.py", "rewards/near.py", "rewards/score.py"]
    written = json.loads((project / "run" / "inputs.json").read_text())
    sums = {mark["sha256"] for of in written.values() for mark in of.values()}
    assert {sha256_file(project / name) for name in sent} <= sums


@pytest.mark.parametrize(
    ("environment", "is_compared"),
    [
        pytest.param("worlds_of_mine:World", True, id="a module of the user"),
        pytest.param("numpy:ndarray", False, id="an installed package"),
        pytest.param("nothing_like_it.inside:World", False, id="no module"),
        pytest.param("whatever a plug-in knows", False, id="no reference"),
    ],
)
def test_an_environment_of_a_module_is_compared_where_it_is_the_users(
    project: Path, environment: str, is_compared: bool
):
    (project / "lib" / "worlds_of_mine.py").write_text("class World: ...\n")
    (project / "play.py").write_text(PLAY)
    config = config_of(project) | {"stages": ["play"], "workflow": "play.py"}
    config["roles"]["game"] = {"backend": "environment", "environment": "play.py:play"}
    compiled = api.compile(None, config)
    game = compiled.config.roles["game"].model_copy(update={"environment": environment})
    roles = {**compiled.config.roles, "game": game}
    changed_config = compiled.config.model_copy(update={"roles": roles})
    files = InputFiles(changed_config, compiled.stages, project / "run")
    files.write()
    (project / "lib" / "worlds_of_mine.py").write_text("class World: pass\n")
    assert bool(files.changes()) is is_compared


def test_a_project_and_a_run_folder_may_be_moved(
    project: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
):
    files_of(project).write()
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "project"
    project.rename(elsewhere)
    monkeypatch.chdir(elsewhere)
    assert files_of(elsewhere).changes() == []


def test_the_folders_of_new_models_are_compared(tmp_path: Path):
    compiled = fl.compile(None, tiny_config(tmp_path / "runs"))
    files = tmp_path / "run" / "models" / "actor"
    files.mkdir(parents=True)
    (files / "tokenizer.json").write_text("{}")
    InputFiles(compiled.config, compiled.stages, tmp_path / "run").write()
    (files / "tokenizer.json").write_text("[]")
    (change,) = changed(InputFiles(compiled.config, compiled.stages, tmp_path / "run"))
    assert "models/actor/tokenizer.json was 2 bytes" in change
    assert change.endswith("(roles.actor.model)")


def test_a_run_of_before_files_were_written_down_is_not_compared(project: Path):
    assert files_of(project).changes() is None
    (project / "run" / INPUTS).write_text('{"data.train": {"train.jsonl": 7}}')
    with pytest.raises(CheckpointError, match="what the run began with cannot be read"):
        files_of(project).changes()


LARGE = 40 << 20


def cut(path: Path) -> None:
    with path.open("r+b") as stream:
        stream.truncate(LARGE - 1)


def written_at(place: int, nbytes: int = 1) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        with path.open("r+b") as stream:
            stream.seek(place)
            stream.write(b"x" * nbytes)

    return write


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(cut, id="size"),
        pytest.param(written_at(8 + 900_000), id="in the header"),
        pytest.param(written_at(LARGE - 1), id="the last byte"),
        pytest.param(written_at(LARGE // 2, LARGE // 60), id="a tensor"),
    ],
)
def test_large_weights_are_known_by_size_header_and_sampled_blocks(
    tmp_path: Path, change: Callable[[Path], None]
):
    path = tmp_path / "model.safetensors"
    with path.open("wb") as stream:
        stream.write((1_000_000).to_bytes(8, "little"))
        stream.truncate(LARGE)
    was = fingerprint_of(path)
    assert (was.nbytes, fingerprint_of(path)) == (LARGE, was)
    change(path)
    assert fingerprint_of(path) != was


def test_of_other_large_files_every_byte_counts(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    with path.open("wb") as stream:
        stream.truncate(LARGE)
    was = fingerprint_of(path)
    written_at(LARGE // 3 + 12345)(path)
    assert fingerprint_of(path) != was


def test_imported_files_are_the_users_own_and_all_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    files = {
        "start.py": (
            "import json, numpy, flowrl as fl\nimport beside\nfrom package import part\n"
            "def late():\n    import package.deep.end as end\n"
        ),
        "beside.py": "from start import late\n",  # in a circle
        "package/__init__.py": "",
        "package/part.py": "from . import other\nfrom .deep.end import x\n",
        "package/other.py": "this is no Python",
        "package/deep/__init__.py": "",
        "package/deep/end.py": "from ..upper import y\nimport nothing_like_it\n",
        "package/upper.py": "import working\n",
        "package/unused.py": "",
        "cwd/working.py": "",
        "cwd/flowrl/__init__.py": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path / "cwd")
    found = {path.resolve().relative_to(tmp_path).as_posix() for path in imported_files(
        tmp_path / "start.py"
    )}  # fmt: skip
    assert found == {
        "beside.py",
        "package/__init__.py",
        "package/part.py",
        "package/other.py",
        "package/deep/__init__.py",
        "package/deep/end.py",
        "package/upper.py",
        "cwd/working.py",
        "cwd/flowrl/__init__.py",
    }


def test_flowrl_itself_is_none_of_the_users_files(monkeypatch: pytest.MonkeyPatch):
    clone = Path(fl.__file__).parents[1]
    monkeypatch.chdir(clone)
    assert imported_files(clone / "examples" / "guess.py") == []
