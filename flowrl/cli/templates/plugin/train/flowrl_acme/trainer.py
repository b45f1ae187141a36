"""Trains a Transformers model, a sample at a time. Put your library into `_predict` and `_step`.

Heads with values, losses on pairs, averages of weights, sums of updates and distributions over the
whole vocabulary are left out; the last method refuses them.
"""

import json
import shutil
from dataclasses import replace

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from flowrl.algo.kl import mismatch
from flowrl.algo.logprobs import chosen_logprobs
from flowrl.algo.losses import aggregate, prepares
from flowrl.algo.resolve import resolve_kl, resolve_loss
from flowrl.backend.protocols import OptimizerStep
from flowrl.errors import BackendError
from flowrl.specs import spec_from_json
from flowrl_backends.torch.optimizer import Optimizer
from flowrl_backends.torch.token_fields import token_batch


class AcmeTrainer:
    def __init__(self, context):
        torch.set_num_threads(context.num_threads or torch.get_num_threads())
        torch.manual_seed(context.seed)
        disable_progress_bar()
        self._context, self._optimizer = context, None
        config = AutoConfig.from_pretrained(context.model)
        fresh = AutoModelForCausalLM.from_config(config) if context.fresh else None
        self._model = (fresh or AutoModelForCausalLM.from_pretrained(context.model)).eval()

    def begin(self, optimizer, num_updates):
        self._optimizer = Optimizer(dict(self._model.named_parameters()), optimizer, num_updates)

    def reset_optimizer(self):
        self._optimizer.reset()

    def _predict(self, batch, row, temperature):
        """Returns the places of a sample's response tokens, their logprobs and entropies, `[R]`."""
        places = np.arange(batch.offsets[row], batch.offsets[row + 1])
        counted = np.flatnonzero(batch.response_mask[places])
        ids = torch.from_numpy(batch.tokens[places])
        logits = self._model(input_ids=ids[None], use_cache=False).logits[0]
        rows = torch.from_numpy(counted)
        return places[counted], *chosen_logprobs(logits, rows - 1, ids[rows], temperature)

    def logprobs(self, batch, temperature):
        result = np.zeros(len(batch.tokens), np.float32)
        with torch.no_grad():
            for row in np.flatnonzero(batch.response_lengths):
                places, logprobs, _ = self._predict(batch, row, temperature)
                result[places] = logprobs.numpy()
        return result

    def update(self, batch, spec):
        whole = spec.kl is not None and spec.kl.estimator == "full"
        if spec.loss.predicts != "logprobs" or spec.loss.pairs or whole:
            self.not_offered()
        if prepares(spec.loss) != "nothing":  # it reads the whole mini-batch at once
            self.not_offered()
        return [self._step(batch, spec, np.array(rows)) for rows in spec.mini_batches]

    def _step(self, batch, spec, rows):
        loss, kl = resolve_loss(spec.loss), resolve_kl(spec.kl) if spec.kl else None
        sequences, lengths = batch.sequences, batch.sequences.response_lengths[rows]
        weights = loss.sample_weights(lengths, sequences.groups[rows], max_tokens=spec.max_tokens)
        total, own = 0.0, {"logprobs": [], "places": [], "samples": []}
        self._optimizer.zero_grad()
        for row, weight in zip(rows[lengths > 0], weights[lengths > 0], strict=True):
            places, logprobs, entropy = self._predict(sequences, row, spec.temperature)
            samples = np.full(len(places), row)
            fields = token_batch(batch, places, samples, logprobs.device)
            fields = replace(fields, entropy=entropy)
            if spec.old_policy == "own":
                fields = replace(fields, old_logprobs=logprobs.detach())
            values = loss(logprobs, fields).values
            if kl is not None:
                values = values + spec.kl.coefficient * kl(logprobs, fields.reference_logprobs)
            part = aggregate(values, torch.full_like(values, float(weight)))
            part.backward()
            self._optimizer.accumulate()
            total += float(part.detach())
            if batch.sampled is None or batch.sampled[row]:
                for name, array in zip(own, (logprobs.detach(), places, samples), strict=True):
                    own[name].append(array)
        metrics, behaviour = {}, batch.behaviour_logprobs
        if behaviour is not None and own["places"]:
            current, places, samples = map(np.concatenate, own.values())
            metrics = mismatch(current, behaviour[places], samples)
        done = self._optimizer.step()
        return OptimizerStep(
            loss=total,
            grad_norm=done.grad_norm,
            learning_rate=done.learning_rate,
            skipped=done.skipped,
            num_tokens=int(lengths.sum()),
            metrics=metrics,
        )

    def export(self, folder):
        self._model.save_pretrained(folder)
        for file in self._context.model.iterdir():  # the tokenizer
            weights = file.name.endswith((".safetensors", ".bin", ".index.json"))
            if file.is_file() and not weights and not (folder / file.name).exists():
                shutil.copy(file, folder)

    def load(self, folder, decay=0.0):
        if decay:
            self.not_offered()
        for file in folder.glob("*.safetensors"):
            self._model.load_state_dict(load_file(file), strict=False)
        if self._optimizer is not None:
            self._optimizer.take_parameters()

    def save(self, folder):
        self.export(folder / "model")
        state = {}
        if self._optimizer is not None:
            save_file(self._optimizer.tensors(), folder / "optimizer.safetensors")
            state = {name: getattr(self._optimizer, name) for name in ("num_updates", "updates")}
            state["spec"] = self._optimizer.spec.to_json()
        (folder / "optimizer.json").write_text(json.dumps(state))

    def restore(self, folder):
        self.load(folder / "model")
        state = json.loads((folder / "optimizer.json").read_text())
        if state:
            self.begin(spec_from_json("optimizer", state["spec"]), state["num_updates"])
            tensors = load_file(folder / "optimizer.safetensors")
            self._optimizer.load(tensors, state["updates"])

    def close(self):
        pass

    offload = reload = close  # there is no other memory than the host's

    def not_offered(self, *_):
        raise BackendError("acme does not offer this", where=f"roles.{self._context.role}.backend")

    distributions = squares = values = scores = token_scores = update_sum = not_offered
