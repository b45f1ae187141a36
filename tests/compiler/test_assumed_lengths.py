"""What plans tell of lengths that a configuration asks for: those that the longest would cut."""

from __future__ import annotations

import pytest

from flowrl import api
from flowrl.compiler.lengths import assumed_lengths
from flowrl.config.schema import PlanConfig
from flowrl.cost.lengths import LognormalLengths, mean_by_share_cut
from flowrl.errors import ConfigError
from tests.runtime.tiny_runs import tiny_config


def test_a_mean_at_which_half_of_responses_are_cut_has_the_longest_as_its_median():
    # mu = ln 100: 100 exp(1/2) F(-1) + 100 / 2 = 164.872 * 0.158655 + 50 = 76.158
    mean = mean_by_share_cut(0.5, sigma=1.0, maximum=100.0)
    assert mean == pytest.approx(76.158, abs=1e-3)
    lengths = LognormalLengths(mean=mean, sigma=1.0, maximum=100.0)
    assert lengths.share_cut == pytest.approx(0.5, abs=1e-9)
    assert lengths.before_cut == pytest.approx(164.872, abs=1e-3)


def test_a_mean_that_nearly_all_responses_would_be_cut_for_is_told_with_one_that_fits():
    (told,) = assumed_lengths(PlanConfig(mean_response_tokens=8000, sigma=0.8), 8192)
    assert told == (
        "91 % of responses are cut at the longest, 8,192 tokens, for "
        "plan.mean_response_tokens=8000 with sigma 0.8 is a mean of 33,801 before the cut; "
        "a mean of 4,600 would cut 20 %"
    )
    (told,) = assumed_lengths(PlanConfig(mean_response_tokens=8192, sigma=0.8), 8192)
    assert "every response has the 8,192 tokens of the longest" in told
    assert "so plan.sigma=0.8 says nothing; a mean of 4,600 would cut 20 %" in told


@pytest.mark.parametrize(("mean", "sigma"), [(4600, 0.8), (2400, 0.8), (8192, 0), (8192, None)])
def test_lengths_that_are_what_they_say_are_not_told_of(mean: float, sigma: float | None):
    told = assumed_lengths(PlanConfig(mean_response_tokens=mean, sigma=sigma), 8192)
    assert not any("cut" in one or "says nothing" in one for one in told)


def test_a_mean_above_the_longest_is_refused(tmp_path):
    config = tiny_config(tmp_path)
    config["train"]["sampling"] = {"max_tokens": 100}
    config["roles"]["actor"]["model"] |= {"max_length": 200}
    config["plan"] = {"mean_response_tokens": 120, "sigma": 1.0}
    with pytest.raises(ConfigError, match="is longer than the longest") as caught:
        api.compile(None, config)
    assert "set plan.mean_response_tokens to at most 100, or raise" in str(caught.value)
