"""On-policy distillation of several teachers, each of which judges its own part of the data.

The single-step objective of `opd` (Gu et al., "MiniLLM", 2024, arXiv:2306.08543, section 2.2):

    A_t = log pi_teacher(o_t | q, o_<t) - log pi_behaviour(o_t | q, o_<t)

with the teacher of the prompt's data row: the field `row` of the rows names a role. Samples of all
parts make one update, so that a token counts the same whoever judged it. A part has no sample in a
step whose prompts are of the other teachers.
"""

from __future__ import annotations

import flowrl as fl


@fl.workflow
def multi_teacher_opd(
    prompts: fl.Prompts,
    *,
    student: fl.Policy,
    teachers: list[fl.Policy],
    row: str = "teacher",
    group_size: int | None = None,
    clip: float = 0.2,
) -> None:
    """Distillation of experts into one student; `group_size=None` takes `train.group_size`."""
    rollout = student.generate(prompts, n=group_size)
    judged = []
    for teacher in teachers:
        part = fl.where(rollout, row=row, equals=teacher.name)
        advantages = fl.advantage.distill(part, teacher=teacher.logprobs(part))
        fl.log(f"{teacher.name}/advantage", advantages)
        judged.append((part, advantages))
    rollout, advantages = fl.concat(*judged)
    student.update(rollout, advantages=advantages, loss=fl.loss.policy_clip(clip))
