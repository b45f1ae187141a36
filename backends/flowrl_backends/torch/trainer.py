"""The trainer: predictions and optimizer updates of a Transformers model in this process.

Invariants:

- An update's gradient is that of the padded, unpacked computation; it depends on the split into
  micro-batches only by rounding, because every denominator counts the whole mini-batch.
- Equal inputs give bit-identical results on a CPU with one thread.
- A gradient that is not finite is never applied; the step says `skipped`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from flowrl.backend.batch import Floats, Ints, SequenceBatch, TrainBatch
from flowrl.backend.protocols import Head, OptimizerStep, PolicyContext, UpdateSpec
from flowrl.backend.weights import FileBuckets
from flowrl.errors import BackendError, CheckpointError
from flowrl.specs import AdamW, spec_from_json
from flowrl_backends.torch import checkpoint
from flowrl_backends.torch.model import (
    load_model,
    move_tensor,
    quiet_transformers,
    tokenizer_files,
)
from flowrl_backends.torch.optimizer import Optimizer
from flowrl_backends.torch.predict import closed, distributions, predict_all, squares
from flowrl_backends.torch.ranks import Ranks, Shard
from flowrl_backends.torch.recompute import recomputed_layers
from flowrl_backends.torch.updates import Objective, update_together
from flowrl_backends.torch.weights import Average, load_weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_STATE, _TENSORS, _MODEL = "trainer.json", "trainer.safetensors", "model"
_FORMAT = 2
_BUCKET_BYTES = 512 << 20
"""Bytes of the files of an export; of a single larger tensor, its own size."""


class TorchTrainer:
    """Trains a policy, a critic or a reward model; implements `TrainBackend` of the protocols.

    Lifecycle: `begin` once a stage, then `update` any number of times; `logprobs` (of a policy),
    `values` and `scores` (of a critic or reward model), `export`, `load` and `save` at any time;
    `restore` in place of `begin` to go on; `close` at the end.

        trainer = TorchTrainer(context)
        trainer.begin(AdamW(learning_rate=2e-4), num_updates=100)
        steps = trainer.update(batch, spec)

    Parameters in bfloat16 have float32 masters in the optimizer. float16 parameters are for
    logprobs only: without loss scaling their gradients underflow, so training them is refused.

    Args:
        context: The model to load and its device.
        skip_zero: True to skip samples whose advantages are all 0, if the loss is proportional to
            the advantage and has no KL term. They count in denominators, so loss and gradient are
            the same. Metrics of the loss (ratios, clip fractions, entropy) are then means over the
            samples that were computed, and are absent if there are none.
        shard: What is divided over the ranks of `context.rank`.

    Attributes:
        model: The model; an engine in this process may read its parameters in place. They are the
            same objects for the trainer's life.
    """

    model: PreTrainedModel

    def __init__(
        self, context: PolicyContext, *, skip_zero: bool = True, shard: Shard = "full"
    ) -> None:
        if context.trainable and context.dtype == "float16":
            raise BackendError(
                "float16 parameters cannot be trained here",
                where=f"roles.{context.role}.dtype",
                found="float16",
                expected="float32 or bfloat16",
            )
        if context.num_threads > 0:
            torch.set_num_threads(context.num_threads)
        self.model = load_model(context)
        from flowrl_backends.torch.selfcheck import check_packing

        check_packing(self.model, context.head, context.max_length)
        self._context = context
        self._device = torch.device(context.device)
        self._ranks = Ranks(context.rank, self._device)
        self._ranks.divide(self.model, context.head, shard)
        self._skip_zero = skip_zero
        self._optimizer: Optimizer | None = None
        self._average = Average()
        self._closed = False

    def begin(self, optimizer: AdamW, num_updates: int) -> None:
        """Starts a stage: a new optimizer; `num_updates` is the length of its schedule."""
        self._optimizer = self._new_optimizer(optimizer, num_updates)
        self._average = Average()  # a later one begins with the weights that are trained now

    def _new_optimizer(self, spec: AdamW, num_updates: int) -> Optimizer:
        if not self._context.trainable:
            raise BackendError(
                "this policy was loaded without an optimizer", where=f"roles.{self._context.role}"
            )
        return Optimizer(dict(self.model.named_parameters()), spec, num_updates)

    def logprobs(self, batch: SequenceBatch, temperature: float) -> Floats:
        """Returns float32 `[T]`, the logprob of each response token, else 0; no gradient.

        Raises:
            BackendError: The model ends in a value head, or its vocabulary lacks a token.
        """
        self._require("lm", "logprobs", batch)
        return predict_all(
            self.model, batch, _answered(batch), "logprobs", temperature, ranks=self._ranks
        )

    def distributions(self, batch: SequenceBatch, temperature: float) -> Floats:
        """Returns float32 `[R, V]`, logprobs of the whole vocabulary at each response token.

        Raises:
            BackendError: The model ends in a value head, or its vocabulary lacks a token.
        """
        self._require("lm", "distributions", batch)
        return distributions(self.model, batch, temperature, ranks=self._ranks)

    def squares(self, batch: SequenceBatch, temperature: float) -> Floats:
        """Returns float32 `[T]`, the sum of squared probabilities at each response token.

        Raises:
            BackendError: The model ends in a value head, or its vocabulary lacks a token.
        """
        self._require("lm", "squared probabilities", batch)
        return squares(self.model, batch, temperature, ranks=self._ranks)

    def values(self, batch: SequenceBatch) -> Floats:
        """Returns float32 `[T]`, the value of the state before each response token, else 0.

        Raises:
            BackendError: The model has no value head, or its vocabulary lacks a token.
        """
        self._require("value", "values", batch)
        return predict_all(self.model, batch, _answered(batch), "values", ranks=self._ranks)

    def scores(self, batch: SequenceBatch) -> Floats:
        """Returns float32 `[N]`, the value head's output at each sample's last token.

        Raises:
            BackendError: The model has no value head, or its vocabulary lacks a token.
        """
        self._require("value", "scores", batch)
        longer = closed(batch)
        found = predict_all(self.model, longer, np.arange(len(batch)), "scores", ranks=self._ranks)
        return found[longer.response_mask]

    def token_scores(self, batch: SequenceBatch) -> Floats:
        """Returns float32 `[T]`, the value head's output at each response token, else 0.

        Raises:
            BackendError: The model has no value head, or its vocabulary lacks a token.
        """
        self._require("value", "scores", batch)
        places = np.flatnonzero(batch.response_mask)
        longer = closed(batch, places)
        found = predict_all(self.model, longer, _answered(batch), "scores", ranks=self._ranks)
        scores = np.zeros(len(batch.tokens), np.float32)
        scores[places] = found[longer.response_mask]
        return scores

    def _require(self, head: Head, wanted: str, batch: SequenceBatch) -> None:
        """Checks that the model has the required head and every token of a batch."""
        if self._context.head != head:
            raise BackendError(
                f"the model gives no {wanted}",
                where=f"roles.{self._context.role}",
                found=f"head {self._context.head}",
                expected=f"head {head}",
            )
        size = int(self.model.config.vocab_size)
        least, most = (int(f(batch.tokens, initial=0)) for f in (np.min, np.max))
        if least < 0 or most >= size:
            raise BackendError(
                "a token id is outside the model's vocabulary",
                where=f"roles.{self._context.role}",
                found=f"ids {least} to {most}",
                expected=f"0 to {size - 1}",
                hint="a policy can draw every row of its embedding: save this model again with an "
                "embedding of as many rows as the policy's",
            )

    def update(self, batch: TrainBatch, spec: UpdateSpec) -> list[OptimizerStep]:
        """Makes one optimizer update a mini-batch, in order.

        Metrics of each step: those of the loss; of a policy, `entropy` (of the temperature-scaled
        distribution at response tokens) and `entropy_estimate` (-mean logprob), `kl` to the
        reference where a KL term is given, and those of `flowrl.algo.kl` if the batch has
        behaviour logprobs; of a critic, `value_explained_variance` if the returns vary;
        `num_samples`, and of these `samples_computed` and `samples_skipped`; `tokens_computed`, the
        response tokens that the metrics are of; `positions`, how many positions the model ran over.

        A loss on pairs reads rows 2k and 2k + 1 as a pair, the preferred one first; a micro-batch
        holds at least one pair.

        Raises:
            BackendError: `begin` was not called, the loss does not fit the model's head, the
                vocabulary lacks a token, a field that the loss reads is missing, samples are not
                the pairs that it reads, a mini-batch has no response token, or the model's layers
                cannot be recomputed.
        """
        return [step for (step,) in self.update_sum([(batch, spec)])]

    def update_sum(
        self, terms: Sequence[tuple[TrainBatch, UpdateSpec]]
    ) -> list[list[OptimizerStep]]:
        """Makes one optimizer update of the k-th mini-batches of all terms together, in order.

        Raises:
            BackendError: As `update`.
        """
        where = f"roles.{self._context.role}"
        if self._optimizer is None:
            raise BackendError("update before begin", where=where)
        objectives = []
        for batch, spec in terms:
            wanted = spec.loss.predicts
            head: Head = "lm" if wanted == "logprobs" else "value"
            self._require(head, f"{wanted}, as {spec.loss} reads", batch.sequences)
            objectives.append(
                Objective.of(
                    batch,
                    spec,
                    self.model,
                    where=where,
                    skip_zero=self._skip_zero,
                    ranks=self._ranks,
                )
            )
        mini_batches = zip(*(spec.mini_batches for _, spec in terms), strict=True)
        recomputes = (spec.recompute for _, spec in terms if spec.recompute != "none")
        with self._recomputing(next(recomputes, "none")):
            return [
                update_together(self._optimizer, list(zip(objectives, rows, strict=True)))
                for rows in mini_batches
            ]

    def _recomputing(self, recompute: str) -> AbstractContextManager[None]:
        if recompute == "none":
            return nullcontext()
        if recompute != "full":
            raise BackendError(
                f"the torch trainer has no {recompute} recompute",
                where=f"roles.{self._context.role}.recompute",
                found=recompute,
                expected="none or full",
            )
        return recomputed_layers(self.model)

    def export(self, folder: Path) -> None:
        """Writes a Hugging Face folder (safetensors, config, tokenizer files) into `folder`."""
        parameters = self._ranks.whole(self.model.state_dict(keep_vars=True))
        if not self._ranks.is_first:
            return
        folder.mkdir(parents=True, exist_ok=True)
        given = parameters if self._ranks.size > 1 else None
        with quiet_transformers(), checkpoint.system_errors(folder):
            self.model.save_pretrained(folder, state_dict=given, max_shard_size=_BUCKET_BYTES)
        checkpoint.copy_files(tokenizer_files(self._context.model), folder)
        checkpoint.flush_folder(folder)

    def load(self, folder: Path, decay: float = 0.0) -> None:
        """Loads the weights of a folder that `export` wrote, in place.

        Nothing is changed unless every name and shape matches. The optimizer's moments are kept.

        Args:
            decay: Above 0, each weight becomes `decay * own + (1 - decay) * loaded`, in float32.

        Raises:
            BackendError: The weights cannot be read or belong to another model.
        """
        buckets = FileBuckets(folder)
        if decay:
            self._average.begin(decay)
            load_weights(self.model, buckets, role=self._context.role, average=self._average)
        else:
            load_weights(self.model, buckets, role=self._context.role)
            self._average = Average()
        if self._optimizer is not None:
            self._optimizer.take_parameters()

    def reset_optimizer(self) -> None:
        """Forgets the optimizer's moments; its schedule goes on.

        Raises:
            BackendError: `begin` was not called.
        """
        if self._optimizer is None:
            raise BackendError(
                "there is no optimizer to reset", where=f"roles.{self._context.role}"
            )
        self._optimizer.reset()

    def save(self, folder: Path) -> None:
        """Writes parameters, optimizer and random state into `folder`: safetensors and JSON.

        `folder/model` is the folder that `export` writes, so that `from_pretrained` loads it.
        """
        self.export(folder / _MODEL)
        tensors: dict[str, torch.Tensor] = {}
        state: dict[str, object] = {
            "format": _FORMAT,
            "dtype": str(self.model.dtype),
            "optimizer": None,
        }
        if self._optimizer is not None:
            tensors |= {f"optimizer.{n}": t for n, t in self._optimizer.tensors().items()}
            state["optimizer"] = self._optimizer.spec.to_json()
            state["num_updates"] = self._optimizer.num_updates
            state["updates"] = self._optimizer.updates
        tensors |= {f"average.{n}": t for n, t in self._average.kept.items()}
        tensors |= {f"random.{n}": t for n, t in _random_state(self._device).items()}
        tensors = self._ranks.whole(tensors)
        if not self._ranks.is_first:
            return
        checkpoint.write_tensors(folder / _TENSORS, tensors)
        checkpoint.write_json(folder / _STATE, state)
        checkpoint.flush_folder(folder)

    def restore(self, folder: Path) -> None:
        """Restores the state that `save` wrote; the next update is bit-identical.

        Parameters are overwritten in place, and the saved optimizer is created again, so `begin`
        need not have been called.

        Raises:
            CheckpointError: A file is missing or damaged, or belongs to another model.
        """
        state = checkpoint.read_json(folder / _STATE)
        if state.get("format") != _FORMAT:
            raise CheckpointError(
                f"{folder} is of another format",
                found=str(state.get("format")),
                expected=str(_FORMAT),
            )
        if state.get("dtype") != str(self.model.dtype):
            raise CheckpointError(
                f"{folder} belongs to another model",
                found=f"parameters of type {state.get('dtype')}",
                expected=str(self.model.dtype),
            )
        parts: dict[str, dict[str, torch.Tensor]] = {"optimizer": {}, "average": {}, "random": {}}
        for name, tensor in checkpoint.read_tensors(folder / _TENSORS).items():
            part, _, rest = name.partition(".")
            parts[part][rest] = tensor
        try:
            load_weights(self.model, FileBuckets(folder / _MODEL), role=self._context.role)
        except BackendError as error:
            raise CheckpointError(
                error.what,
                where=str(folder / _MODEL),
                found=error.found,
                expected=error.expected,
                hint=error.hint,
            ) from error
        self._average = Average(parts["average"])
        self._optimizer = None
        spec = state["optimizer"]
        if isinstance(spec, dict):
            optimizer = self._new_optimizer(_adamw(spec), int(str(state["num_updates"])))
            optimizer.load(parts["optimizer"], int(str(state["updates"])))
            self._optimizer = optimizer
        _set_random_state(self._device, parts["random"])

    def offload(self) -> None:
        """Moves parameters and optimizer to host memory; on the CPU there is nothing to move."""
        self._move(torch.device("cpu"))

    def reload(self) -> None:
        """Moves parameters and optimizer back to the device; idempotent."""
        self._move(self._device)

    def _move(self, device: torch.device) -> None:
        if self._device.type == "cpu" or self._closed:
            return
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            move_tensor(tensor, device)
        if self._optimizer is not None:
            self._optimizer.to(device)
        if device.type == "cpu":
            release = getattr(_module(self._device), "empty_cache", None)
            if release is not None:
                release()

    def close(self) -> None:
        """Frees everything; idempotent."""
        if not self._closed:
            self._closed = True
            self._ranks.close()
            self._optimizer = None
            del self.model


def _answered(batch: SequenceBatch) -> Ints:
    """Returns the rows with response tokens."""
    return np.flatnonzero(batch.response_lengths)


def _adamw(value: dict[str, object]) -> AdamW:
    try:
        spec = spec_from_json("optimizer", value)  # type: ignore[arg-type]
    except (KeyError, TypeError) as err:
        raise CheckpointError("the checkpoint's optimizer is unknown", found=str(value)) from err
    assert isinstance(spec, AdamW)
    return spec


def _module(device: torch.device) -> object:
    """`torch.cuda`, `torch.npu`: the functions of a device type; not every device has every one."""
    return getattr(torch, device.type, None)


def _random_state(device: torch.device) -> dict[str, torch.Tensor]:
    found = {"cpu": torch.get_rng_state()}
    read = getattr(_module(device), "get_rng_state", None)
    if device.type != "cpu" and read is not None:
        found["device"] = read(device)
    return found


def _set_random_state(device: torch.device, saved: dict[str, torch.Tensor]) -> None:
    if "cpu" in saved:
        torch.set_rng_state(saved["cpu"])
    write = getattr(_module(device), "set_rng_state", None)
    if "device" in saved and device.type != "cpu" and write is not None:
        write(saved["device"], device)
