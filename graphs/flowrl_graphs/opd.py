"""OPD: on-policy distillation. The student answers, and a teacher judges every token.

Agarwal et al., "On-policy distillation of language models: learning from self-generated mistakes",
2024 (arXiv:2306.13649), with student answers only (lambda = 1) and the reverse KL divergence. Here
it is minimised by policy gradient on the drawn tokens, as in Gu et al., "MiniLLM", 2024
(arXiv:2306.08543, equation 3), each token answering for itself (their single-step part, section
2.2),

    A_t = log pi_teacher(o_t | q, o_<t) - log pi_behaviour(o_t | q, o_<t)
    w_t = pi(o_t | q, o_<t) / pi_behaviour(o_t | q, o_<t)
    J   = mean over tokens of  min(w_t A_t, clip(w_t, 1 - clip, 1 + clip) A_t)

The mean of -A_t over tokens estimates KL(student || teacher) of a token, on the student's answers;
it is logged as `reverse_kl`.
"""

from __future__ import annotations

import flowrl as fl
from flowrl.algo.maps import Array, MapBatch


@fl.map(reads=("rollout_logprobs", "logprobs"), gives="reverse_kl/tokens", per_sample=True)
def reverse_kl(batch: MapBatch) -> Array:
    """Log-ratio of student to teacher at each drawn token; float32 `[T]`."""
    return batch["rollout_logprobs"] - batch["logprobs"]


@fl.workflow
def opd(
    prompts: fl.Prompts,
    *,
    student: fl.Policy,
    teacher: fl.Policy,
    group_size: int | None = None,
    clip: float = 0.2,
) -> None:
    """Distillation of a teacher into the student, on the student's own answers.

    `group_size=None` takes `train.group_size`.
    """
    rollout = student.generate(prompts, n=group_size)
    logprobs = teacher.logprobs(rollout)
    fl.log("reverse_kl", reverse_kl(rollout, logprobs))
    advantages = fl.advantage.distill(rollout, teacher=logprobs)
    student.update(rollout, advantages=advantages, loss=fl.loss.policy_clip(clip))
