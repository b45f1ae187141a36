"""Our formulas against numbers recorded from other libraries, where conventions are the same.

A small subset lies in the repository; the whole set is read where it is there.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flowrl.algo.advantages import group_relative
from flowrl.algo.kl import estimate
from flowrl.algo.losses import TokenBatch, aggregate, sample_weights
from flowrl.algo.losses_clip import policy_clip
from flowrl.specs import GroupRelative, PolicyClip

Case = dict[str, Any]
Got = dict[str, np.ndarray[Any, np.dtype[Any]]]


def tensor(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def library(case: Case) -> str:
    return str(case["name"]).split("__")[1]


def advantages(case: Case) -> Got | None:
    """GRPO with the three divisors; a group of one as in verl or as in TRL."""
    options, inputs = case["options"], case["inputs"]
    known = {"algorithm", "std_norm", "ddof", "eps", "singleton", "group_size", "peer_options"}
    if options.get("algorithm") != "grpo" or set(options) - known or "std_norm" not in options:
        return None
    rewards = np.asarray(inputs["rewards"], float)
    if rewards.ndim != 1:
        return None
    size = options.get("group_size")
    groups = inputs.get("group_ids") or (np.arange(len(rewards)) // size).tolist()
    divisor = {True: "group", False: "none"}.get(options["std_norm"], options["std_norm"])
    spec = GroupRelative(
        std=divisor,
        ddof=options["ddof"],
        eps=options["eps"],
        singleton="raw" if "singleton" in options else "zero",
    )
    got = group_relative(rewards, np.unique(groups, return_inverse=True)[1], spec)
    (key,) = case["expected"]
    want = np.asarray(case["expected"][key], float)
    if want.ndim == 1:
        return {key: got}
    mask = np.asarray(inputs.get("response_mask", np.ones_like(want)), float)
    return {key: got[:, None] * mask}


AGGREGATIONS = {
    "token-mean": "token-mean",
    "token_mean": "token-mean",
    "seq-mean-token-mean": "sequence-mean-token-mean",
    "sequence_mean": "sequence-mean-token-mean",
    "seq-mean-token-sum": "sequence-mean-token-sum",
    "seq_mean_token_sum_norm": "constant",
}
COUNTS_EMPTY = {"skyrl", "roll", "trl"}
"""Libraries whose sequence means count samples without response tokens, as ours does."""


def reduced(
    values: torch.Tensor, mask: torch.Tensor, mode: str, case: Case, length: int
) -> torch.Tensor | None:
    """The loss of a padded matrix `[N, T]` under a library's mode, or None where ours differs."""
    lengths = mask.sum(1).long().numpy()
    if mode not in AGGREGATIONS or (
        not mode.startswith("token") and not lengths.all() and library(case) not in COUNTS_EMPTY
    ):
        return None
    weights = sample_weights(lengths, AGGREGATIONS[mode], max_tokens=length)  # type: ignore[arg-type]
    return aggregate(values[mask > 0], torch.from_numpy(np.repeat(weights, lengths)))


def loss_aggregation(case: Case) -> Got | None:
    options = case["options"]
    known = {"mode", "count_empty", "max_seq_len", "micro_batch_size", "prompt_boundaries"}
    if set(options) - known or options.get("prompt_boundaries"):
        return None
    inputs = case["inputs"]
    if set(inputs) != {"loss_mat", "response_mask"}:
        return None
    loss = reduced(
        tensor(inputs["loss_mat"]),
        tensor(inputs["response_mask"]),
        options["mode"],
        case,
        options.get("max_seq_len", 0),
    )
    return None if loss is None else {"loss": loss.numpy()}


def policy_losses(case: Case) -> Got | None:
    """The clipped objective of verl and SkyRL, without a dual clip that could act."""
    options, inputs = case["options"], case["inputs"]
    if set(inputs) != {"log_probs", "old_log_probs", "advantages", "response_mask"}:
        return None
    match library(case):
        case "verl" if options["loss"] == "ppo_clip" and "global_batch_info" not in options:
            low = options.get("clip_ratio_low", options.get("clip_ratio"))
            high = options.get("clip_ratio_high", options.get("clip_ratio"))
            cap, mode, length = options["clip_ratio_c"], options["agg"], 0
        case "skyrl" if options["loss"] in {
            "ppo_clip_tokmean",
            "ppo_clip_seqmean_allB",
            "drgrpo_norm_allB",
        }:
            low, high = options["eps_clip_low"], options["eps_clip_high"]
            cap, mode, length = None, options["reduction"], options["max_seq_len"]
        case _:
            return None
    mask, advantage = tensor(inputs["response_mask"]), tensor(inputs["advantages"])
    behaviour = tensor(inputs["old_log_probs"])
    new = tensor(inputs["log_probs"]).requires_grad_()
    gap = (new.detach() - behaviour) * mask
    acts = (advantage < 0) & (mask > 0) & (gap.exp() > (cap or np.inf))
    if acts.any() or float(gap.abs().max()) > 20:
        return None  # a dual clip, or a clamp of the log-ratio, which ours does not have
    live = mask > 0
    batch = TokenBatch(advantages=advantage[live], behaviour_logprobs=behaviour[live])
    terms = policy_clip(new[live], batch, PolicyClip(clip_low=low, clip_high=high))
    values = torch.zeros_like(mask).masked_scatter(live, terms.values)
    loss = reduced(values, mask, mode, case, length)
    if loss is None:
        return None
    loss.backward()  # type: ignore[no-untyped-call]
    assert new.grad is not None
    return {"loss": loss.detach().numpy(), "grad_log_probs": new.grad.numpy()}


def kl_estimators(case: Case) -> Got | None:
    """Estimators that are not clamped, or whose clamp does nothing to these inputs."""
    options, inputs = case["options"], case["inputs"]
    kind = {"low_var_kl": "k3"}.get(options["kl_type"], options["kl_type"])
    if kind not in {"k1", "k2", "k3"} or set(inputs) - {
        "log_probs",
        "ref_log_probs",
        "response_mask",
    }:
        return None
    new = tensor(inputs["log_probs"]).requires_grad_()
    old = tensor(inputs["ref_log_probs"])
    kl = estimate(new, old, kind)
    largest_in = float((new - old).detach().abs().max())
    largest_out = float(kl.detach().abs().max())
    # Libraries whose options name no clamp: verl, SkyRL and MindSpeed-RL clamp k3 all the same.
    hidden = kind == "k3" and library(case) in {"verl", "skyrl", "msrl"}
    bound_in = options.get("input_clamp") or (20 if hidden else np.inf)
    bound_out = options.get("output_clamp") or (10 if hidden else np.inf)
    if largest_in >= bound_in or largest_out >= bound_out:
        return None
    kl.sum().backward()  # type: ignore[no-untyped-call]
    assert new.grad is not None
    return {"kl": kl.detach().numpy(), "grad_log_probs": new.grad.numpy()}


FAMILIES: dict[str, Callable[[Case], Got | None]] = {
    "advantages": advantages,
    "loss_aggregation": loss_aggregation,
    "policy_losses": policy_losses,
    "kl_estimators": kl_estimators,
}


def check(family: str, cases: list[Case]) -> list[str]:
    """Compares every case of our conventions; returns their names."""
    names = []
    for case in cases:
        got = FAMILIES[family](case)
        if got is None:
            continue
        live = np.asarray(case["inputs"].get("response_mask", 1.0), float) > 0
        for key in got.keys() & case["expected"].keys():
            want = np.array(case["expected"][key], float)
            have = got[key]
            # Padding holds nothing of ours; some libraries put zeros there, others leave numbers.
            if have.shape == live.shape:
                have, want = have[live], want[live]
            np.testing.assert_allclose(
                have, want, rtol=case["rtol"], atol=case["atol"], err_msg=f"{case['name']} {key}"
            )
        assert got.keys() & case["expected"].keys()
        names.append(str(case["name"]))
    return names


@pytest.mark.parametrize("family", FAMILIES)
def test_formulas_equal_the_recorded_numbers_in_the_repository(
    family: str, repository: Path
) -> None:
    content = json.loads((repository / "tests/data/oracles_small.json").read_text())
    cases = [case for case in content["cases"] if case["family"] == family]
    assert len(check(family, cases)) == len(cases) > 0


@pytest.mark.parametrize(
    ("family", "least"),
    [("advantages", 24), ("loss_aggregation", 17), ("policy_losses", 12), ("kl_estimators", 44)],
)
def test_formulas_equal_all_recorded_numbers_of_our_conventions(
    family: str, least: int, reference_data: Path
) -> None:
    content = json.loads((reference_data / "oracles" / f"{family}.json").read_text())
    names = check(family, content["cases"])
    print(f"{family}: {len(names)} of {len(content['cases'])} recorded cases are our conventions")
    assert len(names) >= least
