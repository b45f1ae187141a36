"""A run in which nothing moves is stopped, and says who waits for whom."""

from __future__ import annotations

import threading

import pytest

from flowrl.errors import SchedulerError
from flowrl.runtime.driver.threads import Watchdog


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def make(clock: Clock, calls: list[str], describe=lambda: "actor waits for 0/17/3") -> Watchdog:
    return Watchdog(
        10.0,
        describe,
        grace_s=5.0,
        clock=clock,
        interrupt=lambda: calls.append("interrupt"),
        abandon=lambda: calls.append("abandon"),
    )


def test_beats_keep_a_run_alive():
    clock, calls = Clock(), []
    watchdog = make(clock, calls)
    for _ in range(5):
        clock.now += 9.0
        assert watchdog.check() == pytest.approx(1.0)
        watchdog.beat()
    assert watchdog.check() == pytest.approx(10.0)
    assert calls == []
    assert watchdog.stalled is None


def test_silence_interrupts_once_and_says_who_waits(capsys):
    clock, calls = Clock(), []
    watchdog = make(clock, calls)
    clock.now += 10.0
    assert watchdog.check() == pytest.approx(5.0)
    clock.now += 3.0
    assert watchdog.check() == pytest.approx(2.0)
    assert calls == ["interrupt"]
    told = capsys.readouterr().err
    assert told.startswith("flowrl: nothing moved for 10 s, the run stops\n")
    assert "actor waits for 0/17/3" in told
    assert told.strip() == f"flowrl: {watchdog.stalled}"


def test_a_main_thread_that_cannot_be_interrupted_is_abandoned_after_the_grace():
    clock, calls = Clock(), []
    watchdog = make(clock, calls)
    clock.now += 10.0
    watchdog.check()
    clock.now += 5.0
    watchdog.check()
    assert calls == ["interrupt", "abandon"]


def test_a_description_that_fails_does_not_hide_the_stall():
    def fail() -> str:
        raise RuntimeError("half built")

    clock, calls = Clock(), []
    watchdog = make(clock, calls, fail)
    clock.now += 10.0
    watchdog.check()
    assert "half built" in str(watchdog.stalled)
    assert calls == ["interrupt"]


def test_a_blocked_main_thread_wakes_and_raises_the_stall():
    inside, never = threading.Event(), threading.Event()

    def describe() -> str:
        inside.wait()  # so that the interrupt never comes before the block has begun
        return "actor waits for 0/17/3"

    def block() -> None:
        with Watchdog(0.01, describe):
            inside.set()
            never.wait(60.0)

    with pytest.raises(SchedulerError, match="actor waits") as caught:
        block()
    assert caught.value.exit_code == 1
    assert "flowrl-watchdog" not in {thread.name for thread in threading.enumerate()}


def test_ctrl_c_of_a_person_stays_a_keyboard_interrupt():
    with pytest.raises(KeyboardInterrupt), make(Clock(), []):
        raise KeyboardInterrupt


def stall_inside(error: BaseException | None) -> None:
    clock = Clock()
    with make(clock, []) as watchdog:
        clock.now += 10.0
        watchdog.check()
        if error is not None:
            raise error


def test_another_error_is_not_replaced_by_the_stall():
    with pytest.raises(ZeroDivisionError):
        stall_inside(ZeroDivisionError())


def test_the_interrupt_becomes_the_stall():
    with pytest.raises(SchedulerError):
        stall_inside(KeyboardInterrupt())


def test_a_handler_that_turned_the_interrupt_into_a_flag_still_ends_in_the_stall():
    with pytest.raises(SchedulerError):
        stall_inside(None)
