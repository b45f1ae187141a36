"""Saving, restoring, exporting and moving a trainer."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors import SafetensorError

from flowrl.backend.batch import SequenceBatch, TrainBatch
from flowrl.backend.protocols import OptimizerStep, UpdateSpec
from flowrl.errors import CheckpointError
from flowrl.ids import SampleId
from flowrl.specs import AdamW, CrossEntropy
from flowrl_backends.torch.trainer import TorchTrainer
from flowrl_backends.torch.weights import Average
from tests.torch_backend.trainer_fixtures import context

SCHEDULE = AdamW(learning_rate=1e-2, warmup_updates=2, schedule="cosine", weight_decay=0.01)


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    config = transformers.Qwen2Config(
        vocab_size=12,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=request.param,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    config.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    (tmp_path / "model" / "tokenizer_config.json").write_text('{"a": 1}')
    (tmp_path / "model" / "code.py").write_text("raise SystemExit")
    return tmp_path / "model"


def trainer_of(folder: Path, **changes: object) -> TorchTrainer:
    return TorchTrainer(context(folder, **changes))


def train(trainer: TorchTrainer, seeds: range) -> list[OptimizerStep]:
    steps = []
    for seed in seeds:
        draw = np.random.default_rng(seed)
        lengths = draw.integers(3, 9, 6)
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        mask = np.ones(offsets[-1], bool)
        mask[offsets[:-1]] = False
        batch = SequenceBatch(
            samples=tuple(SampleId(f"0/{i}/0") for i in range(6)),
            tokens=draw.integers(2, 12, offsets[-1]),
            offsets=offsets,
            response_mask=mask,
            groups=np.arange(6),
        )
        spec = UpdateSpec(
            loss=CrossEntropy(),
            kl=None,
            temperature=1.0,
            mini_batches=((0, 1, 2), (3, 4, 5)),
            micro_batch=2,
            max_tokens=16,
        )
        steps += trainer.update(TrainBatch(sequences=batch), spec)
    return steps


def bits(trainer: TorchTrainer) -> dict[str, bytes]:
    return {
        n: p.detach().view(torch.uint8).numpy().tobytes()
        for n, p in trainer.model.named_parameters()
    }


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_restored_trainer_goes_on_bit_for_bit(dtype: str, folder: Path, tmp_path: Path) -> None:
    straight = trainer_of(folder, dtype=dtype)
    straight.begin(SCHEDULE, num_updates=8)
    train(straight, range(2))
    straight.save(tmp_path / "saved")
    want_random = torch.rand(3)
    want = train(straight, range(2, 4))

    resumed = trainer_of(folder, dtype=dtype, seed=99)
    torch.manual_seed(12345)
    resumed.restore(tmp_path / "saved")
    assert torch.equal(torch.rand(3), want_random)
    assert train(resumed, range(2, 4)) == want
    assert bits(resumed) == bits(straight)


def test_parameters_are_restored_in_place(folder: Path, tmp_path: Path) -> None:
    trainer = trainer_of(folder)
    trainer.begin(SCHEDULE, 8)
    before = bits(trainer)
    trainer.save(tmp_path / "saved")
    model, places = trainer.model, [p.data_ptr() for p in trainer.model.parameters()]
    train(trainer, range(1))
    assert bits(trainer) != before
    trainer.restore(tmp_path / "saved")
    assert trainer.model is model
    assert [p.data_ptr() for p in trainer.model.parameters()] == places
    assert bits(trainer) == before


def test_a_checkpoint_before_any_stage_holds_the_parameters_only(
    folder: Path, tmp_path: Path
) -> None:
    trainer = trainer_of(folder)
    trainer.save(tmp_path / "saved")
    other = trainer_of(folder, seed=4)
    other.restore(tmp_path / "saved")
    assert bits(other) == bits(trainer)


def test_a_checkpoint_holds_no_pickle(folder: Path, tmp_path: Path) -> None:
    trainer = trainer_of(folder)
    trainer.begin(SCHEDULE, 8)
    train(trainer, range(1))
    trainer.save(tmp_path / "saved")
    saved = tmp_path / "saved"
    assert sorted(p.name for p in saved.iterdir()) == [
        "model",
        "trainer.json",
        "trainer.safetensors",
    ]
    assert {p.suffix for p in (saved / "model").iterdir()} == {".json", ".safetensors"}
    state = json.loads((tmp_path / "saved" / "trainer.json").read_text())
    assert state["updates"] == 2
    assert state["optimizer"]["kind"] == "adamw"


def test_a_missing_damaged_or_foreign_checkpoint_is_refused(folder: Path, tmp_path: Path) -> None:
    trainer = trainer_of(folder)
    before = bits(trainer)
    with pytest.raises(CheckpointError, match=r"trainer\.json"):
        trainer.restore(tmp_path / "nothing")
    saved = tmp_path / "saved"
    trainer.save(saved)
    whole = (saved / "trainer.safetensors").read_bytes()
    (saved / "trainer.safetensors").write_bytes(whole[:-5])
    with pytest.raises(CheckpointError, match=r"trainer\.safetensors"):
        trainer.restore(saved)
    (saved / "trainer.safetensors").write_bytes(whole)
    other = trainer_of(folder, dtype="bfloat16")
    with pytest.raises(CheckpointError, match="another model"):
        other.restore(saved)
    (saved / "trainer.json").write_text('{"format": 99}')
    with pytest.raises(CheckpointError, match="another format"):
        trainer.restore(saved)
    assert bits(trainer) == before


def test_a_checkpoint_holds_a_folder_that_transformers_loads(folder: Path, tmp_path: Path) -> None:
    trainer = trainer_of(folder)
    trainer.begin(SCHEDULE, 8)
    train(trainer, range(1))
    trainer.save(tmp_path / "saved")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved" / "model")
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(model.get_parameter(name), parameter)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_exported_folder_loads_with_transformers(
    dtype: str, folder: Path, tmp_path: Path
) -> None:
    trainer = trainer_of(folder, dtype=dtype)
    trainer.begin(SCHEDULE, 8)
    train(trainer, range(1))
    out = tmp_path / "exported"
    trainer.export(out)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    assert loaded.dtype == trainer.model.dtype
    ids = torch.randint(2, 12, (1, 50), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, trainer.model(ids).logits)
    assert (out / "tokenizer.json").read_text() == "{}"
    assert (out / "tokenizer_config.json").read_text() == '{"a": 1}'
    assert not (out / "code.py").exists()
    assert not list(out.glob("*.bin"))
    config = json.loads((out / "config.json").read_text())
    assert "flowrl" not in json.dumps(config)
    tied = loaded.get_input_embeddings().weight is loaded.get_output_embeddings().weight
    assert tied == loaded.config.tie_word_embeddings


def test_a_trainer_opens_an_exported_folder(folder: Path, tmp_path: Path) -> None:
    trainer = trainer_of(folder)
    trainer.export(tmp_path / "exported")
    again = trainer_of(tmp_path / "exported", fresh=False, seed=77)
    assert bits(again) == bits(trainer)


def test_moving_off_and_back_changes_nothing_on_the_cpu(folder: Path) -> None:
    moved, still = trainer_of(folder), trainer_of(folder)
    for trainer in (moved, still):
        trainer.begin(SCHEDULE, 8)
        train(trainer, range(1))
    for _ in range(2):
        moved.offload()
    for _ in range(2):
        moved.reload()
    assert train(moved, range(1, 2)) == train(still, range(1, 2))


def test_closing_twice_is_harmless(folder: Path) -> None:
    trainer = trainer_of(folder)
    trainer.close()
    trainer.close()
    trainer.offload()
    assert not hasattr(trainer, "model")


def test_a_full_disk_is_an_error_of_the_system(tmp_path: Path, folder: Path, monkeypatch):
    def full(*args: object) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("flowrl_backends.torch.checkpoint.save_file", full)
    with pytest.raises(OSError, match="No space left on device") as caught:
        trainer_of(folder).save(tmp_path / "state")
    assert caught.value.errno == errno.ENOSPC


def numbers(trainer: TorchTrainer) -> dict[str, torch.Tensor]:
    return {n: p.detach().float().clone() for n, p in trainer.model.named_parameters()}


def test_an_average_of_weights_is_that_of_its_formula_in_float32(
    folder: Path, tmp_path: Path
) -> None:
    other, own = trainer_of(folder, seed=1), trainer_of(folder, seed=2)
    other.export(tmp_path / "other")
    before, loaded = numbers(own), numbers(other)
    own.load(tmp_path / "other", 0.75)
    for name, value in numbers(own).items():
        torch.testing.assert_close(
            value, 0.75 * before[name] + 0.25 * loaded[name], rtol=1e-7, atol=1e-9
        )


def test_two_names_of_one_tensor_are_averaged_once() -> None:
    tied = torch.ones(2)
    average = Average()
    average.begin(0.5)
    for name in ("head", "embedding"):
        average.take({"head": tied, "embedding": tied}, {name: torch.zeros(2)})
    assert tied.tolist() == [0.5, 0.5]


def test_a_16_bit_average_does_not_stand_still_and_goes_on_bit_for_bit(
    folder: Path, tmp_path: Path
) -> None:
    other = trainer_of(folder, seed=1)
    other.export(tmp_path / "other")
    own = trainer_of(folder, seed=2, dtype="bfloat16")
    before, loaded = numbers(own), numbers(other)
    for step in range(50):
        own.load(tmp_path / "other", 0.99)
        if step == 20:
            own.save(tmp_path / "saved")
    resumed = trainer_of(folder, seed=3, dtype="bfloat16")
    resumed.restore(tmp_path / "saved")
    for _ in range(29):
        resumed.load(tmp_path / "other", 0.99)
    assert bits(resumed) == bits(own)
    for name, value in numbers(own).items():
        exact = 0.99**50 * before[name] + (1 - 0.99**50) * loaded[name]
        # One rounding of the float32 average, not fifty.
        torch.testing.assert_close(value, exact.bfloat16().float(), rtol=2**-7, atol=1e-6)


def test_a_16_bit_average_begins_anew_with_weights_that_were_trained_since(
    folder: Path, tmp_path: Path
) -> None:
    trainer_of(folder, seed=1).export(tmp_path / "other")
    trainer = trainer_of(folder, seed=2, dtype="bfloat16")
    trainer.load(tmp_path / "other", 0.5)
    trainer.begin(SCHEDULE, num_updates=8)
    train(trainer, range(1))
    trained, loaded = numbers(trainer), numbers(trainer_of(folder, seed=1))
    trainer.load(tmp_path / "other", 0.5)
    for name, value in numbers(trainer).items():
        exact = 0.5 * trained[name] + 0.5 * loaded[name]
        assert torch.equal(value, exact.bfloat16().float())


def test_a_reset_optimizer_begins_anew_with_the_schedule_going_on(
    folder: Path, tmp_path: Path
) -> None:
    trainer = trainer_of(folder)
    trainer.begin(SCHEDULE, num_updates=8)
    train(trainer, range(1))
    trainer.save(tmp_path / "saved")
    trainer.reset_optimizer()
    rates = [step.learning_rate for step in train(trainer, range(1, 2))]
    # The same weights with new moments, at the same place of the schedule.
    fresh = trainer_of(folder)
    fresh.load(tmp_path / "saved" / "model")
    fresh.begin(SCHEDULE, num_updates=8)
    assert fresh._optimizer is not None
    fresh._optimizer.updates = 2
    assert [step.learning_rate for step in train(fresh, range(1, 2))] == rates
    assert bits(fresh) == bits(trainer)
    kept = trainer_of(folder)
    kept.restore(tmp_path / "saved")
    train(kept, range(1, 2))
    assert bits(kept) != bits(trainer)
