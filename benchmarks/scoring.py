"""What scorer processes cost: simple rewards a second on one core, and math-verify's own speed.

The driver and one scorer process share one core, and times are processor times of both together, so
that other work on the machine changes little. Simple rewards are `gsm8k` on short responses and
on such of 1,500 characters. math-verify is called in a loop, `verify(parse(gold), parse(response))`
without its time limits, and by the pool as `math_verify_default` and as `math`; the ratio is the
pool's time over the loop's, of the same rows in the same run. The process pool of pebble, one call
for each sample, is measured where it is installed.

    python benchmarks/scoring.py --output benchmarks/results/scoring.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from arguments import at_least_one, json_file
from flowrl.backend.protocols import ScoreContext, ScoreRequest
from flowrl.files import write_result
from flowrl.ids import RoleName, SampleId
from flowrl.runtime.scoring.pool import ScoringPool
from flowrl.specs import FinishReason

ANSWERS = (
    (r"So we get \boxed{\frac{3}{4}}.", r"\frac{3}{4}"),
    (r"Thus $x = \boxed{2\sqrt{3}}$.", r"\sqrt{12}"),
    (r"The answer is $\boxed{1+x^2+2x}$.", "(x+1)^2"),
    (r"\boxed{(-\infty, 2)}", r"(-\infty,2)"),
    (r"Hence it is \boxed{17}.", "18"),
    (r"The final answer is \boxed{0.5}", r"\frac{1}{2}"),
)
WAIT_S = 10.0


def cpu_s() -> float:
    """Returns the processor time of this process and of its children that run, in seconds."""
    children = [
        number
        for task in Path("/proc/self/task").iterdir()
        for number in (task / "children").read_text().split()
    ]
    ticks = 0
    for number in children:
        fields = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


def requests(rows: Sequence[tuple[str, str]]) -> list[ScoreRequest]:
    return [
        ScoreRequest(
            sample=SampleId(f"0/{number}/0"),
            prompt="p",
            response=response,
            answer=answer,
            row={},
            finish=FinishReason.STOP,
            num_tokens=len(response),
        )
        for number, (response, answer) in enumerate(rows)
    ]


def pool_s(kind: str, rows: Sequence[tuple[str, str]], repeats: int) -> float:
    """Returns the median seconds in which a pool of one process scores rows."""
    context = ScoreContext(role=RoleName("v"), terms=({"kind": kind, "name": "a"},))
    seconds = []
    with ScoringPool("verify", context, timeout_s=60.0) as pool:
        for repeat in range(repeats + 1):
            samples = requests(rows)
            began = cpu_s()
            pool.submit(samples)
            while pool.num_pending:
                pool.wait(WAIT_S)
                pool.poll()
            if repeat:  # the first one fills caches
                seconds.append(cpu_s() - began)
    return statistics.median(seconds)


def loop_s(rows: Sequence[tuple[str, str]], repeats: int) -> float:
    """Returns the median seconds in which math-verify itself scores rows."""
    from math_verify import parse, verify

    def scored() -> None:
        for response, answer in rows:
            gold = parse(f"${answer}$", parsing_timeout=None)
            verify(gold, parse(response, parsing_timeout=None), timeout_seconds=None)

    return timed(scored, repeats)


def timed(work: Callable[[], None], repeats: int) -> float:
    seconds = []
    for repeat in range(repeats + 1):
        began = cpu_s()
        work()
        if repeat:
            seconds.append(cpu_s() - began)
    return statistics.median(seconds)


def pebble_s(rows: Sequence[tuple[str, str]], repeats: int) -> float | None:
    """Returns the median seconds of pebble's pool, a call for each sample; None without pebble."""
    try:
        import multiprocessing

        from pebble import ProcessPool
    except ImportError:
        return None
    from flowrl.algo.numbers import after_hashes

    with ProcessPool(max_workers=1, context=multiprocessing.get_context("spawn")) as pool:

        def scored() -> None:
            calls = [pool.schedule(after_hashes, args=(text,), timeout=2) for text, _ in rows]
            for call in calls:
                call.result()

        return timed(scored, repeats)


def main() -> None:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=at_least_one, default=5000, help="simple rewards")
    parser.add_argument("--rows", type=at_least_one, default=120, help="rows for math-verify")
    parser.add_argument("--repeats", type=at_least_one, default=5)
    parser.add_argument("--output", type=json_file)
    options = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})

    short = [("so it is\n#### 18", "18")] * options.samples
    long = [("word " * 300 + "\n#### 18", "18")] * options.samples
    math = [ANSWERS[i % len(ANSWERS)] for i in range(options.rows)]
    own_s = loop_s(math, options.repeats)
    pebble = pebble_s(short, options.repeats)
    results = {
        "python": platform.python_version(),
        "cores": 1,
        "samples": options.samples,
        "simple_per_cpu_s": options.samples / pool_s("gsm8k", short, options.repeats),
        "simple_1500_characters_per_cpu_s": options.samples
        / pool_s("gsm8k", long, options.repeats),
        "pebble_per_cpu_s": None if pebble is None else options.samples / pebble,
        "math_rows": options.rows,
        "math_verify_ms": 1e3 * own_s / options.rows,
        "math_verify_default_ratio": pool_s("math_verify_default", math, options.repeats) / own_s,
        "math_ratio": pool_s("math", math, options.repeats) / own_s,
    }
    for name, value in results.items():
        print(f"{name}: {value:.4g}" if isinstance(value, float) else f"{name}: {value}")
    if options.output is not None:
        write_result(options.output, json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
