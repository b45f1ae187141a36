"""The texts of a run's steps and of its end, which every display shows."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from flowrl.graph.serialization import parse_attr
from flowrl.observe.rows import SampleRow, StepMetrics, Summary, overlapping_work
from flowrl.specs import RowCondition
from flowrl.wording import counted

_ENDS = ("consumed", "filtered", "dropped")
"""The ends of samples in the order in which the summary counts them."""

_BETWEEN = ("evaluate", "log")
"""Kinds of work between the steps of a stage."""


def format_seconds(seconds: float) -> str:
    """`0.8s`, `42s`, `3m 05s`, `2h 07m`."""
    if seconds < 10:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    return f"{whole // 3600}h {whole % 3600 // 60:02d}m"


def format_rate(rate: float) -> str:
    """`870`, `23.1k`, `1.2M`."""
    if rate < 1000:
        return f"{rate:.0f}"
    return f"{rate / 1e3:.1f}k" if rate < 1e6 else f"{rate / 1e6:.1f}M"


def visible(text: str) -> str:
    """Returns `text` with control characters as escapes; line breaks are kept."""
    return "".join(
        char if char.isprintable() or char == "\n" else char.encode("unicode_escape").decode()
        for char in text
    )


def one_line(text: str, width: int) -> str:
    """Returns `text` on one line of at most `width` characters, control characters as escapes."""
    shown = visible(text).replace("\n", "\\n")
    return shown if len(shown) <= width else shown[: max(0, width - 3)] + "..."


def go_on_text(folder: str, *, failed: bool) -> str:
    """Returns how to go on with a run.

    Args:
        failed: True if it failed, which people often mend in a file of theirs.
    """
    text = f"go on with: flowrl run --resume {shlex.quote(folder)}"
    return f"{text} (add --accept-changes if you change a file that it reads)" if failed else text


def pick_samples(rows: Sequence[SampleRow], count: int) -> list[SampleRow]:
    """Returns at most `count` samples over the range of scores, best and worst included."""
    ranked = sorted(rows, key=lambda row: -_sortable(row.score))
    if len(ranked) <= count:
        return ranked
    if count == 1:
        return ranked[:1]
    return [ranked[i * (len(ranked) - 1) // (count - 1)] for i in range(count)]


def _sortable(score: float | None) -> float:
    return score if score is not None and score == score else float("-inf")


def summary_lines(summary: Summary) -> list[str]:
    """Returns the end of a run as plain lines: steps and times, samples, folder, headline."""
    lines = []
    for stage, steps in summary.steps.items():
        seconds = dict(summary.seconds.get(stage, {}))
        whole = seconds.pop("step", None)
        parts = _parts(seconds)
        lines.append(
            f"{stage}: {counted(steps, 'step')}"
            + (f" in {format_seconds(whole)}" if whole is not None else "")
            + (f" ({parts})" if parts else "")
        )
    if summary.samples:
        # A fixed order, so that two runs can be compared.
        counts = [(end, summary.samples.get(end, 0)) for end in _ENDS]
        ends = ", ".join(f"{count:,} {end}" for end, count in counts if count)
        lines.append(f"samples: {ends}; {summary.num_tokens:,} response tokens")
    if summary.num_example_tokens:
        lines.append(f"examples: {summary.num_example_tokens:,} response tokens")
    lines.append(f"took {format_seconds(summary.wall_s)}; everything is in {summary.folder}")
    lines.append(summary.headline)
    return lines


def _parts(seconds: Mapping[str, float]) -> str:
    """`wait 1.5s, update 0.3s; overlapping: collect 2.0s; between steps: evaluate 1.0s`.

    Only the first ones are parts of the steps, and sum to no more than these.
    """
    overlapping = overlapping_work(seconds)
    named: dict[str, list[str]] = {"": [], "overlapping: ": [], "between steps: ": []}
    # The longest first; work that would read 0.0s is left out.
    for kind, spent in sorted(seconds.items(), key=lambda item: -item[1]):
        if spent >= 0.05:
            when = "overlapping: " if kind in overlapping else ""
            when = "between steps: " if kind in _BETWEEN else when
            named[when].append(f"{kind} {format_seconds(spent)}")
    return "; ".join(when + ", ".join(parts) for when, parts in named.items() if parts)


def token_rates(metrics: StepMetrics) -> list[str]:
    """`generate 23.1k`, for each kind of work in which a model reads tokens."""
    return [
        f"{kind} {format_rate(rate)}"
        for kind in ("generate", "logprobs", "values", "update")
        if (rate := metrics.tokens_per_second(kind)) is not None
    ]


def stale_samples(metrics: StepMetrics) -> list[str]:
    """`staleness 0.5 (max 2)`, where some sample was older than the newest weights."""
    oldest = metrics.extra.get("staleness/max", 0.0)
    if not oldest:
        return []
    return [f"staleness {metrics.extra['staleness/mean']:.1f} (max {oldest:.0f})"]


def policy_drift(metrics: StepMetrics) -> list[str]:
    """`clipped 3.1%`, `mismatch 0.0042`: how far the policy is from the one that sampled.

    They are the share of clipped tokens from 1 % on, and `mismatch/k3`, the estimate of
    KL(engine, trainer) in nats per token, from 0.001 on.
    """
    parts = []
    clipped = (metrics.clip_fraction_low or 0.0) + (metrics.clip_fraction_high or 0.0)
    if clipped >= 0.01:
        parts.append(f"clipped {clipped:.1%}")
    mismatch = metrics.extra.get("mismatch/k3", 0.0)
    if mismatch >= 0.001:
        parts.append(f"mismatch {mismatch:.4f}")
    return parts


def reward_terms(metrics: StepMetrics) -> list[str]:
    """`format 0.900 (std 0.30, 2 failed)`, for each reward term, where a step has several."""
    parts: dict[str, dict[str, float]] = {}
    for key, value in metrics.extra.items():
        if key.startswith("terms/"):
            name, _, number = key.removeprefix("terms/").rpartition("/")
            parts.setdefault(name, {})[number] = value
    return [_term(name, numbers) for name, numbers in parts.items()] if len(parts) > 1 else []


def _term(name: str, numbers: Mapping[str, float]) -> str:
    failed = [f"{numbers['failures']:.0f} failed"] if numbers["failures"] else []
    if "mean" not in numbers:
        return f"{name} - ({', '.join(failed)})"
    spread = ", ".join([f"std {numbers['std']:.2f}", *failed])
    return f"{name} {numbers['mean']:.3f} ({spread})"


def logged_numbers(metrics: StepMetrics, logged: Sequence[str]) -> list[str]:
    """`surprise 0.693`, for each number that a program logs and that this step has."""
    found = metrics.extra
    return [f"{name} {found[name]:.4g}" for name in logged if name in found]


def remover_text(text: str) -> str:
    """Returns what removed groups as a program calls it: `filter.difficulty(low=0, high=1)`.

    Args:
        text: Its text in the graph.
    """
    spec = parse_attr(text)
    if isinstance(spec, RowCondition):
        return f"where({spec.described})"
    return text.replace(":", ".", 1)


def step_line(
    metrics: StepMetrics, steps: int, eta_s: float | None, logged: Sequence[str] = ()
) -> str:
    """Returns a step as one line, without the numbers that do not apply to its stage.

    Args:
        logged: Names of the numbers that the program logs.
    """
    parts = [f"{metrics.stage} {metrics.step}/{steps}".ljust(14)]
    if metrics.reward_mean is not None:
        spread = "" if metrics.reward_std is None else f" (std {metrics.reward_std:.2f})"
        parts.append(f"reward {metrics.reward_mean:.3f}{spread}")
    parts += reward_terms(metrics)
    if failed := metrics.extra.get("failed_rewards"):
        parts.append(f"rewards failed {failed:.0f}")
    if metrics.length_mean is not None:
        longest = "" if metrics.length_max is None else f" (max {metrics.length_max})"
        parts.append(f"length {metrics.length_mean:.1f}{longest}")
    if metrics.loss is not None:
        parts.append(f"loss {metrics.loss:.4f}")
    elif metrics.num_samples == 0 and not metrics.filtered_groups:
        parts.append("no update")
    elif metrics.num_samples == 0:
        removers = map(remover_text, metrics.filtered_by)
        by = " and ".join(each.removeprefix("filter.").removeprefix("select.") for each in removers)
        groups = counted(metrics.filtered_groups, "group")
        parts.append(f"no update, all {groups} filtered" + (f" by {by}" if by else ""))
    if metrics.grad_norm is not None:
        parts.append(f"grad norm {metrics.grad_norm:.3g}")
    if (entropy := metrics.extra.get("entropy")) is not None:
        parts.append(f"entropy {entropy:.3f}")
    if metrics.kl is not None:
        parts.append(f"kl {metrics.kl:.4f}")
    if (accuracy := metrics.extra.get("pair_accuracy")) is not None:
        parts.append(f"pair accuracy {accuracy:.3f}  margin {metrics.extra['reward_margin']:.3f}")
    parts += policy_drift(metrics)
    parts += stale_samples(metrics)
    parts += logged_numbers(metrics, logged)
    if metrics.skipped_updates:
        parts.append(f"updates skipped {metrics.skipped_updates}")
    rates = token_rates(metrics)
    if rates:
        parts.append("tokens/s " + " ".join(rates))
    if eta_s is not None:
        parts.append(f"to go {format_seconds(eta_s)}")
    return "  ".join(parts)
