"""What a person sees: plain lines in files, a live panel on a terminal, one last line in both."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from flowrl.observe.display import PlainDisplay, SilentDisplay, TimeToGo, open_display
from flowrl.observe.rich_display import RichDisplay, sparkline
from flowrl.observe.rows import RunInfo, SampleRow, StepMetrics, Summary
from flowrl.observe.run_text import (
    format_rate,
    format_seconds,
    one_line,
    pick_samples,
    step_line,
    summary_lines,
)

INFO = RunInfo(name="quickstart", folder=Path("runs/quickstart"), stages=("sft", "grpo"))
STEP = StepMetrics(
    stage="grpo",
    step=1,
    num_tokens=2000,
    reward_mean=0.5,
    reward_std=0.25,
    length_mean=3.9,
    length_max=4,
    truncated=0.1,
    loss=0.0123,
    filtered_groups=2,
    seconds={"generate": 0.5, "score": 0.0, "update": 0.1},
)
SUMMARY = Summary(
    name="quickstart",
    folder="runs/quickstart",
    seed=0,
    metric="accuracy",
    temperature=1.0,
    before=0.41,
    after=0.94,
    wall_s=92.0,
    steps={"sft": 180, "grpo": 300},
    seconds={"grpo": {"generate": 12.0, "update": 33.0}},
    samples={"consumed": 20480, "filtered": 300},
    num_tokens=81920,
)
HEADLINE = "held-out sampled accuracy: before 0.41 after 0.94"


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def sample(score: float | None, response: str = "068") -> SampleRow:
    return SampleRow(
        stage="grpo",
        step=1,
        sample=f"0/{score}/0",
        prompt="23+45=",
        response=response,
        answer="068",
        score=score,
        terms={},
        num_tokens=4,
        finish="stop",
        versions=((0, 4),),
        end="consumed",
    )


def drive(display, clock: Clock, steps: int = 20) -> None:
    display.start(INFO)
    display.stage("grpo", steps)
    display.evaluation("grpo", 0, {"accuracy": 0.41})
    for step in range(1, steps + 1):
        clock.now += 1.0
        display.step(replace(STEP, step=step), 90.0)
        display.samples([sample(1.0, "a\x1b[2J\r\nb\x07"), sample(0.0, "表\x9b")])
    display.warn("a reward\x1b[31m took long")
    display.end(SUMMARY)
    display.close()
    display.close()


def test_plain_lines_hold_no_control_characters_and_end_with_the_headline():
    stream, clock = io.StringIO(), Clock()
    drive(PlainDisplay(stream, every_s=5.0, samples_every_s=12.0, clock=clock), clock)
    text = stream.getvalue()
    assert all(char.isprintable() for char in text.replace("\n", ""))
    lines = text.splitlines()
    assert lines[-1] == HEADLINE
    assert lines[0] == "run quickstart: sft -> grpo, folder runs/quickstart"
    assert (
        "grpo 1/20       reward 0.500 (std 0.25)  length 3.9 (max 4)  loss 0.0123  "
        "tokens/s generate 4.0k update 20.0k  to go 1m 30s"
    ) in lines
    steps = [line.split()[1] for line in lines if " reward " in line and "sample" not in line]
    assert steps == ["1/20", "6/20", "11/20", "16/20", "20/20"]
    assert len([line for line in lines if line.startswith("  sample ")]) == 2
    assert r"a\x1b[2J\r\nb\x07" in text
    assert r"warning: a reward\x1b[31m took long" in lines
    assert "took 1m 32s; everything is in runs/quickstart" in lines
    assert "samples: 20,480 consumed, 300 filtered; 81,920 response tokens" in lines
    assert not any(line.startswith("examples") for line in lines)
    first_filtered = dict(reversed(SUMMARY.samples.items()))
    assert summary_lines(replace(SUMMARY, samples=first_filtered)) == summary_lines(SUMMARY)
    lines = summary_lines(replace(SUMMARY, num_example_tokens=1200))
    assert "examples: 1,200 response tokens" in lines


@pytest.mark.parametrize(
    ("seconds", "line"),
    [
        (
            {"step": 45.0, "generate": 12.0, "update": 33.0, "evaluate": 7.0, "log": 0.2},
            "grpo: 300 steps in 45s (update 33s, generate 12s; between steps: evaluate 7.0s, "
            "log 0.2s)",
        ),
        (
            {
                "step": 2.0,
                "wait": 1.5,
                "update": 0.25,
                "collect": 11.0,
                "generate": 3.0,
                "log": 0.01,
            },
            "grpo: 300 steps in 2.0s (wait 1.5s, update 0.2s; overlapping: collect 11s, "
            "generate 3.0s)",
        ),
        (
            {"step": 2.0, "wait": 0.0, "assemble": 1.0},
            "grpo: 300 steps in 2.0s (overlapping: assemble 1.0s)",
        ),
        ({"step": 2.0}, "grpo: 300 steps in 2.0s"),
    ],
    ids=["in turns", "drawn ahead", "never waited", "nothing"],
)
def test_parts_of_the_steps_are_told_apart_from_what_is_done_beside_and_between_them(
    seconds: dict[str, float], line: str
):
    summary = replace(SUMMARY, steps={"grpo": 300}, seconds={"grpo": seconds})
    assert summary_lines(summary)[0] == line


def test_the_age_of_samples_is_shown_where_some_are_old():
    old = replace(STEP, seconds={}, extra={"staleness/max": 2.0, "staleness/mean": 0.75})
    assert step_line(old, 20, None).endswith("loss 0.0123  staleness 0.8 (max 2)")
    panel = RichDisplay(Terminal(), clock=Clock())
    panel.stage("grpo", 2)
    panel.step(old)
    assert "staleness 0.8 (max 2)" in render(panel)
    fresh = replace(old, extra={"staleness/max": 0.0, "staleness/mean": 0.0})
    assert step_line(fresh, 20, None).endswith("loss 0.0123")


def test_a_step_shows_the_gradient_norm_and_the_entropy_of_its_updates():
    step = replace(STEP, seconds={}, grad_norm=0.12345, extra={"entropy": 1.23456})
    assert step_line(step, 20, None).endswith("loss 0.0123  grad norm 0.123  entropy 1.235")
    panel = RichDisplay(Terminal(), clock=Clock())
    panel.stage("grpo", 2)
    panel.step(step)
    assert "loss 0.0123  grad norm 0.123  entropy 1.23" in render(panel)


def test_reward_terms_are_shown_where_there_are_several_and_failures_always():
    one = {"terms/digit/mean": 0.5, "terms/digit/std": 0.25, "terms/digit/failures": 0.0}
    two = {
        "terms/judge/form/mean": -2.0,
        "terms/judge/form/std": 0.5,
        "terms/judge/form/failures": 3.0,
    }
    lost = {"terms/lost/failures": 4.0}
    step = replace(STEP, seconds={}, length_mean=None, loss=None, filtered_groups=0, extra=one)
    step = replace(step, num_samples=8)
    assert step_line(step, 20, None).endswith("reward 0.500 (std 0.25)")
    step = replace(step, extra={**one, "failed_rewards": 2.0})
    assert step_line(step, 20, None).endswith("reward 0.500 (std 0.25)  rewards failed 2")
    step = replace(step, extra={"surprise": 1.0, **one, **two, **lost, "failed_rewards": 7.0})
    terms = "digit 0.500 (std 0.25)  judge/form -2.000 (std 0.50, 3 failed)  lost - (4 failed)"
    assert step_line(step, 20, None).endswith(f"(std 0.25)  {terms}  rewards failed 7")
    panel = RichDisplay(Terminal(), clock=Clock())
    panel.stage("grpo", 2)
    panel.step(step)
    assert f"terms     {terms}" in render(panel)
    assert "7 rewards failed" in render(panel)


def test_a_supervised_step_shows_no_reward():
    stream = io.StringIO()
    display = PlainDisplay(stream)
    display.stage("sft", 2)
    display.step(StepMetrics(stage="sft", step=1, loss=2.5))
    assert stream.getvalue().splitlines()[-1].split() == ["sft", "1/2", "loss", "2.5000"]


def test_what_a_program_logs_stands_in_the_lines_of_its_steps_and_in_the_panel():
    logged = ("surprise", "best/score")
    row = replace(STEP, seconds={}, extra={"surprise": 0.6931, "pairs": 3.0, "best/score": 1.0})
    stream = io.StringIO()
    plain = PlainDisplay(stream)
    plain.stage("grpo", 2, logged)
    plain.step(row)
    plain.step(replace(row, step=2, extra={}))  # no sample was left to take a mean of
    first, second = stream.getvalue().splitlines()[1:]
    assert first.endswith("loss 0.0123  surprise 0.6931  best/score 1")
    assert second.endswith("loss 0.0123")
    panel = RichDisplay(Terminal(), clock=Clock())
    panel.stage("grpo", 2, logged)
    panel.step(row)
    text = render(panel)
    assert "logged    surprise 0.6931  best/score 1" in text
    assert "pairs" not in text
    panel.stage("more", 2)
    panel.step(row)
    assert "logged" not in render(panel)


def test_a_stream_that_cannot_spell_a_text_gets_escapes():
    raw = io.BytesIO()
    display = PlainDisplay(io.TextIOWrapper(raw, encoding="ascii", write_through=True))
    display.note("表 é")
    assert raw.getvalue() == b"\\u8868 \\xe9\n"


def test_a_reader_that_goes_away_does_not_end_the_run(caplog):
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    display = PlainDisplay(Gone())
    drive(display, Clock())
    assert caplog.text.count("nobody reads the output") == 1


def test_the_panel_ends_with_the_headline_and_gives_the_terminal_back():
    stream, clock = Terminal(), Clock()
    display = RichDisplay(stream, clock=clock)
    drive(display, clock)
    lines = stream.getvalue().rstrip("\n").splitlines()
    assert HEADLINE in lines[-1]
    assert stream.getvalue().count("\x1b[?25l") == stream.getvalue().count("\x1b[?25h") == 1
    assert "\x1b[2J" not in stream.getvalue()
    assert "\x07" not in stream.getvalue()


def render(display: RichDisplay) -> str:
    console = Console(file=io.StringIO(), width=100)
    console.print(display.render())
    return console.file.getvalue()


def test_the_panel_shows_progress_reward_lengths_speeds_time_and_samples():
    clock = Clock()
    display = RichDisplay(io.StringIO(), clock=clock)
    assert "flowrl" in render(display)
    display.stage("grpo", 20)
    assert "grpo 0/20" in render(display)
    for step in (1, 2, 3):
        display.step(replace(STEP, step=step, reward_mean=step / 4), 90.0)
    display.samples([sample(1.0, "good"), sample(None, "bad")])
    clock.now += 30.0
    text = render(display)
    for part in (
        "grpo 3/20",
        "1m 00s to go",
        "reward    0.750 std 0.25  ▁▅█",
        "3.9 tokens, longest 4, 10 % truncated",
        "generate 4.0k  update 20.0k",
        "loss 0.0123",
        "2 groups filtered",
        "1.00  23+45=  good",
        "-  23+45=  bad",
    ):
        assert part in text


def test_the_panel_forgets_the_last_stage_when_the_next_begins():
    display = RichDisplay(io.StringIO(), clock=Clock())
    display.stage("grpo", 20)
    display.step(STEP, 90.0)
    display.samples([sample(1.0, "good")])
    display.stage("more", 5)
    text = render(display)
    assert "more 0/5" in text
    assert "good" not in text
    assert "to go" not in text


def test_steps_of_the_panel_only_store(monkeypatch):
    stream, clock = io.StringIO(), Clock()
    display = RichDisplay(stream, clock=clock)
    monkeypatch.setattr(display, "render", lambda: pytest.fail("drawn by a step"))
    display.stage("grpo", 5)
    display.step(STEP, 1.0)
    display.samples([sample(1.0)])
    assert stream.getvalue() == ""


@pytest.mark.parametrize(
    ("stream", "term", "kind"),
    [
        (io.StringIO(), "xterm", PlainDisplay),
        (Terminal(), "dumb", PlainDisplay),
        (Terminal(), "", PlainDisplay),
        (Terminal(), "xterm", RichDisplay),
    ],
)
def test_only_a_terminal_gets_the_panel(monkeypatch, stream, term, kind):
    monkeypatch.setenv("TERM", term)
    assert isinstance(open_display(stream), kind)


def test_the_silent_display_shows_nothing(capsys):
    drive(SilentDisplay(), Clock())
    assert capsys.readouterr() == ("", "")


def test_a_sparkline_spans_the_range_and_averages_a_long_curve():
    assert sparkline([], 10) == ""
    assert sparkline([float("nan"), float("inf")], 10) == ""
    assert sparkline([2.0, 2.0], 10) == "▁▁"
    assert sparkline([0, 1, 0, 1, 7, 7], 3) == "▁▁█"
    assert len(sparkline(list(range(1000)), 40)) == 40


def test_samples_shown_span_from_best_to_worst():
    rows = [sample(score) for score in (0.2, None, 1.0, 0.5, float("nan"))]
    assert [row.score for row in pick_samples(rows, 3)][:2] == [1.0, 0.2]
    assert pick_samples(rows, 1)[0].score == 1.0
    assert len(pick_samples(rows, 9)) == 5


def test_time_to_go_follows_the_steps():
    to_go = TimeToGo(10, weight=0.5)
    assert to_go.step(1, 2.0) == pytest.approx(18.0)
    assert to_go.step(2, 4.0) == pytest.approx(24.0)
    assert to_go.step(10, 4.0) == 0.0
    assert to_go.step(11, 4.0) == 0.0


def test_numbers_are_short():
    assert [format_seconds(s) for s in (0.84, 42, 59.6, 185, 7620)] == [
        "0.8s",
        "42s",
        "1m 00s",
        "3m 05s",
        "2h 07m",
    ]
    assert [format_rate(r) for r in (870, 23_100, 1_200_000)] == ["870", "23.1k", "1.2M"]
    assert one_line("a\nb" + "x" * 20, 10) == r"a\nbxxx..."


def test_a_step_whose_groups_were_all_filtered_says_that_nothing_was_learnt():
    line = step_line(StepMetrics(stage="grpo", step=1, reward_mean=0.0, filtered_groups=32), 1, 0.0)
    assert "no update, all 32 groups filtered" in line
    lost = StepMetrics(stage="grpo", step=1, extra={"failed_rewards": 8.0})
    assert step_line(lost, 1, None).endswith("rewards failed 8  no update")


def test_a_step_says_how_many_updates_were_skipped():
    row = StepMetrics(stage="grpo", step=1, loss=0.0, num_samples=8, skipped_updates=2)
    assert "updates skipped 2" in step_line(row, 1, 0.0)


def test_a_full_disk_behind_the_output_ends_no_run(caplog):
    class Full(io.StringIO):
        encoding = "utf-8"

        def write(self, text: str) -> int:
            raise OSError(28, "No space left on device")

    display = PlainDisplay(Full())
    display.note("a")
    display.note("b")
    assert [r.getMessage() for r in caplog.records] == [
        "the output cannot be written (No space left on device); the run goes on without it"
    ]


def test_clipping_and_mismatch_are_shown_from_the_values_on_that_matter():
    drifted = replace(
        STEP,
        seconds={},
        clip_fraction_low=0.011,
        clip_fraction_high=0.02,
        extra={"mismatch/k3": 0.00421},
    )
    assert step_line(drifted, 20, None).endswith("loss 0.0123  clipped 3.1%  mismatch 0.0042")
    close = replace(drifted, clip_fraction_high=None, clip_fraction_low=0.0, extra={})
    assert step_line(close, 20, None).endswith("loss 0.0123")
