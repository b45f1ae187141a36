"""Self-refinement: a policy drafts, criticises its draft, revises it, and learns from all three.

The chain is that of Madaan et al., "Self-Refine", 2023 (arXiv:2303.17651), whose policy learns
nothing; here each part of it is reinforced. With the scores r(y1) of a draft and r(y2) of what
becomes of it, the draft answers for r(y1), critique and revision for

    r(y2) + bonus (r(y2) - r(y1))

as in Kumar et al., "Training language models to self-correct via reinforcement learning", 2024
(arXiv:2409.12917, section 5.2), where the bonus keeps a policy from leaving its draft as it is.
Advantages compare the drafts of one prompt (GRPO), and what becomes of them. Two attempts of one
policy become three here, with a critique in between, and their first stage is left out.
"""

from __future__ import annotations

import flowrl as fl


@fl.workflow
def self_refine(
    prompts: fl.Prompts,
    *,
    actor: fl.Policy,
    verifier: fl.Reward,
    ask_critique: str = "{prompt}{response}\n\nWhat is wrong with this answer?\n\n",
    ask_revision: str = "{prompt}{response}\n\nThe corrected answer:\n\n",
    bonus: float = 1.0,
    group_size: int | None = None,
    clip: float = 0.2,
) -> None:
    """Draft, critique and revision of one policy; `group_size=None` takes `train.group_size`."""
    draft = actor.generate(prompts, n=group_size)
    critique = actor.generate(fl.prompts_of(draft, template=ask_critique), n=1)
    revision = actor.generate(fl.prompts_of(critique, template=ask_revision), n=1)
    before, revised = verifier.score(draft), verifier.score(revision)
    after = fl.mean_of_children(fl.mean_of_children(revised))
    fl.log("after", after)
    gain = fl.weighted_sum((after, 1.0 + bonus), (before, -bonus))
    loss, draft_advantages = fl.loss.policy_clip(clip), fl.advantage.group_relative(before)
    critique_advantages = fl.parent(fl.advantage.group_relative(gain), of=critique)
    revision_advantages = fl.parent(critique_advantages, of=revision)
    actor.update(
        fl.sum(
            fl.term(draft, advantages=draft_advantages, loss=loss),
            fl.term(critique, advantages=critique_advantages, loss=loss),
            fl.term(revision, advantages=revision_advantages, loss=loss),
        )
    )
