"""Loading models: fresh and saved, and every folder that cannot be loaded."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
import transformers

from flowrl.errors import BackendError
from flowrl_backends.torch.model import (
    load_model,
    move_tensor,
    quiet_transformers,
    tokenizer_files,
)
from flowrl_backends.torch.packed_forward import supports_packing
from tests.torch_backend.trainer_fixtures import context


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = transformers.Qwen2Config(
        vocab_size=12,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        attention_dropout=0.9,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    config.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def numbers(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_a_fresh_model_depends_on_the_seed_alone(folder: Path) -> None:
    torch.manual_seed(1)
    first = numbers(load_model(context(folder)))
    torch.manual_seed(2)
    torch.rand(100)
    state = torch.get_rng_state()
    again = numbers(load_model(context(folder)))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first, again)
    assert not torch.equal(first, numbers(load_model(context(folder, seed=4))))


def test_types_and_gradients_are_as_asked(folder: Path) -> None:
    model = load_model(context(folder, dtype="bfloat16", trainable=False))
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert not any(p.requires_grad for p in model.parameters())
    fresh = numbers(load_model(context(folder)))
    assert torch.equal(numbers(model), fresh.bfloat16())


def test_dropout_is_off(folder: Path) -> None:
    model = load_model(context(folder))
    ids = torch.tensor([[2, 3, 4]])
    assert not model.training
    assert torch.equal(model(ids).logits, model(ids).logits)


def test_ordinary_calls_equal_transformers_sdpa(folder: Path) -> None:
    """A padded call must see its mask, and cached decoding its cache, as with plain SDPA."""
    model = load_model(context(folder))
    plain = transformers.Qwen2ForCausalLM._from_config(
        copy.deepcopy(model.config), attn_implementation="sdpa"
    )
    plain.load_state_dict(model.state_dict())
    plain.eval()
    assert supports_packing(model)
    ids = torch.tensor([[0, 0, 4, 5], [2, 3, 4, 5]])
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    with torch.no_grad():
        for own, other in (
            (model(ids).logits, plain(ids).logits),
            (model(ids, attention_mask=mask).logits, plain(ids, attention_mask=mask).logits),
        ):
            assert torch.equal(own, other)
        options = {"attention_mask": mask, "max_new_tokens": 5, "do_sample": False}
        assert torch.equal(model.generate(ids, **options), plain.generate(ids, **options))


def test_a_saved_model_is_loaded_without_a_word(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = load_model(context(folder))
    with quiet_transformers():
        model.save_pretrained(folder)
    assert torch.equal(numbers(model), numbers(load_model(context(folder, fresh=False, seed=8))))
    assert capfd.readouterr() == ("", "")


def test_only_tokenizer_files_are_taken_along(folder: Path) -> None:
    for name in ("tokenizer.json", "merges.txt", "modeling.py", "model.bin"):
        (folder / name).write_text("")
    assert [p.name for p in tokenizer_files(folder)] == ["tokenizer.json", "merges.txt"]


def test_a_missing_folder_config_or_weights_are_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(BackendError, match="no model folder") as caught:
        load_model(context(tmp_path / "absent"))
    assert caught.value.where == "roles.actor.model"
    (tmp_path / "bare").mkdir()
    with pytest.raises(BackendError, match=r"no config\.json"):
        load_model(context(tmp_path / "bare"))
    with pytest.raises(BackendError, match=r"no \*\.safetensors"):
        load_model(context(folder, fresh=False))


def test_pickled_weights_are_never_loaded(folder: Path) -> None:
    torch.save({}, folder / "pytorch_model.bin")
    with pytest.raises(BackendError, match=r"no \*\.safetensors") as caught:
        load_model(context(folder, fresh=False))
    assert "never loaded" in str(caught.value)


def test_damaged_or_incomplete_weights_are_refused(folder: Path) -> None:
    model = load_model(context(folder))
    model.save_pretrained(folder)
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:100])
    with pytest.raises(BackendError, match="cannot be loaded"):
        load_model(context(folder, fresh=False))
    weights.write_bytes(whole)
    config = json.loads((folder / "config.json").read_text())
    config["num_hidden_layers"] = 2
    config["layer_types"] = ["full_attention"] * 2
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(BackendError, match="lack 12 tensors") as caught:
        load_model(context(folder, fresh=False))
    assert "model.layers.1" in str(caught.value)


def test_a_config_of_an_unknown_architecture_is_refused(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "no_such_model"}')
    with pytest.raises(BackendError, match="cannot be loaded") as caught:
        load_model(context(folder))
    assert "no_such_model" in str(caught.value)
    (folder / "config.json").write_text("{")
    with pytest.raises(BackendError, match="cannot be loaded"):
        load_model(context(folder))


def test_code_in_the_folder_is_never_run(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "code.Config"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "code.py").write_text("raise SystemExit('the code was run')")
    with pytest.raises(BackendError, match="cannot be loaded"):
        load_model(context(folder))


def test_an_unknown_type_or_absent_device_is_refused(folder: Path) -> None:
    with pytest.raises(BackendError, match="parameter type"):
        load_model(context(folder, dtype="float8"))
    with pytest.raises(BackendError, match="on nosuch:0"):
        load_model(context(folder, device="nosuch:0"))


def test_moving_a_model_keeps_its_parameters_and_ties(folder: Path) -> None:
    """`meta` stands for a device whose tensors are not compatible with the CPU's."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    model = load_model(context(folder))
    before = {name: id(p) for name, p in model.named_parameters()}
    for tensor in (*model.parameters(), *model.buffers()):
        move_tensor(tensor, torch.device("meta"))
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert {b.device.type for b in model.buffers()} == {"meta"}
    assert {name: id(p) for name, p in model.named_parameters()} == before
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
