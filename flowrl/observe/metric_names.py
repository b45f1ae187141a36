"""The names of a run's numbers in trackers: flowrl's own, verl's and MindSpeed-RL's.

flowrl's names are the keys of metrics.jsonl, with `seconds/KIND` for wall times and `eval/METRIC`
for held-out metrics. The two other sets rename the numbers that those frameworks also log, so that
an existing dashboard shows a flowrl run; numbers without a counterpart keep flowrl's names. The
counterparts follow verl/trainer/ppo/metric_utils.py and the metrics page of MindSpeed-RL's
documentation, with these differences, where theirs do not say what they seem to:

- a number of several updates is their mean, never the last or the largest one;
- throughput counts the prompt and response tokens of samples that reached an update once, and no
  tokens that were filtered, dropped or are padding;
- throughput is per device, and a device that several roles share counts once.

docs/metrics.md has the formulas.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flowrl.observe.rows import EvaluationRow, StepMetrics

CONSUMED_TOKENS = "consumed_tokens"
"""The metric that counts prompt and response tokens of the samples that reached an update."""

_NOT_NUMBERS = ("stage", "step", "seconds", "extra", "filtered_by")


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricNames:
    """One set of names.

    Attributes:
        renamed: The name of a number by flowrl's name.
        clip_fraction: The name of the sum of `clip_fraction_low` and `clip_fraction_high`.
        throughput: The names of `consumed_tokens` per second and device, by the kind of work over
            whose seconds they are taken; `step` is the whole step.
        evaluation_name: The name of a held-out metric, with `{metric}` in it.
    """

    renamed: Mapping[str, str]
    clip_fraction: str = ""
    throughput: Mapping[str, str]
    evaluation_name: str = "eval/{metric}"

    def step(self, row: StepMetrics, devices: int) -> dict[str, float]:
        """Returns the numbers of a step by their names in this set.

        Args:
            row: The step.
            devices: The number of different devices that the stage uses.
        """
        values = {
            name: float(value)
            for name, value in row.to_json().items()
            if name not in _NOT_NUMBERS and isinstance(value, int | float)
        }
        seconds = {**row.seconds, "step": row.wall_s}
        values |= {f"seconds/{kind}": spent for kind, spent in row.seconds.items()}
        values |= row.extra
        named = {self.renamed.get(name, name): value for name, value in values.items()}
        low, high = row.clip_fraction_low, row.clip_fraction_high
        if self.clip_fraction and low is not None and high is not None:
            named[self.clip_fraction] = low + high
        for kind, name in self.throughput.items():
            if CONSUMED_TOKENS in row.extra and seconds.get(kind, 0.0) > 0:
                named[name] = row.extra[CONSUMED_TOKENS] / seconds[kind] / max(1, devices)
        return named

    def evaluation(self, row: EvaluationRow) -> dict[str, float]:
        """Returns held-out metrics by their names in this set."""
        return {
            self.evaluation_name.format(metric=name): value
            for name, value in row.named_metrics().items()
        }


_SHARED = {
    "length_mean": "response_length/mean",
    "length_max": "response_length/max",
    "truncated": "response_length/clip_ratio",
    "learning_rate": "actor/lr",
    "loss": "actor/loss",
    "kl": "actor/kl_loss",
    "entropy": "actor/entropy",
}

NAMES: Mapping[str, MetricNames] = {
    "flowrl": MetricNames(renamed={}, throughput={"step": "tokens_per_second_per_device"}),
    "verl": MetricNames(
        renamed={
            **_SHARED,
            "reward_mean": "critic/score/mean",
            "grad_norm": "actor/grad_norm",
            "wall_s": "perf/time_per_step",
            CONSUMED_TOKENS: "perf/total_num_tokens",
            "dual_clip_fraction": "actor/pg_clipfrac_lower",
            "critic/loss": "critic/vf_loss",
            "critic/learning_rate": "critic/lr",
            "seconds/generate": "timing_s/gen",
            "seconds/score": "timing_s/reward",
            "seconds/logprobs": "timing_s/old_log_prob",
            "seconds/values": "timing_s/values",
            "seconds/advantage": "timing_s/adv",
            "seconds/update": "timing_s/update_actor",
            "seconds/sync": "timing_s/update_weights",
        },
        clip_fraction="actor/pg_clipfrac",
        throughput={"step": "perf/throughput"},
        evaluation_name="val-core/{metric}",
    ),
    "mindspeed_rl": MetricNames(
        renamed={
            **_SHARED,
            "reward_mean": "grpo/score/mean",
            "grad_norm": "grad_norm",
            "wall_s": "timing/all",
            "seconds/generate": "timing/rollout",
            "seconds/score": "timing/rule_reward",
            "seconds/logprobs": "timing/old_log_p",
            "seconds/advantage": "timing/adv",
            "seconds/update": "timing/update",
            "seconds/sync": "timing/resharding_to_infer",
        },
        clip_fraction="actor/pg_clipfrac",
        throughput={"step": "e2e_tps", "update": "update_tps", "generate": "vllm_tps"},
    ),
}
"""The sets of names by the value of `tracking.names`."""
