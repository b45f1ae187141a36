"""The scoring pool against rewards that raise, hang, lie and die."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from flowrl.backend.protocols import ScoreContext, ScoreRequest, ScoreResult
from flowrl.errors import BackendError, ConfigError, RewardError, WorkerDied
from flowrl.ids import RoleName, SampleId
from flowrl.runtime.scoring.pool import FailureKind, ScoreFailure, ScoringPool
from flowrl.specs import FinishReason

REWARDS = Path(__file__).parent / "rewards.py"
PLUGIN = "flowrl_backends.verify:plugin"
DEADLINE_S = 60.0

pytestmark = pytest.mark.usefixtures("cold_starts")


def context(function: str = f"{REWARDS}:by_word", **options: object) -> ScoreContext:
    term = {"kind": "python", "function": function, "name": "score", "weight": 1.0, **options}
    return ScoreContext(role=RoleName("verifier"), terms=(term,))


def request(response: str, number: int = 0, answer: str = "") -> ScoreRequest:
    return ScoreRequest(
        sample=SampleId(f"0/{number}/0"),
        prompt="p",
        response=response,
        answer=answer,
        row={"prompt": "p"},
        finish=FinishReason.STOP,
        num_tokens=3,
    )


def collect(pool: ScoringPool, num: int) -> dict[str, ScoreResult | ScoreFailure]:
    """The next `num` results by sample id."""
    end = time.monotonic() + DEADLINE_S
    found: dict[str, ScoreResult | ScoreFailure] = {}
    while len(found) < num:
        assert pool.wait(end - time.monotonic()), f"only {len(found)} of {num} came back"
        for result in pool.poll():
            assert result.sample not in found
            found[result.sample] = result
    return found


def run(*responses: str, **options: object) -> list[ScoreResult | ScoreFailure]:
    with ScoringPool(PLUGIN, context(), **{"timeout_s": 0.5, "grace_s": 0.7} | options) as pool:
        pool.submit([request(text, i) for i, text in enumerate(responses)])
        found = collect(pool, len(responses))
        assert pool.num_pending == 0
    return [found[f"0/{i}/0"] for i in range(len(responses))]


def failure(result: ScoreResult | ScoreFailure) -> ScoreFailure:
    assert isinstance(result, ScoreFailure), result
    return result


def score(result: ScoreResult | ScoreFailure) -> float:
    assert isinstance(result, ScoreResult), result
    return result.score


def test_every_sample_comes_back_once_whatever_the_number_of_workers():
    results = run(*(f"ok {i}" for i in range(700)), workers=3, timeout_s=30.0)
    assert [score(r) for r in results] == list(range(700))


def test_a_python_loop_is_interrupted_and_the_same_process_goes_on():
    before, hung, after = run("pid", "loop", "pid", grace_s=30.0)
    assert failure(hung).kind is FailureKind.TIMEOUT
    assert "timeout_s=0.5" in hung.message
    assert hung.frames[-1].endswith("in _loop")
    assert score(before) == score(after)


def test_a_reward_that_swallows_its_time_limit_and_returns_zero_has_timed_out():
    assert failure(run("stubborn", grace_s=30.0)[0]).kind is FailureKind.TIMEOUT


def test_a_catastrophic_regular_expression_is_interrupted():
    (hung,) = run("regex", grace_s=30.0)
    assert failure(hung).kind is FailureKind.TIMEOUT
    assert hung.frames[-1].endswith("rewards.py:40 in _regex")


def test_a_rule_of_ours_that_takes_too_long_is_told_without_our_frames():
    terms = ({"kind": "format", "name": "slow", "pattern": "(a+)+b"},)
    slow = ScoreContext(role=RoleName("verifier"), terms=terms)
    with ScoringPool("verify", slow, timeout_s=0.2) as pool:
        pool.submit([request("a" * 64, 0)])
        timed_out = failure(collect(pool, 1)["0/0/0"])
    assert timed_out.kind is FailureKind.TIMEOUT
    assert timed_out.frames == ()


@pytest.mark.parametrize("action", ["immortal", "deaf"])
def test_what_cannot_be_interrupted_is_killed_and_the_rest_of_its_batch_scored(action):
    results = run("ok 1", "ok 2", action, "ok 3", "pid")
    assert failure(results[2]).kind is FailureKind.TIMEOUT
    assert "could not be interrupted" in results[2].message
    assert [score(results[i]) for i in (0, 1, 3)] == [1.0, 2.0, 3.0]


def test_a_reward_that_takes_the_alarm_for_itself_does_not_disarm_the_next_limit():
    owner, hung = run("alarm", "loop", grace_s=30.0)
    assert score(owner) == 1.0
    assert "could not be interrupted" not in failure(hung).message


def test_ten_gigabytes_and_a_number_of_a_billion_digits_fail_alone():
    results = run("ok 1", "large", "digits", "ok 2", timeout_s=1.0)
    assert failure(results[1]).kind is FailureKind.MEMORY
    assert results[1].message.startswith("ran out of memory (")
    assert failure(results[2]).kind is FailureKind.TIMEOUT
    assert [score(results[0]), score(results[3])] == [1.0, 2.0]


def lists(**options: object) -> ScoreContext:
    return context(f"{REWARDS}:in_lists", **options)


def test_a_function_of_lists_gets_many_samples_in_one_call():
    with ScoringPool(PLUGIN, lists(), timeout_s=30.0) as pool:
        pool.submit([request(f"ok {i}", i) for i in range(100)])
        found = collect(pool, 100)
        pool.submit([request("largest batch", 100)])
        largest = score(collect(pool, 1)["0/100/0"])
    assert [score(found[f"0/{i}/0"]) for i in range(100)] == list(range(100))
    assert 1 < largest <= 100


@pytest.mark.parametrize(
    ("action", "kind"),
    [
        ("key", FailureKind.RAISED),
        ("loop", FailureKind.TIMEOUT),
        ("deaf", FailureKind.TIMEOUT),
        ("exit", FailureKind.DIED),
        ("nan", FailureKind.INVALID),
    ],
)
def test_a_sample_that_spoils_its_batch_fails_alone(action, kind):
    with ScoringPool(PLUGIN, lists(), timeout_s=0.3, grace_s=0.3) as pool:
        texts = ("ok 1", action, "ok 2")
        pool.submit([request(text, i) for i, text in enumerate(texts)])
        found = collect(pool, len(texts))
    assert failure(found["0/1/0"]).kind is kind
    assert [score(found[f"0/{i}/0"]) for i in (0, 2)] == [1.0, 2.0]


@pytest.mark.parametrize("action", ["loop", "deaf"])
def test_a_term_has_a_time_limit_of_its_own(action):
    terms = (
        {"kind": "exact_match", "name": "accuracy"},
        {"kind": "python", "function": f"{REWARDS}:by_word", "name": "slow", "timeout_s": 0.3},
    )
    limited = ScoreContext(role=RoleName("v"), terms=terms)
    with ScoringPool(PLUGIN, limited, timeout_s=DEADLINE_S, grace_s=0.3) as pool:
        pool.submit([request(action, 0), request("ok 2", 1)])
        found = collect(pool, 2)
    assert failure(found["0/0/0"]).kind is FailureKind.TIMEOUT
    assert "timeout_s=0.3" in failure(found["0/0/0"]).message
    assert score(found["0/1/0"]) == 2.0


def test_a_slow_sample_does_not_hold_back_results_that_came_before_it():
    with ScoringPool(PLUGIN, context(), timeout_s=DEADLINE_S) as pool:
        pool.submit([request("ok 1", 0), request("ok 2", 1), request("loop", 2)])
        found = collect(pool, 2)
        assert set(found) == {"0/0/0", "0/1/0"}
        assert pool.num_pending == 1


def test_an_exception_names_the_users_own_line_and_no_frame_of_ours():
    (raised,) = run("key absent", timeout_s=30.0)
    assert failure(raised).kind is FailureKind.RAISED
    assert raised.message.startswith("raised KeyError: 'absent' (")
    assert [frame.split(" in ")[1] for frame in raised.frames] == ["by_word", "_nested"]
    assert all("rewards.py" in frame for frame in raised.frames)
    error = raised.error()
    assert isinstance(error, RewardError)
    assert "sample 0/0/0: the reward raised KeyError" in str(error)


@pytest.mark.parametrize("action", ["nan", "none", "text", "huge"])
def test_what_is_no_finite_number_is_invalid_and_never_zero(action):
    (result,) = run(action, timeout_s=30.0)
    assert failure(result).kind is FailureKind.INVALID
    assert len(result.message) < 400


@pytest.mark.parametrize(
    ("action", "ending"),
    [("exit", "exit code 7"), ("kill", "signal SIGKILL"), ("segfault", "signal SIGSEGV")],
)
def test_a_reward_that_ends_its_process_fails_alone(action, ending):
    results = run("ok 1", action, "ok 2", timeout_s=30.0)
    assert failure(results[1]).kind is FailureKind.DIED
    assert ending in results[1].message
    assert [score(results[0]), score(results[2])] == [1.0, 2.0]


def test_a_sample_whose_process_somebody_kills_is_scored_again(tmp_path: Path):
    results = run("ok 1", f"once {tmp_path / 'killed'}", "ok 2", timeout_s=30.0)
    assert [score(result) for result in results] == [1.0, 1.0, 2.0]


def test_a_failure_names_the_term_however_it_failed():
    by_word = f"{REWARDS}:by_word"
    terms = (
        {"kind": "format", "name": "form", "pattern": ".*"},
        {"kind": "python", "function": by_word, "name": "word 世"},
        {"kind": "format", "name": "last", "pattern": ".*"},
    )
    told = ScoreContext(role=RoleName("verifier"), terms=terms)
    texts = ("ok 1", "key", "loop", "deaf", "exit", "none", "ok 2")
    with ScoringPool(PLUGIN, told, timeout_s=0.5, grace_s=0.7) as pool:
        pool.submit([request(text, i) for i, text in enumerate(texts)])
        found = collect(pool, len(texts))
    failed = [found[f"0/{i}/0"] for i in range(1, 6)]
    assert [failure(each).term for each in failed] == ["word 世"] * 5
    # Those that end without a line of the user say the term.
    assert "(term word 世)" in failure(failed[3]).message
    assert "(term word 世)" in failure(failed[2]).message
    assert [failure(each).kind for each in failed] == [
        FailureKind.RAISED,
        FailureKind.TIMEOUT,
        FailureKind.TIMEOUT,
        FailureKind.DIED,
        FailureKind.INVALID,
    ]


def test_a_score_that_float32_cannot_hold_is_invalid():
    large, too_large = run("ok 1e30", "ok -1e39", timeout_s=30.0)
    assert score(large) == 1e30
    assert failure(too_large).kind is FailureKind.INVALID
    assert "-1e+39" in too_large.message


def test_a_child_that_comes_back_out_of_a_reward_is_no_second_worker():
    words = ["fork return", "ok 1", "fork raise", "ok 2", "fork exit", "ok 3"]
    results = run(*words, timeout_s=30.0)
    assert [score(result) for result in results] == [1.0, 1.0, 1.0, 2.0, 1.0, 3.0]


def test_a_message_of_many_lines_is_told_in_one():
    (raised,) = run("lines", timeout_s=30.0)
    assert raised.message.startswith("raised ValueError: one two (")


def test_sys_exit_and_an_exception_that_cannot_print_itself_are_ordinary_failures():
    left, silent = run("sysexit", "unprintable", timeout_s=30.0)
    assert left.message.startswith("raised SystemExit: 3")
    assert silent.message.startswith("raised Unprintable: no message")


def test_many_deaths_in_one_batch_each_cost_one_sample():
    results = run(*["exit", "ok 1"] * 5, workers=2, timeout_s=30.0)
    assert [isinstance(r, ScoreFailure) for r in results] == [True, False] * 5


def test_what_a_reward_prints_goes_to_the_log_and_breaks_nothing(tmp_path):
    with (tmp_path / "log").open("wb") as log:
        printed, after = run("print", "ok 2", output=lambda name: nullcontext(log), timeout_s=30.0)
    assert [score(printed), score(after)] == [1.0, 2.0]
    assert (tmp_path / "log").read_text().count("printed by the reward") == 20000


def test_a_sample_of_many_megabytes_crosses_both_ways():
    pool = ScoringPool(PLUGIN, context(), timeout_s=30.0)
    with pool:
        pool.submit([request("ok 1 ", i, answer="x" * 8_000_000) for i in range(3)])
        assert {score(r) for r in collect(pool, 3).values()} == {1.0}


def test_workers_do_not_import_torch():
    assert score(run("torch", timeout_s=30.0)[0]) == 0.0


def test_the_descriptor_becomes_readable_when_there_is_something_to_poll():
    with ScoringPool(PLUGIN, context(), timeout_s=30.0) as pool:
        pool.submit([request("ok 5")])
        poller = select.poll()
        poller.register(pool, select.POLLIN)
        end = time.monotonic() + DEADLINE_S
        results: list[ScoreResult | ScoreFailure] = []
        while not results:
            assert poller.poll((end - time.monotonic()) * 1000)
            results = pool.poll()
        assert score(results[0]) == 5.0


def test_waiting_without_samples_returns_at_once_with_nothing():
    with ScoringPool(PLUGIN, context(), timeout_s=30.0) as pool:
        assert pool.wait(DEADLINE_S) is False
        assert pool.poll() == []


def test_a_closed_pool_refuses_samples_and_leaves_no_process():
    pool = ScoringPool(PLUGIN, context(), timeout_s=30.0)
    pool.submit([request("pid")])
    pid = int(score(collect(pool, 1)["0/0/0"]))
    pool.submit([request("loop")])
    pool.close()
    pool.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    with pytest.raises(RewardError, match="closed"):
        pool.submit([request("ok 1")])


def test_a_reward_file_that_raises_shows_the_users_frames(tmp_path):
    (tmp_path / "broken_helper.py").write_text("def f():\n    return 1 / 0\n")
    (tmp_path / "bad.py").write_text("import broken_helper\n\nbroken_helper.f()\n")
    with pytest.raises(RewardError) as caught:
        ScoringPool(PLUGIN, context(f"{tmp_path / 'bad.py'}:f"), timeout_s=1.0)
    text = str(caught.value)
    assert "broken_helper.py:2 in f: the reward cannot be loaded" in text
    assert "ZeroDivisionError: division by zero" in text
    assert "bad.py:3" in text
    assert "flowrl" not in text
    assert len(text.splitlines()) <= 4


def test_a_reward_file_that_does_not_parse_names_its_line(tmp_path):
    (tmp_path / "bad.py").write_text("x = 1\ndef f(:\n")
    with pytest.raises(RewardError, match=r"bad\.py:2: the reward cannot be loaded"):
        ScoringPool(PLUGIN, context(f"{tmp_path / 'bad.py'}:f"), timeout_s=1.0)


def test_a_reward_that_takes_for_ever_to_load_ends_with_an_error(tmp_path):
    (tmp_path / "slow.py").write_text("while True:\n    pass\n")
    with pytest.raises(RewardError, match="too long to load"):
        ScoringPool(
            PLUGIN, context(f"{tmp_path / 'slow.py'}:f"), timeout_s=1.0, start_timeout_s=0.1
        )


def test_a_mistake_in_the_terms_keeps_its_type():
    wrong = ScoreContext(role=RoleName("v"), terms=({"kind": "format", "pattern": "("},))
    with pytest.raises(ConfigError, match="not a regular expression"):
        ScoringPool(PLUGIN, wrong, timeout_s=1.0)


def test_processes_that_die_before_they_score_end_the_run(tmp_path):
    (tmp_path / "dies.py").write_text("import os\nos._exit(9)\n")
    with pytest.raises(WorkerDied) as caught:
        ScoringPool(PLUGIN, context(f"{tmp_path / 'dies.py'}:f"), timeout_s=1.0)
    assert "exit code 9" in str(caught.value)


def test_an_object_that_is_no_plugin_is_named():
    with pytest.raises(BackendError, match="json:dumps is no plug-in"):
        ScoringPool("json:dumps", context(), timeout_s=1.0)


def test_workers_die_with_their_parent_even_in_the_middle_of_a_sample(tmp_path):
    program = tmp_path / "parent.py"
    program.write_text(
        "import os, sys\n"
        f"sys.path[:0] = [{str(Path(__file__).parent)!r}, {str(Path(__file__).parents[2])!r}]\n"
        "from test_scoring_pool import *\n"
        "pool = ScoringPool(PLUGIN, context(), timeout_s=600.0)\n"
        "pool.submit([request('pid')])\n"
        "print(int(score(collect(pool, 1)['0/0/0'])), flush=True)\n"
        "pool.submit([request('deaf')])\n"
        "os.kill(os.getpid(), 9)\n"
    )
    with subprocess.Popen([sys.executable, program], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.wait()
    end = time.monotonic() + DEADLINE_S
    while Path(f"/proc/{pid}/stat").exists():
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        if state == "Z":
            break
        assert time.monotonic() < end, "the worker outlived its parent"
        os.sched_yield()


def test_a_plugin_is_found_by_its_name_through_the_registry():
    exact = ScoreContext(role=RoleName("v"), terms=({"kind": "exact_match"},))
    with ScoringPool("verify", exact, timeout_s=30.0) as pool:
        pool.submit([request("068", 0, answer="068"), request("68", 1, answer="068")])
        found = collect(pool, 2)
    assert [score(found[f"0/{i}/0"]) for i in (0, 1)] == [1.0, 0.0]


def test_length_and_ending_reach_the_terms_that_shape_by_them():
    terms = (
        {"kind": "exact_match", "name": "accuracy"},
        {"kind": "stop_properly", "of": "accuracy", "coefficient": 0.5},
        {"kind": "overlong", "max_tokens": 4, "buffer": 2},
    )
    whole = replace(request("yes", 0, answer="yes"), num_tokens=3)
    cut = replace(request("yes", 1, answer="yes"), num_tokens=4, finish=FinishReason.LENGTH)
    shaping = ScoreContext(role=RoleName("v"), terms=terms, key="roles.v.terms")
    with ScoringPool(PLUGIN, shaping, timeout_s=DEADLINE_S) as pool:
        pool.submit([whole, cut])
        found = collect(pool, 2)
    assert [found[f"0/{i}/0"].score for i in range(2)] == [1.0 - 0.5, 0.5 - 1.0]


def test_a_breakpoint_in_a_reward_is_told_which_executor_stops_at_it():
    (left,) = run("breakpoint", timeout_s=30.0)
    assert left.message.startswith(
        "raised BdbQuit: a breakpoint has no terminal to stop at here, or the debugger was left; "
        "executor=eager stops at breakpoints ("
    )
    assert left.frames[-1].endswith(" in _breakpoint")


def test_a_pool_that_has_given_all_its_results_has_nothing_more_to_say():
    with ScoringPool(PLUGIN, context(), timeout_s=30.0) as pool:
        for number in range(20):
            pool.submit([request(f"ok {number}", number)])
            collect(pool, 1)
            # Whoever waits for it among others would never wait if it had.
            assert select.select([pool.fileno()], [], [], 0.0)[0] == []
