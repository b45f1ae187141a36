"""Serves what a run does to Prometheus, at `http://127.0.0.1:PORT/metrics`.

Each scrape reads the folder of the run, as `flowrl status` does: samples in flight are of about a
second ago, and numbers of the last step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from flowrl.errors import ConfigError
from flowrl.observe.rows import StepMetrics
from flowrl.observe.run_status import RolloutStatus, report_of
from flowrl.observe.trackers import TrackerContext

if TYPE_CHECKING:
    from prometheus_client.metrics_core import GaugeMetricFamily

_PORT = 9464
"""The port by which OpenTelemetry's exporters for Prometheus are known."""

_WHERE = "tracking.options.prometheus"

_RATED = ("generate", "logprobs", "values", "update")

_Values = Iterable[tuple[tuple[str, ...], float]]


class Prometheus:
    """A server of this process, on loopback: others reach it through a proxy of their own.

    Args:
        context: The run; `options.port` is the port, 0 for a free one.

    Raises:
        ConfigError: prometheus_client is not installed, an option is wrong, or the port is taken.
    """

    def __init__(self, context: TrackerContext) -> None:
        port = context.options.get("port", _PORT)
        if set(context.options) - {"port"} or type(port) is not int or not 0 <= port < 1 << 16:
            raise ConfigError(
                "this tracker has one option, its port",
                where=_WHERE,
                found=repr(dict(context.options)),
                expected="{port: 0 to 65535}",
            )
        try:
            from prometheus_client import CollectorRegistry, start_http_server
        except ImportError as reason:
            raise ConfigError(
                "the tracker prometheus needs the package prometheus_client",
                where="tracking.to",
                found=str(reason),
                hint="pip install 'flowrl[prometheus]'",
            ) from reason
        self._folder = context.folder
        self._last: dict[tuple[str, ...], float] = {}
        registry = CollectorRegistry()
        registry.register(self)
        try:
            self._server, self._thread = start_http_server(port, "127.0.0.1", registry)
        except OSError as reason:
            raise ConfigError(
                f"port {port} cannot be opened",
                where=f"{_WHERE}.port",
                found=str(reason),
                hint="name another port, or end the run that has it",
            ) from reason
        self.port: int = self._server.server_port

    def log(self, stage: str, step: int, values: Mapping[str, float]) -> None:
        """Keeps the values until the next ones of their names."""
        # A scrape in another thread sees the numbers of one step.
        self._last = self._last | {(stage, name): value for name, value in values.items()}

    def close(self) -> None:
        """Ends the server; idempotent."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def describe(self) -> Iterator[GaugeMetricFamily]:
        """Names nothing in advance: what there is depends on the workflow."""
        return iter(())

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yields what the run does now; called by prometheus_client for each scrape."""
        yield _gauge(
            "flowrl_metric", "Number of the last step", ("stage", "name"), self._last.items()
        )
        report = report_of(Path(self._folder))
        if (row := report.last) is not None:
            yield from _of_step(row)
        if report.status is not None:
            for rollout in report.status.rollouts:
                yield from _of_rollout(rollout)


def _of_step(row: StepMetrics) -> Iterator[GaugeMetricFamily]:
    at, by = row.stage, ("stage", "work")
    yield _gauge("flowrl_step", "Steps of the stage", ("stage",), [((at,), row.step)])
    rates = {kind: row.tokens_per_second(kind) for kind in _RATED}
    yield _gauge(
        "flowrl_tokens_per_second",
        "Response tokens per second of the work, in the last step",
        by,
        [((at, kind), rate) for kind, rate in rates.items() if rate is not None],
    )
    if row.wall_s > 0:
        yield _gauge(
            "flowrl_work_ratio",
            "Time of the work over that of the last step; of work `wait` the trainer is idle",
            by,
            [((at, kind), spent / row.wall_s) for kind, spent in row.seconds.items()],
        )


def _of_rollout(rollout: RolloutStatus) -> Iterator[GaugeMetricFamily]:
    at, engines = rollout.name, rollout.engines
    states = [((at, state), float(number)) for state, number in rollout.samples.items()]
    ages = [((at, str(age)), float(number)) for age, number in rollout.staleness.items()]
    yield _gauge("flowrl_samples", "Samples without an end", ("rollout", "state"), states)
    yield _gauge("flowrl_stale_samples", "Begun samples by age", ("rollout", "versions"), ages)
    for field, what in (
        ("samples", "Samples that an engine has now"),
        ("capacity", "Samples that an engine is given at once"),
        ("weights", "Version of the weights that new samples get"),
    ):
        values = [((at, engine.name), float(getattr(engine, field))) for engine in engines]
        yield _gauge(f"flowrl_engine_{field}", what, ("rollout", "engine"), values)


def _gauge(name: str, what: str, labels: tuple[str, ...], values: _Values) -> GaugeMetricFamily:
    from prometheus_client.metrics_core import GaugeMetricFamily

    family = GaugeMetricFamily(name, what, labels=labels)
    for key, value in values:
        family.add_metric(key, value)
    return family
