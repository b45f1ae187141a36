"""PRIME: a process reward model that learns from outcomes alone, and rewards every token.

Cui et al., "Process reinforcement through implicit rewards", 2025 (arXiv:2502.01456). The process
reward model pi_prm is a language model that begins with the weights of the policy, as the frozen
reference does. The reward of a token is its log-ratio (equation 3), and the sum over a response is
to tell the outcome r_o, 1 for a right answer and 0 for a wrong one (equation 4):

    r_t = beta log(pi_prm(o_t | q, o_<t) / pi_reference(o_t | q, o_<t))
    s   = sum over the tokens of an answer of r_t
    L   = - mean over answers of  r_o log sigmoid(s) + (1 - r_o) log(1 - sigmoid(s))

In each step the model learns from the new answers before it scores them (algorithm 1). The
advantage adds two leave-one-out terms: rewards-to-go, less the mean over the other K - 1 answers
of their mean reward, and the outcome, less the mean of the others' outcomes (equation 5):

    A_t = sum over u >= t of gamma^(u-t) (r_u - mean over the others of their mean r)
          + r_o - mean over the others of their r_o

The policy loss is PPO's. Advantages are standardised over the batch's tokens, as in the authors'
code; with `whiten=False` they are those of the equation. Prompts that are too easy or too hard are
left out, as in their section 3.3.
"""

from __future__ import annotations

import flowrl as fl


@fl.workflow
def prime(
    prompts: fl.Prompts,
    *,
    actor: fl.Policy,
    prm: fl.Policy,
    reference: fl.Policy,
    verifier: fl.Reward,
    group_size: int | None = None,
    clip: float = 0.2,
    beta: float = 0.05,
    gamma: float = 1.0,
    whiten: bool = True,
) -> None:
    """PRIME with outcomes of rules. `group_size=None` takes `train.group_size`."""
    rollout = actor.generate(prompts, n=group_size)
    rollout, scores = fl.filter.zero_variance(rollout, verifier.score(rollout))
    before = reference.logprobs(rollout)
    loss = fl.loss.implicit_reward(beta)
    newer = prm.update(rollout, scores, reference=before, loss=loss)
    rewards = fl.shaping.implicit_reward(newer.logprobs(rollout), before, beta=beta)
    fl.log("implicit_reward", rewards)
    advantages = fl.advantage.reinforce_pp(
        scores, rollout, mean="group_others", gamma=gamma, whiten=whiten, token_rewards=rewards
    )
    actor.update(rollout, advantages=advantages, loss=fl.loss.policy_clip(clip))
