"""What a plan is asked for: roles, sizes, and what their backends can do. Pure data."""

from __future__ import annotations

from dataclasses import dataclass, field

from flowrl.backend.plugin import Capabilities, Head
from flowrl.cost.models import ModelShape
from flowrl.errors import PlanError
from flowrl.plan.options import PlanOptions
from flowrl.plan.schema import Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleRequest:
    """A role as the configuration describes it.

    Attributes:
        capabilities: What its backend declares.
        shape: Of its model, as a language model; None for roles without one, and for a role that
            begins as a copy of another.
        head: What its model ends in.
        dtype: `auto` takes bfloat16 where the device has it in hardware and float32 elsewhere; a
            copy takes the type of its original.
        recompute: Of a backward pass: `none`, `full`, or `auto`.
        num_slots: Samples decoded at once.
        ranks: Processes that train it together on CPUs.
        copy_of: A role whose weights it begins with.
        evaluated: Held-out samples are drawn from it, even where the graph does not generate.
        num_workers: Processes of a scorer.
    """

    name: str
    backend: str
    capabilities: Capabilities
    shape: ModelShape | None = None
    head: Head = "lm"
    dtype: str = "auto"
    recompute: str = "auto"
    num_slots: int = 256
    ranks: int = 1
    copy_of: str | None = None
    evaluated: bool = False
    num_workers: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """A stage's roles and sizes; `flowrl.config.schema.TrainConfig` says what the sizes mean.

    Attributes:
        group_size: Samples for each prompt of the largest rollout; what a rollout that does not say
            draws.
        max_response_tokens: Of the longest response; of an episode, with what the environment says.
        max_length: Tokens of the longest sample, prompt and response together.
        train_key: Where the configuration holds the sizes, for messages: `train`, or
            `stage.NAME.train` for a stage before the last.
        reasons: What was decided before anything is placed.
        max_staleness: Publications that a sample may be behind.
        options: What plans over many devices need besides.
    """

    roles: tuple[RoleRequest, ...]
    prompts_per_step: int
    group_size: int
    mini_batches: int
    micro_batch: int
    max_prompt_tokens: int
    max_response_tokens: int
    max_length: int
    train_key: str = "train"
    reasons: tuple[Reason, ...] = ()
    max_staleness: int = 0
    options: PlanOptions = field(default_factory=PlanOptions)

    def role(self, name: str) -> RoleRequest:
        """The request of a role.

        Raises:
            PlanError: nothing is said about that role.
        """
        for role in self.roles:
            if role.name == name:
                return role
        raise PlanError(
            f"the workflow has a role {name!r}, but no backend is given for it",
            where=f"roles.{name}",
            found=f"roles {', '.join(role.name for role in self.roles) or 'none'}",
            hint=f"add roles.{name}.backend (and .model, for a policy)",
        )

    def shape_of(self, role: RoleRequest) -> ModelShape | None:
        """The shape of a role's model: its body or that of what it copies, and its own head."""
        seen, source = {role.name}, role
        while source.shape is None and source.copy_of is not None and source.copy_of not in seen:
            seen.add(source.copy_of)
            source = self.role(source.copy_of)
        if source.shape is None or role.head == "lm":
            return source.shape
        return source.shape.with_value_head()
