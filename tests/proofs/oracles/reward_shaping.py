"""Reward shaping and group filters: which of flowrl's functions each recorded convention is."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from flowrl.algo.filters import difficulty, zero_variance
from flowrl.algo.kl import adapted
from flowrl.algo.maps import cosine_length, repetition, soft_overlong, stop_properly, words
from flowrl.specs.filters import Difficulty, ZeroVariance
from flowrl.specs.kl import KL
from flowrl.specs.maps import CosineLength, Repetition, SoftOverlong, StopProperly
from tests.proofs.oracles.case import Case, Result

__all__ = ["compute"]


def compute(case: Case) -> Result:
    """Penalties, rewards, kept groups or coefficients of a case."""
    inputs = case.inputs
    if "kls" in inputs:
        return _adaptive_kl(case)
    if "groups" in inputs or "group_ids" in inputs:
        return _filter(case)
    if "completion_ids" in inputs or "texts" in inputs:
        return _repetition(case)
    if "truncated" in inputs:
        return _stop_properly(case)
    if "correct" in inputs:
        return _cosine(case)
    return _overlong(case)


def _overlong(case: Case) -> Result:
    spec = SoftOverlong(
        max_tokens=int(case.option("max_len")),
        buffer=int(case.option("buffer")),
        factor=float(case.option("factor", 1.0)),
        cap=bool(case.option("cap", True)),
    )
    penalty = soft_overlong(case.inputs["lengths"], spec)
    if "rewards" not in case.inputs:
        return {"penalty": penalty}
    return {"penalty": penalty, "rewards": case.array("rewards") + penalty}


def _stop_properly(case: Case) -> Result:
    spec = StopProperly(coefficient=float(case.option("coef")))
    return {"rewards": stop_properly(case.array("rewards"), case.inputs["truncated"], spec)}


def _cosine(case: Case) -> Result:
    spec = CosineLength(
        max_tokens=int(case.option("max_len")),
        wrong_short=float(case.option("min_value_wrong")),
        wrong_long=float(case.option("max_value_wrong")),
        correct_long=float(case.option("min_value_correct")),
        correct_short=float(case.option("max_value_correct")),
    )
    return {"rewards": cosine_length(case.inputs["lengths"], case.inputs["correct"], spec)}


def _repetition(case: Case) -> Result:
    spec = Repetition(
        ngram=int(case.option("ngram_size")), max_penalty=float(case.option("max_penalty"))
    )
    if "texts" in case.inputs:
        return {"rewards": repetition([words(text) for text in case.inputs["texts"]], spec)}
    return {"rewards": repetition(case.inputs["completion_ids"], spec)}


def _adaptive_kl(case: Case) -> Result:
    spec = KL(
        estimator="k1",
        coefficient=float(case.option("init")),
        target=float(case.option("target")),
        horizon=int(case.option("horizon")),
    )
    coefficient, found = spec.coefficient, []
    for kl in case.inputs["kls"]:
        coefficient = adapted(coefficient, float(kl), int(case.option("n_steps")), spec)
        found.append(coefficient)
    return {"coefs": found}


def _filter(case: Case) -> Result:
    if "groups" in case.inputs:
        rows = case.inputs["groups"]
        scores = np.array([score for row in rows for score in row], np.float64)
        groups = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
    else:
        scores = case.array("rewards")
        groups = np.unique(case.inputs["group_ids"], return_inverse=True)[1]
    kept = _kept(case, scores, groups)
    found: dict[str, npt.ArrayLike] = {"kept_indices": np.flatnonzero(kept)}
    if "groups" in case.inputs:
        first = np.unique(groups, return_index=True)[1]
        found["keep"] = kept[first]
    return found


def _kept(
    case: Case, scores: npt.NDArray[np.float64], groups: npt.NDArray[np.int64]
) -> npt.NDArray[np.bool_]:
    if case.option("low") is not None or case.option("high") is not None:
        bounds = Difficulty(low=float(case.option("low")), high=float(case.option("high")))
        return difficulty(scores, groups, bounds)
    threshold = case.option("threshold")
    if threshold is None:
        masks = case.inputs.get("loss_masks")
        spec = ZeroVariance(tolerance=float(case.option("tol", 0.0)), singleton="keep")
        # SkyRL compares the samples that carry a loss.
        live = np.array([masks is None or sum(masks[i]) > 0 for i in range(len(scores))])
        compared = groups[live]
        return ~np.isin(groups, compared[~zero_variance(scores[live], compared, spec)])
    ddof = int(case.option("ddof", 1))
    if float(threshold) == 0.0:
        # A deviation compared with 0 as numpy rounds it: equal scores may look varied.
        sets = [scores[groups == number] for number in np.unique(groups)]
        varied = [len(s) == 1 or bool(np.std(s, ddof=ddof) > 0) for s in sets]
        return np.array(varied)[groups]
    spec = ZeroVariance(
        tolerance=float(threshold),
        measure="std",
        ddof=ddof,
        singleton="keep" if case.library == "msrl" else "remove",
    )
    return zero_variance(scores, groups, spec)
