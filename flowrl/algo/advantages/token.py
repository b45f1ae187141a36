"""One advantage a token: REINFORCE++, ReMax, baselines, distillation, GAE, turns. numpy only."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from flowrl.algo.advantages.batch import (
    AdvantageBatch,
    AdvantageResult,
    Turns,
    check_scores,
    field_of,
    kl_penalty,
    rewards_to_go,
    token_rewards,
    whiten,
)
from flowrl.algo.advantages.group import Partition, centre_scores, standardise
from flowrl.specs.advantage import (
    GAE,
    Distill,
    GroupInGroup,
    GroupRelative,
    Masking,
    OptimalTokenBaseline,
    ReinforcePP,
    ReMax,
)

Array = npt.NDArray[np.float64]


def reinforce_pp(batch: AdvantageBatch, spec: ReinforcePP) -> AdvantageResult:
    """REINFORCE++ (Hu et al., 2025, section 3) and its baseline form::

        c_i = score_i                           `mean="none"`
        c_i = score_i - mean of its group       `mean="group"`: REINFORCE++-baseline
        r_t = [t last] c_i - beta kl_t
        G_t = r_t + gamma G_{t+1}               `kl_credit="reward_to_go"`
        G_t = c_i - beta kl_t                   `kl_credit="token"`: each token's own penalty
        A_t = whitened G_t                      over all response tokens of the batch

    With `whiten=False` the advantages are G. The paper's kl is k1.

    Process rewards p_t of tokens are centred by means of their sample means m_i, and added::

        m_i = mean of p_t over the tokens of sample i
        q_t = p_t - (mean of m over the same samples as the scores' mean; 0 with `mean="none"`)
        r_t = q_t + [t last] c_i - beta kl_t

    With `mean="group_others"` this is the advantage of PRIME (Cui et al., arXiv 2502.01456,
    equation 5).

    Returns:
        The advantages, and G as returns, 0 off the mask.
    """
    scores = check_scores(batch.scores, batch.groups)
    mask = field_of(batch, "mask", spec.kind)
    centred = centre_scores(scores, batch.groups, spec.mean, spec.singleton)
    process = _process_rewards(batch, spec)
    if process is not None:
        means = (np.where(mask > 0, process, 0.0)).sum(1) / np.maximum((mask > 0).sum(1), 1)
        left = centre_scores(means, batch.groups, spec.mean, spec.singleton)
        process = process - (means - left)[:, None]
    if spec.kl_credit == "token":
        kl = kl_penalty(batch, spec.kl_estimator, spec.kl_coefficient, spec.kind)
        penalty = 0.0 if kl is None else spec.kl_coefficient * kl
        returns = np.broadcast_to(centred[:, None], mask.shape) - penalty
        if process is not None:
            of_tokens = token_rewards(np.zeros(len(scores)), mask, process=process)
            returns = returns + rewards_to_go(of_tokens, mask, spec.gamma, spec.masking)
    else:
        rewards = _rewards(batch, centred, mask, spec, process)
        returns = rewards_to_go(rewards, mask, spec.gamma, spec.masking)
    return AdvantageResult.masked(mask, _whitened(returns, mask, spec), returns)


def _process_rewards(batch: AdvantageBatch, spec: ReinforcePP | GAE) -> Array | None:
    return None if spec.token_rewards == "none" else field_of(batch, "process_rewards", spec.kind)


def _rewards(
    batch: AdvantageBatch,
    scores: Array,
    mask: Array,
    spec: ReinforcePP | ReMax | GAE,
    process: Array | None = None,
) -> Array:
    """Returns `token_rewards` with the specification's KL penalty and the batch's own rewards."""
    kl = kl_penalty(batch, spec.kl_estimator, spec.kl_coefficient, spec.kind)
    return token_rewards(
        scores,
        mask,
        kl,
        kl_coefficient=spec.kl_coefficient,
        given=batch.token_rewards,
        process=process,
    )


def _whitened(advantages: Array, mask: Array, spec: ReinforcePP | GAE) -> Array:
    if not spec.whiten:
        return advantages
    return whiten(
        advantages, mask, ddof=spec.whiten_ddof, eps=spec.whiten_eps, place=spec.whiten_eps_place
    )


def remax(batch: AdvantageBatch, spec: ReMax) -> AdvantageResult:
    """ReMax (Li et al., 2023, algorithm 2)::

        A_t = G_t - b_i,    G_t = sum over u >= t of r_u,    b_i = score of the greedy answer

    The score is on the last token. With a coefficient, each token has a KL penalty.
    """
    scores = check_scores(batch.scores, batch.groups)
    mask = field_of(batch, "mask", spec.kind)
    returns = rewards_to_go(_rewards(batch, scores, mask, spec), mask)
    baselines = field_of(batch, "baselines", spec.kind)
    return AdvantageResult.masked(mask, returns - baselines[:, None], returns)


def distill(batch: AdvantageBatch, spec: Distill) -> AdvantageResult:
    """On-policy distillation by reverse KL, as an advantage of each token::

        d_t = log teacher_t - log behaviour_t             for tokens sampled by the student
        G_t = coefficient d_t + discount G_{t+1}          over the mask
        A_t = G_t + score_weight (score_i - mean)         the second part if it has a weight

    Minus the mean of d estimates KL(student || teacher), and the policy gradient with A_t = d_t
    descends the part of it that depends on each token's own choice (Agarwal et al., "On-Policy
    Distillation of Language Models", arXiv 2306.13649, with samples of the student and reverse KL;
    Lu and Thinking Machines Lab, "On-Policy Distillation", 2025, which takes discount 0). With
    discount 1, G_t includes all later tokens, which gives the whole gradient of the sequence's KL
    (Gu et al., MiniLLM, arXiv 2306.08543, equation 3). The teacher's logprobs are the
    `reference_logprobs`, with the same tokenizer and at the temperature of the rollout.
    """
    mask = field_of(batch, "mask", spec.kind)
    student = field_of(batch, "logprobs", spec.kind)
    teacher = field_of(batch, "reference_logprobs", spec.kind)
    # Values at padding are arbitrary.
    rewards = np.where(mask > 0, spec.coefficient * (teacher - student), 0.0)
    advantages = rewards_to_go(rewards, mask, spec.discount)
    if spec.score_weight:
        scores = check_scores(batch.scores, batch.groups)
        centred = centre_scores(scores, batch.groups, spec.mean, spec.singleton)
        advantages = advantages + spec.score_weight * centred[:, None]
    return AdvantageResult.masked(mask, advantages)


def optimal_token_baseline(batch: AdvantageBatch, spec: OptimalTokenBaseline) -> AdvantageResult:
    """Computes reward-to-go minus the minimum-variance baseline of `optimal_baseline`.

    The score is on the last token, and there is no discount.
    """
    scores = check_scores(batch.scores, batch.groups)
    mask = field_of(batch, "mask", spec.kind)
    rewards = token_rewards(scores, mask, given=batch.token_rewards)
    returns = rewards_to_go(rewards, mask)
    baseline = optimal_baseline(
        returns,
        mask,
        batch.groups,
        field_of(batch, "logprobs", spec.kind),
        field_of(batch, "sum_pi_squared", spec.kind),
        spec,
    )
    return AdvantageResult.masked(mask, returns - baseline, returns)


def optimal_baseline(
    returns: npt.ArrayLike,
    mask: npt.ArrayLike,
    groups: npt.ArrayLike,
    logprobs: npt.ArrayLike,
    sum_pi_squared: npt.ArrayLike,
    spec: OptimalTokenBaseline,
    token_weights: npt.ArrayLike | None = None,
) -> Array:
    """Computes the optimal token baseline ("The Optimal Token Baseline", 2026), float64 `[N, T]`.

    The squared length of the gradient of a token's logprob with respect to its logits is w_t; the
    accumulated variance of a path is its running sum, which weighs the group's mean::

        w_t = 1 - 2 pi_t + sum over v of pi(v)^2,    pi_t = probability of the sampled token
        W_t = sum of w_u, u <= t, over the mask
        b_t = sum_i W_it G_it m_it / (sum_i W_it m_it + eps)    over the group, for each step t

    The returns are the rewards-to-go G, the mask is m, and w_t is multiplied by the square of
    `token_weights`, importance weights. All are `[N, T]`. The specification also has the baselines
    of a group of one and of the tail of a longest sample.
    """
    g, m = np.asarray(returns, np.float64), (np.asarray(mask) > 0).astype(np.float64)
    # Values at padding are arbitrary; they must not overflow.
    sampled = np.where(m > 0, np.asarray(logprobs, np.float64), 0.0)
    w = 1 - 2 * np.exp(sampled) + np.where(m > 0, np.asarray(sum_pi_squared, np.float64), 0.0)
    if token_weights is not None:
        w = w * np.where(m > 0, np.asarray(token_weights, np.float64), 0.0) ** 2
    weight = np.cumsum(w * m, axis=1) * m
    group = Partition.of(groups)
    above, below = np.zeros((2, len(group.size), g.shape[1]))
    np.add.at(above, group.number, weight * np.where(m > 0, g, 0.0))
    np.add.at(below, group.number, weight)
    baseline: Array = (above / np.where(below + spec.eps == 0, 1.0, below + spec.eps))[group.number]
    if spec.lone_tail == "zero":
        baseline = np.where(_lone_tail(m, group), 0.0, baseline)
    if spec.singleton == "raw":
        return np.where(group.alone[:, None], 0.0, baseline)
    return np.where(group.alone[:, None], g, baseline)


def _lone_tail(mask: Array, group: Partition) -> npt.NDArray[np.bool_]:
    """Returns bool `[N, T]`, true where a group's longest sample exceeds its second longest."""
    length = mask.sum(1)
    tail = np.zeros(mask.shape, np.bool_)
    for number in np.flatnonzero(group.size > 1):
        members = np.flatnonzero(group.number == number)
        ranked = members[np.argsort(length[members], kind="stable")]
        longest, second = ranked[-1], ranked[-2]
        tail[longest, int(length[second]) :] = length[longest] > length[second]
    return tail


def gae(batch: AdvantageBatch, spec: GAE) -> AdvantageResult:
    """Computes GAE over the scores, rewards of tokens and turns, and KL penalties of tokens.

    Advantages are those of `estimate` with `lam`, or with `length_lambda` if `length_alpha` is
    above 0; by default they are whitened over the response tokens of the batch. Returns, the
    critic's targets, are those of `lam_value` (VC-PPO: Yuan et al., "What's Behind PPO's Collapse
    in Long-CoT?", 2025; VAPO: Yue et al., 2025, section 4), without whitening. Both are 0 off the
    mask.
    """
    scores = check_scores(batch.scores, batch.groups)
    mask = field_of(batch, "mask", spec.kind)
    values = field_of(batch, "values", spec.kind)
    rewards = _rewards(batch, scores, mask, spec, _process_rewards(batch, spec))
    lam: float | Array = spec.lam
    if spec.length_alpha > 0:
        lam = length_lambda((mask > 0).sum(1), spec.length_alpha)
    advantages, _ = estimate(rewards, values, mask, spec.gamma, lam, spec.masking)
    lam_value = spec.lam if spec.lam_value is None else spec.lam_value
    _, returns = estimate(rewards, values, mask, spec.gamma, lam_value, spec.masking)
    return AdvantageResult.masked(mask, _whitened(advantages, mask, spec), returns)


def estimate(
    rewards: npt.ArrayLike,
    values: npt.ArrayLike,
    mask: npt.ArrayLike,
    gamma: float,
    lam: float | Array,
    masking: Masking = "carry",
) -> tuple[Array, Array]:
    """Computes advantages and returns (Schulman et al., GAE, 2015, equations 11 and 16)::

        delta_t = r_t + gamma V_{t+1} - V_t
        A_t     = delta_t + gamma lambda A_{t+1}
        returns = A_t + V_t

    The value after the last token is 0: the response has ended; truncation counts as an end. At a
    token off the mask, by `masking`::

        carry    A and V after it pass through; the token before has them as its successors
        zero     r and V count as 0 there; gamma and lambda apply
        none     the mask is ignored
        reset    the token before sees A = V = 0 there

    Lambda is one number or `[N]`; all other arrays are `[N, T]`, with the values of the recursion
    off the mask.
    """
    r, v = np.asarray(rewards, np.float64), np.asarray(values, np.float64)
    m = (np.asarray(mask) > 0).astype(np.float64)
    if masking == "zero":
        r, v = r * m, v * m
    advantages = np.zeros_like(r)
    running, following = np.zeros(len(r)), np.zeros(len(r))
    for t in reversed(range(r.shape[1])):
        step = r[:, t] + gamma * following - v[:, t] + gamma * lam * running
        live = m[:, t] > 0
        match masking:
            case "carry":
                advantages[:, t] = running = np.where(live, step, running)
                following = np.where(live, v[:, t], following)
            case "reset":
                advantages[:, t] = step
                running, following = step * m[:, t], v[:, t] * m[:, t]
            case _:
                advantages[:, t] = running = step
                following = v[:, t]
    return advantages, advantages + v


def length_lambda(lengths: npt.ArrayLike, alpha: float) -> Array:
    """Computes lambda = 1 - 1 / (alpha l) for responses of l tokens (VAPO, 2025, section 4.2).

    Longer responses get a lambda closer to 1, so that the reward reaches their beginning. If
    alpha * l is below 1, lambda is 0.

    Returns:
        float64 `[N]`, from 0 to 1.
    """
    return 1.0 - 1.0 / np.maximum(alpha * np.asarray(lengths, np.float64), 1.0)


def group_in_group(batch: AdvantageBatch, spec: GroupInGroup) -> AdvantageResult:
    """GiGPO (Feng et al., "Group-in-Group Policy Optimization for LLM Agent Training", 2025).

    Episodes of a prompt form a group, and within it all turns that begin in the same state of the
    environment (an anchor state) form a group::

        A_E(i)    = (score_i - mean_g) / F(g)                 over episodes        section 4.1
        R_(i,m)   = sum over later turns k >= m of gamma^(k-m) r_(i,k)             section 4.2
        A_S(i,m)  = (R_(i,m) - mean of R in its state) / F    over turns of the state
        A_(i,m)   = A_E(i) + weight A_S(i,m)                                       section 4.3

    F is the standard deviation plus eps, or 1 with `std="none"`; with `std="batch"`, that of all
    episodes and of all turns. A turn whose state occurs in no other turn of its group gets A_S = 0
    (or its R, with `singleton="raw"`). Every token of a turn gets the turn's advantage; a response
    token of no turn gets the episode's.
    """
    scores = check_scores(batch.scores, batch.groups)
    mask = field_of(batch, "mask", spec.kind)
    turns = batch.turns
    if turns is None:
        raise ValueError(f"the advantage {spec.kind} needs turns, which the batch does not have")
    relative = GroupRelative(std=spec.std, ddof=spec.ddof, eps=spec.eps, singleton=spec.singleton)
    episode = standardise(scores, batch.groups, relative)
    samples = np.asarray(turns.samples)
    keys = np.stack([np.asarray(batch.groups)[samples], np.asarray(turns.states)], axis=1)
    _, states = np.unique(keys, axis=0, return_inverse=True)
    step = standardise(turn_returns(turns, spec.gamma), states.reshape(-1), relative)
    # Tokens of no turn have the number -1, which reads the 0 at the end.
    of_turn = np.append(step, 0.0)[np.asarray(turns.tokens)]
    return AdvantageResult.masked(mask, episode[:, None] + spec.weight * of_turn)


def turn_returns(turns: Turns, gamma: float) -> Array:
    """Computes R_m = r_m + gamma R_{m+1} within each sample; float64 `[M]`.

    Raises:
        ValueError: Turns are not in ascending order of their samples.
    """
    samples = np.asarray(turns.samples)
    if (np.diff(samples) < 0).any():
        raise ValueError("turns must be ordered by sample, and by time within a sample")
    returns = np.array(turns.rewards, np.float64)
    for m in reversed(range(len(returns) - 1)):
        if samples[m] == samples[m + 1]:
            returns[m] += gamma * returns[m + 1]
    return returns
