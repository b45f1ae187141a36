"""What the planner is told that no run needs: lengths, libraries, objective, decisions to keep."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from flowrl.config.section import Float, Int, Section

__all__ = ["MOST_ALTERNATIVES", "EnvironmentTimesConfig", "PlanConfig"]


MOST_ALTERNATIVES = 50
"""Plans that are told beside the best one."""


class EnvironmentTimesConfig(Section):
    """What an environment takes, of a plan for many devices.

    Attributes:
        step_s: Seconds of whoever serves a call, to answer a turn.
        reset_s: Likewise, to begin an episode; none takes `step_s`.
        wait_s: Seconds that an answer is late beside, while others are served.
        device: What it computes on: the `cpu` of hosts, an `accelerator` of the kind that its
            policy is on, or accelerators of a kind, by their name in the cluster.
        concurrency: Calls that it serves at once, on each accelerator (none: 1) or on the cores of
            each node (none: one a core).
        memory_gib: Of each accelerator that it is on, or of each node's host.
    """

    step_s: Float = Field(ge=0, le=86_400)
    reset_s: Annotated[Float, Field(ge=0, le=86_400)] | None = None
    wait_s: Float = Field(default=0.0, ge=0, le=86_400)
    device: str = "cpu"
    concurrency: Annotated[Int, Field(ge=1, le=1 << 20)] | None = None
    memory_gib: Float = Field(default=0.0, ge=0, le=1_000_000)


class PlanConfig(Section):
    """How a plan for many devices is made; a plan for one device needs none of it.

    Attributes:
        mean_prompt_tokens: Mean length of prompts.
        mean_response_tokens: Mean length of responses, after the cut at the longest; of episodes
            with what is said in them.
        sigma: Of the logarithm of lengths: how long their tail is; 0 makes all equal. At
            most 5, where one of forty lengths is 18,000 times the median: more is a mistake.
        mean_turns: Turns of an episode on average.
        mean_observation_tokens: Tokens that an environment says before each turn, on average.
        environments: What environments take, by role.
        lengths: A file of lengths, one JSON value a line (a number, or an object with
            `num_tokens`, as samples.jsonl of a run has), or a run's folder; takes the place of
            mean and sigma.
        engine_times: Where estimates of an engine's steps come from: `analytic`, or
            `aiconfigurator`, measured kernels of the package of that name.
        profile: Times that `flowrl profile` measured; they replace estimates point by point.
        trainer: What trains where the role's backend declares no layouts itself: `megatron` (tp,
            pp, cp, ep; optimizer split over replicas) or `fsdp` (parameters split over replicas).
        engine: What generates there: `sglang` or `vllm`.
        objective: What is made small: the `step_time`, or the `device_time` of a sample.
        kind: Of the plan: `temporal`, `spatial` or `asynchronous`; `auto` takes what is predicted
            to be fastest, a `hybrid` of the first two among them. On this machine it is how samples
            are drawn (`flowrl.plan.local`), and `auto` goes by the times that `flowrl profile`
            measured; where nothing was, the main process draws (or, where samples may be drawn
            ahead, a process beside it).
        memory_share: Of an accelerator's memory, as software finds it, what a plan may fill.
        alternatives: Next best plans that are told; the best of each other kind is told anyway.
        try_batches: Other sizes of a step are planned for where no number of replicas on all
            devices divides its samples, to tell what they take; `flowrl plan --explain` does so.
        pins: Decisions that are kept, by what they are about: `{rollout: {tp: 2}}`.
    """

    mean_prompt_tokens: Annotated[Float, Field(gt=0)] | None = None
    mean_response_tokens: Annotated[Float, Field(gt=0)] | None = None
    sigma: Annotated[Float, Field(ge=0, le=5)] | None = None
    mean_turns: Annotated[Float, Field(ge=1)] | None = None
    mean_observation_tokens: Annotated[Float, Field(ge=0)] | None = None
    environments: dict[str, EnvironmentTimesConfig] = Field(default_factory=dict)
    lengths: Path | None = None
    engine_times: Literal["analytic", "aiconfigurator"] = "analytic"
    profile: Path | None = None
    trainer: Literal["megatron", "fsdp"] = "megatron"
    engine: Literal["sglang", "vllm"] = "sglang"
    objective: Literal["step_time", "device_time"] = "step_time"
    kind: Literal["auto", "temporal", "spatial", "asynchronous"] = "auto"
    memory_share: Annotated[Float, Field(gt=0, le=1)] = 0.9
    alternatives: Int = Field(default=0, ge=0, le=MOST_ALTERNATIVES)
    try_batches: bool = False
    pins: dict[str, object] = Field(default_factory=dict)
