"""What running costs beside computing: spans, executors, many workers, the driver, long runs.

    python benchmarks/runtime_costs.py spans     a run with and without the trace
    python benchmarks/runtime_costs.py jobs      the demo's job, local and with Ray
    python benchmarks/runtime_costs.py workers   8 and 64 engines that hold nothing
    python benchmarks/runtime_costs.py control   the driver's time and memory, and payloads
    python benchmarks/runtime_costs.py steps     memory of every process over 500 steps

Each part writes its rows into results/runtime_costs.json, in the place of those of before, with the
ratio to a baseline that is measured in the same run. Processor seconds are those of the processes
named; where other work shares the machine they say more than the clock.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import sha256
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from flowrl.backend.batch import SequenceBatch
from flowrl.backend.protocols import Finished, GenerateRequest, PolicyContext
from flowrl.config.schema import RuntimeConfig
from flowrl.data import PromptItem
from flowrl.data.rows import Row
from flowrl.files import write_result
from flowrl.ids import EngineId, RoleName, SampleId, group_id
from flowrl.rollout.scheduler import RolloutScheduler
from flowrl.rollout.settings import SchedulerSettings
from flowrl.runtime.driver.collected_batch import FailureBudget
from flowrl.runtime.driver.rollout_driver import RolloutDriver
from flowrl.runtime.local.engine_fleet import EngineFleet
from flowrl.runtime.local.executor import LocalExecutor
from flowrl.runtime.workers import wait_for_any
from flowrl.specs import Sampling

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "runtime_costs.json"
CONFIG = HERE.parent / "configs" / "quickstart.yaml"
LIMITS = RuntimeConfig(start_timeout_s=900.0)
GROUP_SIZE = 8
SAMPLES = 1024
MOST_PLAIN = 8
"""Plain processes that are started at once, as a baseline; more cost as much each."""


def kept(part: str, value: object) -> None:
    """Puts a part into the file of results and prints it."""
    found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    found[part] = value
    write_result(RESULTS, json.dumps(found, indent=1) + "\n")
    print(part, json.dumps(value, indent=1))


# Whole runs


def run(words: Sequence[str], code: str = "") -> tuple[Path, dict[str, float]]:
    """Makes a run in a process of its own; returns its folder and what it cost.

    Args:
        code: Executed in that process before the run.
    """
    folder = Path(tempfile.mkdtemp(prefix="flowrl-benchmark-"))
    main = f"import sys\n{code}\nfrom flowrl.cli import main\nmain(sys.argv[1:])"
    command = [sys.executable, "-c", main, "run", *words, f"runtime.runs={folder}"]
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    after, wall_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic() - began
    (made,) = [path for path in folder.iterdir() if path.is_dir()]
    rows = [json.loads(line) for line in (made / "metrics.jsonl").read_text().splitlines()]
    return made, {
        "wall_s": wall_s,
        "steps_s": sum(row["wall_s"] for row in rows),
        "processor_s": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
    }


def medians(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: round(median(row[name] for row in rows), 3) for name in rows[0]}


def weights_of(run_folder: Path) -> str:
    return sha256((run_folder / "model" / "model.safetensors").read_bytes()).hexdigest()[:16]


SILENT = (
    "import flowrl.runtime.spans as spans\nspans.Spans.add = lambda *a, **k: None\n"
    "from contextlib import nullcontext\nspans.Spans.of = lambda *a, **k: nullcontext()"
)


def measure_spans(rounds: int) -> None:
    """The demo's job with the trace, and without a span."""
    words = [str(CONFIG), "stage.sft.train.steps=30", "train.steps=30"]
    found: dict[str, list[dict[str, float]]] = {"with": [], "without": []}
    size = 0
    for _ in range(rounds):
        made, cost = run(words)
        found["with"].append(cost)
        size = (made / "trace.json").stat().st_size
        found["without"].append(run([*words, "runtime.trace_mb=0"], SILENT)[1])
    rows: dict[str, Any] = {name: medians(costs) for name, costs in found.items()}
    rows["processor_ratio"] = round(rows["with"]["processor_s"] / rows["without"]["processor_s"], 4)
    began = time.perf_counter()
    from flowrl.runtime.spans import Spans

    spans = Spans()
    for number in range(20_000):
        spans.add("actor.train", "update", number, number + 0.5)
    rows["us_per_span"] = round((time.perf_counter() - began) * 1e6 / 20_000, 2)
    rows["trace_bytes"], rows["rounds"] = size, rounds
    kept("spans", rows)


def measure_jobs(rounds: int) -> None:
    """The demo's job on this machine and with Ray, with one engine and with two."""
    base = [str(CONFIG), "stage.sft.train.steps=30", "train.steps=30"]
    kinds = {
        f"{executor}, {engines}": [*base, f"executor={executor}", *keys]
        for engines, keys in (
            ("one engine", []),
            ("two engines", ["roles.actor.num_engines=2"]),
        )
        for executor in ("local", "ray")
    }
    costs: dict[str, list[dict[str, float]]] = {name: [] for name in kinds}
    weights: dict[str, set[str]] = {name: set() for name in kinds}
    for _ in range(rounds):
        for name, words in kinds.items():
            made, cost = run(words)
            costs[name].append(cost)
            weights[name].add(weights_of(made))
    rows: dict[str, Any] = {
        name: {**medians(costs[name]), "weights": sorted(weights[name])} for name in kinds
    }
    for engines in ("one engine", "two engines"):
        ray_row, local = rows[f"ray, {engines}"], rows[f"local, {engines}"]
        ray_row["steps_ratio_to_local"] = round(ray_row["steps_s"] / local["steps_s"], 2)
        ray_row["wall_ratio_to_local"] = round(ray_row["wall_s"] / local["wall_s"], 2)
        ray_row["same_weights"] = ray_row["weights"] == local["weights"]
    rows["rounds"] = rounds
    kept("jobs", rows)


# Processes


def rss_mb(pid: int | str = "self") -> float:
    """Returns the memory that a process has to itself, in megabytes: without Ray's store."""
    _, resident, shared, *_ = map(int, Path(f"/proc/{pid}/statm").read_text().split())
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE") / 1e6


def tree(pid: int) -> dict[int, str]:
    """Returns a process and those that it started, by number, with what they are."""
    parents: dict[int, int] = {}
    names: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                stat = (entry / "stat").read_text()
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            number = int(entry.name)
            parents[number] = int(stat.rpartition(")")[2].split()[1])
            names[number] = _short(b" ".join(words).decode(errors="replace"))
    found, waiting = {pid: names.get(pid, "run")}, [pid]
    while waiting:
        parent = waiting.pop()
        for child in [child for child, of in parents.items() if of == parent]:
            found[child] = names[child]
            waiting.append(child)
    return found


def _short(command: str) -> str:
    if command.startswith("ray::"):
        return command.split()[0]
    parts = ("scoring.worker", "engine_worker", "raylet", "gcs_server", "dashboard", "runtime_env")
    for part in parts:
        if part in command:
            return part
    scripts = [Path(word).stem for word in command.split() if word.endswith(".py")]
    return scripts[0] if scripts else "run" if "flowrl" in command else command[:40]


# Workers


@contextmanager
def executors(kind: str) -> Iterator[LocalExecutor]:
    """An executor, with a Ray cluster of as many CPUs as workers ask for."""
    if kind == "local":
        yield LocalExecutor(LIMITS)
        return
    from flowrl.runtime.ray.cluster import ray  # which sets before its import how it listens
    from flowrl.runtime.ray.executor import RayExecutor

    options = {"include_dashboard": False, "log_to_driver": False, "object_store_memory": 1 << 30}
    ray.init("local", num_cpus=256, **options)
    executor = RayExecutor(LIMITS)
    try:
        yield executor
    finally:
        executor.close()
        ray.shutdown()


@contextmanager
def fleet_of(executor: LocalExecutor, number: int, folder: Path) -> Iterator[EngineFleet]:
    context = PolicyContext(
        role=RoleName("actor"),
        model=folder,
        fresh=False,
        device="cpu",
        dtype="float32",
        seed=0,
        num_slots=SAMPLES,
        max_length=1 << 16,
        trainable=False,
        stop_token_ids=(),
        num_threads=1,
    )
    fleet = executor.open_fleet(
        [EngineId(f"actor.generate[{each}]") for each in range(number)],
        "null_engine:plugin",
        context,
        export=lambda target: (target / "weights.safetensors").write_bytes(bytes(1 << 20)) and None,
        fallback=folder,
        cores=(),
        most=number,
    )
    try:
        yield fleet
    finally:
        fleet.close()


def request(sample: str, num_tokens: int) -> GenerateRequest:
    return GenerateRequest(
        sample=SampleId(sample),
        attempt=0,
        prompt=np.zeros(64, np.int64),
        response=np.zeros(0, np.int64),
        sampling=Sampling(max_tokens=num_tokens),
        seed=0,
        shares_prompt=sample.rpartition("/")[0],
    )


def dispatched(fleet: EngineFleet, each: int, batch: int) -> list[Finished]:
    """Has every engine answer so many requests."""
    engines: Any = fleet.engines
    for number, engine in enumerate(engines.values()):
        engine.submit([request(f"0/{batch}-{number}/{place}", 64) for place in range(each)])
    ends: list[Finished] = []
    while len(ends) < each * len(engines):
        wait_for_any(engines.values(), 1.0)
        for engine in engines.values():
            ends += [end for end in engine.poll(0.0) if isinstance(end, Finished)]
    return ends


def timed(act: Callable[[], object]) -> tuple[float, float]:
    """Returns seconds of the clock and of this process's processor time."""
    wall, processor = time.perf_counter(), time.process_time()
    act()
    return time.perf_counter() - wall, time.process_time() - processor


def measure_workers(numbers: Sequence[int]) -> None:
    """Starts, dispatches and publishes to engines that hold nothing."""
    rows: dict[str, Any] = {}
    for kind in ("local", "ray"):
        with tempfile.TemporaryDirectory() as name, executors(kind) as executor:
            for number in numbers:
                rows[f"{kind} {number}"] = _workers(kind, executor, number, Path(name))
                print(kind, number, rows[f"{kind} {number}"], flush=True)
    kept("workers", rows)


def _workers(kind: str, executor: LocalExecutor, number: int, folder: Path) -> dict[str, float]:
    plain_s = _plain(kind, min(number, MOST_PLAIN)) / min(number, MOST_PLAIN) * number
    began = time.perf_counter()
    with fleet_of(executor, number, folder) as fleet:
        fleet.wait_ready()
        start_s = time.perf_counter() - began
        batches = [timed(lambda b=batch: dispatched(fleet, 16, b)) for batch in range(5)]
        versions = count(1)

        def publish() -> None:
            version = next(versions)
            fleet.publish(fleet.written(version))
            ends = dispatched(fleet, 1, 100 + version)
            assert {end.versions[0][0] for end in ends} == {version}

        published = [timed(publish) for _ in range(3)]
        memory = rss_mb()
    return {
        "start_s": round(start_s, 2),
        "plain_start_s": round(plain_s, 2),
        "start_ratio_to_plain": round(start_s / plain_s, 2),
        "dispatch_ms": round(1e3 * median(wall for wall, _ in batches), 1),
        "dispatch_driver_us_per_sample": round(
            1e6 * median(processor for _, processor in batches) / (16 * number), 1
        ),
        "publish_ms": round(1e3 * median(wall for wall, _ in published), 1),
        "publish_driver_ms": round(1e3 * median(processor for _, processor in published), 1),
        "driver_mb": round(memory, 1),
    }


def _plain(kind: str, number: int) -> float:
    """Starts as many processes that import numpy, or as many Ray actors that do."""
    began = time.perf_counter()
    if kind == "local":
        command = [sys.executable, "-c", "import numpy; input()"]
        started = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            for _ in range(number)
        ]
        for process in started:
            process.communicate(b"\n")
        return time.perf_counter() - began
    import ray

    class Plain:
        def ready(self) -> str:
            return np.__version__

    actors = [ray.remote(num_cpus=0)(Plain).remote() for _ in range(number)]
    ray.get([actor.ready.remote() for actor in actors])
    took_s = time.perf_counter() - began
    for actor in actors:
        ray.kill(actor)
    return took_s


# The driver


class _Words:
    def decode_many(self, responses: Sequence[np.ndarray]) -> list[str]:
        return [""] * len(responses)


def prompts(first: int, number: int) -> list[PromptItem]:
    return [
        PromptItem(
            epoch=0,
            index=index,
            group=group_id(0, index),
            row=Row(index=index, prompt="", answer="", solution="", fields={}, where=""),
            prompt_ids=np.zeros(64, np.int64),
        )
        for index in range(first, first + number)
    ]


def driver_of(fleet: EngineFleet, num_tokens: int) -> RolloutDriver:
    tokenizer: Any = _Words()
    return RolloutDriver(
        scheduler=RolloutScheduler(SchedulerSettings(group_size=GROUP_SIZE)),
        engines=fleet.engines,
        scorers={},
        tokenizer=tokenizer,
        sampling=Sampling(max_tokens=num_tokens),
        group_size=GROUP_SIZE,
        seed_of=lambda sample: 0,
        judge=None,
        failures=FailureBudget(0),
        beat=lambda: None,
        stop=lambda: False,
        stall_timeout_s=300.0,
        reported=None,
    )


def driven(executor: LocalExecutor, folder: Path, num_tokens: int, steps: int) -> dict[str, float]:
    """Collects steps of 1,024 samples from two engines."""
    with fleet_of(executor, 2, folder) as fleet:
        fleet.wait_ready()
        driver = driver_of(fleet, num_tokens)
        groups = SAMPLES // GROUP_SIZE
        costs, memory = [], []
        for step in range(steps):
            items = prompts(step * groups, groups)

            def collect(items: list[PromptItem] = items, step: int = step) -> None:
                driver.offer(items)
                assert len(driver.collect(step, groups).groups) == groups

            costs.append(timed(collect))
            memory.append(rss_mb())
    late = memory[steps // 4 :]
    return {
        "tokens": num_tokens,
        "steps": steps,
        "driver_ms_per_sample": round(1e3 * median(cpu for _, cpu in costs) / SAMPLES, 4),
        "wall_ms_per_sample": round(1e3 * median(wall for wall, _ in costs) / SAMPLES, 4),
        "mb_after_a_quarter": round(late[0], 1),
        "mb_at_the_end": round(late[-1], 1),
    }


def measure_control(steps: int) -> None:
    rows: dict[str, Any] = {}
    for kind in ("local", "ray"):
        with tempfile.TemporaryDirectory() as name, executors(kind) as executor:
            rows[kind] = [driven(executor, Path(name), tokens, steps) for tokens in (64, 640)]
            if kind == "ray":
                rows["plain Ray calls"] = _plain_calls()
                rows["payload"] = [_payload(tokens) for tokens in (64, 640, 6400)]
    plain_ms = rows["plain Ray calls"]["driver_ms_per_sample"]
    for kind in ("local", "ray"):
        for row in rows[kind]:
            row["ratio_to_plain_calls"] = round(row["driver_ms_per_sample"] / plain_ms, 3)
    kept("control", rows)


def _plain_calls() -> dict[str, float]:
    """One call of an actor for each sample, as a program on Ray without an engine's client has."""
    import ray

    class Generator:
        def generate(self, prompt: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            return np.zeros(64, np.int64), np.zeros(64, np.float32)

    actors = [ray.remote(num_cpus=0)(Generator).remote() for _ in range(2)]
    prompt = np.zeros(64, np.int64)

    def step() -> None:
        ray.get([actors[place % 2].generate.remote(prompt) for place in range(SAMPLES)])

    step()
    costs = [timed(step) for _ in range(10)]
    return {
        "driver_ms_per_sample": round(1e3 * median(cpu for _, cpu in costs) / SAMPLES, 4),
        "wall_ms_per_sample": round(1e3 * median(wall for wall, _ in costs) / SAMPLES, 4),
    }


def _payload(tokens: int) -> dict[str, float]:
    """A batch of 1,024 samples to another process, by a reference and by shared memory."""
    from multiprocessing.shared_memory import SharedMemory

    import ray

    total = SAMPLES * tokens
    batch = SequenceBatch(
        tokens=np.zeros(total, np.int64),
        offsets=np.arange(SAMPLES + 1, dtype=np.int64) * tokens,
        response_mask=np.ones(total, bool),
        samples=tuple(SampleId(f"0/{place}/0") for place in range(SAMPLES)),
        groups=np.repeat(np.arange(SAMPLES // GROUP_SIZE), GROUP_SIZE),
    )
    arrays = [batch.tokens, batch.offsets, batch.response_mask]
    nbytes = sum(array.nbytes for array in arrays)

    class Reader:
        def read(self, handles: list[Any]) -> int:
            found = ray.get(handles[0])
            return int(found.tokens[-1]) + int(found.response_mask[-1])

    reader = ray.remote(num_cpus=0)(Reader).remote()
    ray.get(reader.read.remote([ray.put(batch)]))
    sent = [timed(lambda: ray.get(reader.read.remote([ray.put(batch)])))[0] for _ in range(7)]

    def copy() -> None:
        memory = SharedMemory(create=True, size=nbytes)
        view, begin = np.frombuffer(memory.buf, np.uint8), 0
        for array in arrays:
            view[begin : begin + array.nbytes] = array.view(np.uint8)
            begin += array.nbytes
        del view
        memory.close()
        memory.unlink()

    copied = [timed(copy)[0] for _ in range(7)]
    return {
        "mb": round(nbytes / 1e6, 1),
        "mb_s": round(nbytes / 1e6 / median(sent)),
        "copy_mb_s": round(nbytes / 1e6 / median(copied)),
        "ratio_to_copy": round(median(copied) / median(sent), 2),
    }


# Long runs


def measure_steps(steps: int, kinds: Sequence[str]) -> None:
    before = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    kept("steps", before.get("steps", {}) | {kind: _memory_of(kind, steps) for kind in kinds})


def _memory_of(kind: str, steps: int) -> dict[str, Any]:
    """Memory of each process of a run after a quarter of its steps and near its end."""
    folder = Path(tempfile.mkdtemp(prefix="flowrl-benchmark-"))
    shared, started = shared_files(), set[int]()
    words = [str(CONFIG), "stage.sft.train.steps=2", f"train.steps={steps}", f"executor={kind}"]
    words += ["train.prompts_per_step=8", "roles.actor.num_slots=64", "train.micro_batch=64"]
    words += ["roles.actor.num_engines=2", "eval.every=0", f"runtime.runs={folder}"]
    command = [sys.executable, "-m", "flowrl.cli", "run", *words]
    early: dict[str, float] = {}
    late: dict[str, float] = {}
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while process.poll() is None:
            done = sum(
                text.count('"stage":"grpo"')
                for text in (path.read_text() for path in folder.glob("*/metrics.jsonl"))
            )
            processes = tree(process.pid)
            started |= processes.keys()
            if steps // 4 <= done < steps:
                for pid, name in processes.items():
                    try:
                        late[f"{name} {pid}"] = round(rss_mb(pid), 1)
                    except OSError:
                        continue
                early = early or dict(late)
            time.sleep(0.5)
    assert process.returncode == 0, process.returncode
    return {
        "steps": steps,
        "mb_after_a_quarter_and_at_the_end": {
            f"{name.rpartition(' ')[0]} #{number}": [early[name], late[name]]
            for number, name in enumerate(early)
            if name in late
        },
        "processes_started": len(started),
        "processes_left": sorted(pid for pid in started if Path(f"/proc/{pid}").exists()),
        "left_in_shared_memory": sorted(shared_files() - shared),
    }


def shared_files() -> set[str]:
    """Returns the files in shared memory that a run may have left."""
    return {str(path) for path in Path("/dev/shm").rglob("*") if path.is_file()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("part", choices=["spans", "jobs", "workers", "control", "steps"])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--workers", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--steps", type=int)
    parser.add_argument("--executors", nargs="+", default=["local", "ray"])
    options = parser.parse_args()
    RESULTS.parent.mkdir(exist_ok=True)
    match options.part:
        case "spans":
            measure_spans(options.rounds)
        case "jobs":
            measure_jobs(options.rounds)
        case "workers":
            measure_workers(options.workers)
        case "control":
            measure_control(options.steps or 200)
        case "steps":
            measure_steps(options.steps or 500, options.executors)


if __name__ == "__main__":
    main()
