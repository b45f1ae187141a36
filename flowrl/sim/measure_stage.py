"""Measures everything that a stage's simulation needs to know, through the backend protocols.

Models are opened as a run opens them, one after the other: a role with its own model, or what it
copies. Nothing is trained from data; weights of new models are as their seed draws them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import numpy as np

from flowrl.backend.batch import Ints
from flowrl.backend.environment import Environment, EnvironmentContext, EpisodeStart
from flowrl.backend.protocols import (
    GenerateBackend,
    Head,
    Loaded,
    PolicyContext,
    ScoreBackend,
    ScoreContext,
    ScoreRequest,
    TrainBackend,
    Weights,
    WeightsKind,
)
from flowrl.backend.registry import find
from flowrl.backend.weights import weights_of
from flowrl.compiler import CompiledStage
from flowrl.compiler.reward_terms import row_needs
from flowrl.config.schema import RunConfig
from flowrl.cost.demand import phase_of
from flowrl.data import PromptSet, Tokenizer, encode_prompts, load_rows, prepare_model_folder
from flowrl.errors import BackendError
from flowrl.graph import Node, Op
from flowrl.ids import RoleName, SampleId
from flowrl.observe.run_folder import installed_versions
from flowrl.plan.schema import Placement
from flowrl.sim.costs import LinearCost
from flowrl.sim.measure import EngineQuestion, Timer, measure_engine, repeated, timed
from flowrl.sim.measure_beside import OpenBusy
from flowrl.sim.measure_environment import EpisodeCalls, measure_environment
from flowrl.sim.measure_train import TrainQuestion, measure_op
from flowrl.sim.of_plan import EXPORT, MAIN
from flowrl.sim.profile import (
    PROFILE_VERSION,
    EngineProfile,
    EnvironmentProfile,
    MachineNote,
    OpProfile,
    Profile,
    ScorerProfile,
    SwitchProfile,
    model_notes,
)
from flowrl.sim.scorers import ScoreTimes
from flowrl.specs import AdamW, FinishReason, LossSpec, Sampling

_IN_PLACE = Weights(version=0, kind=WeightsKind.IN_PLACE)
_LOAD_S = 600.0
"""Seconds in which an engine loads weights."""

OpenCalls: TypeAlias = Callable[
    [Callable[[EnvironmentContext], Environment], EnvironmentContext],
    AbstractContextManager[EpisodeCalls],
]
"""Opens an environment, by a plug-in's `open_environment`, and what calls it."""

_LIBRARIES = ("flowrl", "torch", "transformers", "numpy")
_PROMPTS_KEPT = 256
"""Lengths of prompts that a profile holds at most, from the shortest to the longest."""
_ENGINE_S, _OP_S = 5.0, 5.0


def measure_stage(
    stage: CompiledStage,
    config: RunConfig,
    folder: Path,
    *,
    calls: OpenCalls,
    busy: OpenBusy | None = None,
    weights: Path | None = None,
    tell: Callable[[str], None] = lambda text: None,
    timer: Timer = time.perf_counter,
) -> Profile:
    """The profile of a stage; its `host` is what calibration adds.

    Args:
        folder: Scratch space for model folders.
        calls: Calls an environment as a run does.
        weights: Where weights travel to engines in processes of their own; by default `folder`.
        busy: Has a thread work beside operations; None leaves out what they take from each other.
        tell: Is told what is measured next.
        timer: The clock of all measurements.

    Raises:
        FlowError: data that cannot be read, a backend that cannot be used.
    """
    return _Stage(stage, config, folder, calls, busy, weights or folder, tell, timer).measure()


@dataclass(slots=True, kw_only=True)
class _Open:
    """The workers of one model."""

    train: TrainBackend
    generate: GenerateBackend | None
    shared: bool


class _Stage:
    def __init__(
        self,
        stage: CompiledStage,
        config: RunConfig,
        folder: Path,
        calls: OpenCalls,
        busy: OpenBusy | None,
        weights: Path,
        tell: Callable[[str], None],
        timer: Timer,
    ) -> None:
        self.stage, self.config, self.folder, self.tell = stage, config, folder, tell
        self.calls, self.busy, self.weights, self.timer = calls, busy, weights, timer
        self.plan = stage.plan
        self.engines: list[EngineProfile] = []
        self.ops: list[OpProfile] = []
        self.switches: list[SwitchProfile] = []

    def measure(self) -> Profile:
        load = os.getloadavg()[0]
        self.tell("reading data")
        needs = row_needs(self.config, [self.stage.graph], "train")
        data = self.config.data
        self.rows = load_rows(data.train, data, split="train", needs=needs)
        for roles in self._models():
            self._measure_model(roles)
        return Profile(
            version=PROFILE_VERSION,
            name=self.config.name,
            engines=tuple(self.engines),
            ops=tuple(self.ops),
            scorers=tuple(self._scorers()),
            environments=tuple(self._environments()),
            switches=tuple(self.switches),
            prompts=_picked(len(prompt) for prompt in self.prompts),
            models=model_notes(self.stage),
            machine=MachineNote(
                devices=tuple(d.name for d in self.plan.pool.devices),
                num_cores=os.cpu_count() or 0,
                load=(round(load, 2), round(os.getloadavg()[0], 2)),
                libraries=installed_versions(_LIBRARIES),
            ),
        )

    # Which models

    def _owner(self, role: str) -> str:
        return self.config.roles[role].copy_of or role

    def _head(self, role: str) -> Head:
        return "value" if self.plan.placement(role).head == "value" else "lm"

    def _models(self) -> list[list[str]]:
        """Roles that one pair of workers can stand for: the same model with the same head."""
        found: dict[tuple[str, str], list[str]] = {}
        for node in self.stage.graph.nodes:
            if node.role is not None and phase_of(node) is not None:
                roles = found.setdefault((self._owner(node.role), self._head(node.role)), [])
                if node.role not in roles:
                    roles.append(node.role)
        return list(found.values())

    def _nodes(self, roles: Sequence[str], *ops: Op) -> list[Node]:
        return [
            node
            for node in self.stage.graph.of_op(*ops)
            if node.role in roles and phase_of(node) is not None
        ]

    # A model

    def _measure_model(self, roles: Sequence[str]) -> None:
        owner = self._owner(roles[0])
        role_config = self.config.roles[owner]
        folder = prepare_model_folder(role_config, self.folder / owner, self.rows, name=owner)
        self.tokenizer = Tokenizer.load(folder)
        encoded: PromptSet = encode_prompts(self.rows, self.tokenizer, self.config.data)
        self.prompts: list[Ints] = [prompt.prompt_ids for prompt in encoded.prompts]
        # Rows of a step come from everywhere in the data, and lines of a file may be in an order.
        order = np.random.default_rng(0).permutation(len(self.prompts))[:1024]
        self.drawn = [self.prompts[i] for i in order]
        self.tell(f"opening {', '.join(roles)}")
        fresh = not isinstance(role_config.model, str)
        updates = self._nodes(roles, Op.UPDATE)
        with ExitStack() as stack:
            opened = self._open(roles, folder, fresh=fresh, trainable=bool(updates))
            stack.callback(opened.train.close)
            if opened.generate is not None:
                stack.callback(opened.generate.close)
            for node in self._nodes(roles, Op.LOGPROBS, Op.VALUES, Op.SCORE):
                self._measure_op(opened.train, node)
            for node in updates:
                self._measure_forward(opened.train, node)
            for node in self._nodes(roles, Op.GENERATE):
                assert opened.generate is not None
                self._measure_engine(opened.generate, node, shared=opened.shared)
            self._measure_sync(opened, roles)
            self._measure_folder(opened, roles, folder, fresh=fresh)
            if updates:
                opened.train.begin(AdamW(learning_rate=1e-9), 1_000_000)
            for node in updates:
                self._measure_op(opened.train, node)
            self._measure_switches(opened, roles)

    def _open(self, roles: Sequence[str], folder: Path, *, fresh: bool, trainable: bool) -> _Open:
        generates = self._nodes(roles, Op.GENERATE)
        role = generates[0].role if generates else roles[0]
        assert role is not None
        placement = self.plan.placement(role)
        plugin = find(placement.backend, where=f"roles.{role}.backend")
        context = self._context(role, placement, folder, fresh=fresh, trainable=trainable)
        train = plugin.open_train(context)
        if not generates:
            return _Open(train=train, generate=None, shared=False)
        shared = plugin.capabilities.shares_weights
        engine = plugin.open_generate(context, train if shared else None)
        return _Open(train=train, generate=engine, shared=shared)

    def _context(
        self, role: str, placement: Placement, folder: Path, *, fresh: bool, trainable: bool
    ) -> PolicyContext:
        device = placement.devices[0]
        owner = self.plan.placement(self._owner(role))
        return PolicyContext(
            role=RoleName(role),
            model=folder,
            fresh=fresh,
            device="cpu" if device.startswith("cpu") else device,
            dtype=owner.dtype if placement.dtype == "none" else placement.dtype,
            seed=0,
            num_slots=placement.num_slots or self.config.roles[role].num_slots,
            max_length=self.plan.sizes.max_length,
            trainable=trainable,
            stop_token_ids=(),  # responses end where the measurement says
            num_threads=self.config.runtime.num_threads,
            head=self._head(role),
            options=self.config.roles[role].options,
            engine_options=self.config.roles[role].engine_options,
        )

    def _measure_engine(self, engine: GenerateBackend, node: Node, *, shared: bool) -> None:
        role, sampling = node.role, node.attr("sampling")
        assert role is not None
        assert isinstance(sampling, Sampling)  # lowering fills it
        self.tell(f"{role}: prefill and decode")
        operation, placement = self.plan.operation(node.id), self.plan.placement(role)
        number = node.attr("n")
        question = EngineQuestion(
            prompts=self.drawn,
            sampling=replace(sampling, logprobs="model"),
            group_size=number if isinstance(number, int) else 1,
            max_rows=max(1, min(placement.num_slots, 2 * operation.num_samples)),
            max_length=self.plan.sizes.max_length,
            budget_s=_ENGINE_S,
            resumes=find(placement.backend).capabilities.resume,
            polled=placement.process == MAIN,
            timer=self.timer,
            publish=(lambda: engine.load(_IN_PLACE)) if shared else None,
        )
        self.engines.append(measure_engine(engine, question, role))

    def _measure_op(self, train: TrainBackend, node: Node) -> None:
        assert node.role is not None
        if any(op.role == node.role and op.op == node.op for op in self.ops):
            return
        self.tell(f"{node.role}: {node.op}")
        operation, sizes = self.plan.operation(node.id), self.plan.sizes
        loss = node.attr("loss")
        pairs = isinstance(loss, LossSpec) and loss.pairs
        parts = sizes.mini_batches if node.op is Op.UPDATE else 1
        question = TrainQuestion(
            node=node,
            prompts=self.drawn,
            group_size=2 if pairs else max(1, operation.num_samples // sizes.prompts_per_step),
            max_rows=max(1, operation.num_samples // parts),
            micro_batch=operation.micro_batch or sizes.micro_batch,
            recompute=operation.recompute,
            max_tokens=min(sizes.max_response_tokens, sizes.max_length - max(map(len, self.drawn))),
            vocab_size=self.tokenizer.vocab_size,
            temperature=self.config.stage_config(self.stage.name).train.sampling.temperature or 1.0,
            budget_s=_OP_S,
            timer=self.timer,
            busy=self.busy,
        )
        self.ops.append(measure_op(train, question, node.role))

    def _measure_forward(self, train: TrainBackend, node: Node) -> None:
        """What a stage that learns while it draws needs beside: old logprobs."""
        loss = node.attr("loss")
        if isinstance(loss, LossSpec) and loss.predicts == "logprobs" and not loss.pairs:
            self._measure_op(train, replace(node, op=Op.LOGPROBS))

    def _measure_sync(self, opened: _Open, roles: Sequence[str]) -> None:
        """The way of new weights from the trainer to the engine, or into a copy."""
        engine, train = opened.generate, opened.train
        for node in self.stage.graph.of_op(Op.SYNC):
            if node.role not in roles:
                continue
            scratch = self.folder / f"weights of {node.role}"

            def travel(scratch: Path = scratch) -> None:
                if opened.shared and engine is not None:
                    engine.load(_IN_PLACE)
                    return
                scratch.mkdir(exist_ok=True)
                train.export(scratch)
                if engine is not None:
                    _load(engine, scratch)
                else:
                    train.load(scratch)

            def once(travel: Callable[[], None] = travel) -> float:
                return timed(self.timer, travel)

            assert node.role is not None
            cost = LinearCost(call_s=_short(repeated(once)))
            self.ops.append(OpProfile(role=node.role, op=str(Op.SYNC), cost=cost))

    def _measure_folder(
        self, opened: _Open, roles: Sequence[str], folder: Path, *, fresh: bool
    ) -> None:
        """The way of weights to an engine in a process of its own, by a folder."""
        for number, engine in enumerate(self.engines):
            if engine.role not in roles or not self.stage.graph.of_op(Op.SYNC):
                continue
            self.tell(f"{engine.role}: weights by a folder")
            scratch = self.weights / f"folder of {engine.role}"
            scratch.mkdir()
            export_s = repeated(lambda: timed(self.timer, lambda: opened.train.export(scratch)))  # noqa: B023
            placement = self.plan.placement(engine.role)
            context = self._context(engine.role, placement, folder, fresh=fresh, trainable=False)
            other = find(placement.backend).open_generate(context, None)
            try:
                load_s = repeated(
                    lambda: timed(self.timer, lambda: _load(other, scratch))  # noqa: B023
                )
            finally:
                other.close()
            self.engines[number] = replace(engine, load_folder_s=_short(load_s))
            cost = LinearCost(call_s=_short(export_s))
            self.ops.append(OpProfile(role=engine.role, op=EXPORT, cost=cost))

    def _measure_switches(self, opened: _Open, roles: Sequence[str]) -> None:
        """Only those that the plan has."""
        wanted = {(s.role, s.what) for s in self.plan.residency if s.role in roles}
        for role, what in sorted(wanted):
            engine, train = opened.generate, opened.train
            if what == "kv cache":
                assert engine is not None
                pair = (("release", engine.sleep), ("take", engine.wake))
            else:
                pair = (("release", train.offload), ("take", train.reload))
            for action, act in pair:
                seconds = _short(timed(self.timer, act))
                self.switches.append(
                    SwitchProfile(role=role, what=what, action=action, seconds=seconds)
                )

    # Rewards

    def _scorers(self) -> list[ScorerProfile]:
        found: dict[str, ScorerProfile] = {}
        requests = self._score_requests()
        for node in self.stage.graph.of_op(Op.SCORE):
            if node.role is None or phase_of(node) is not None or node.role in found:
                continue
            self.tell(f"{node.role}: score")
            told, key = self.config.terms_of(node.role)
            terms = tuple(term.model_dump(mode="json") for term in told)
            role = self.config.roles[node.role]
            context = ScoreContext(role=node.role, terms=terms, key=key, options=role.options)
            scorer = find(role.backend).open_score(context)

            def all_of_them(scorer: ScoreBackend = scorer) -> None:
                for request in requests:
                    scorer.score(request)

            seconds = repeated(lambda: timed(self.timer, all_of_them)) / len(requests)
            scorer.close()
            times = ScoreTimes(sample_s=_short(seconds))
            found[node.role] = ScorerProfile(role=node.role, times=times)
        return list(found.values())

    def _environments(self) -> Iterator[EnvironmentProfile]:
        """Of every role that plays: real rows, and turns of random tokens."""
        for role in dict.fromkeys(node.role for node in self.stage.graph.of_op(Op.INTERACT)):
            assert role is not None
            self.tell(f"{role}: resets and steps")
            own = self.config.roles[role]
            context = EnvironmentContext(
                role=role,
                environment=own.environment or "",
                options=dict(own.options),
                timeout_s=own.timeout_s,
            )
            requests = self._score_requests()
            starts = [
                EpisodeStart(
                    sample=request.sample,
                    seed=number,
                    row=request.row,
                    prompt=request.prompt,
                    answer=request.answer,
                )
                for number, request in enumerate(requests)
            ]
            words = [request.response for request in requests]
            with self.calls(find(own.backend).open_environment, context) as calls:
                times = measure_environment(calls, starts, words, self.timer)
            yield EnvironmentProfile(role=role, times=times)

    def _score_requests(self) -> list[ScoreRequest]:
        """Real rows with random responses of the longest kind."""
        draw = np.random.default_rng(0)
        most = self.plan.sizes.max_response_tokens
        rows = [row for row, _ in zip(self.rows, range(64), strict=False)]
        tokens = [draw.integers(0, self.tokenizer.vocab_size, most) for _ in rows]
        texts = self.tokenizer.decode_many(tokens)
        return [
            ScoreRequest(
                sample=SampleId(f"0/{row.index}/0"),
                prompt=row.prompt,
                response=text,
                answer=row.answer,
                row=row.fields,
                finish=FinishReason.LENGTH,
                num_tokens=most,
            )
            for row, text in zip(rows, texts, strict=True)
        ]


def _picked(lengths: object) -> tuple[int, ...]:
    ordered = sorted(lengths)  # type: ignore[call-overload]
    if len(ordered) <= _PROMPTS_KEPT:
        return tuple(ordered)
    last = len(ordered) - 1
    return tuple(ordered[i * last // (_PROMPTS_KEPT - 1)] for i in range(_PROMPTS_KEPT))


def _short(seconds: float) -> float:
    """Six digits: no measurement has more."""
    return float(f"{seconds:.6g}")


def _load(engine: GenerateBackend, folder: Path) -> None:
    """Has an engine load the weights of a folder as a run does, and waits until it has."""
    engine.load(weights_of(folder, 0))
    end = time.monotonic() + _LOAD_S
    while not any(isinstance(output, Loaded) for output in engine.poll(1.0)):
        if time.monotonic() > end:
            raise BackendError(
                "the engine does not report that it has loaded weights",
                where=type(engine).__name__,
                expected=f"`Loaded` from `poll` within {_LOAD_S:g} s",
                hint="`flowrl backends check NAME` shows what a plug-in lacks",
            )
