"""The Ray cluster of a run: the one at RAY_ADDRESS, or else one on this machine that ends with it.

A cluster that is started here listens on the loopback interface only, has no dashboard, sends no
usage statistics, and asks everyone who connects for a token that this process makes and that is
written nowhere. What is asked of a cluster that exists already, and of whom, is its own affair.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from flowrl.runtime.ray_access import ADDRESS, AUTH_MODE, require_listening, use_token, why_refused

# Set before Ray is imported, which reads it then: addresses of this machine are loopback ones.
_LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
_DEBUGGER = "PYTHONBREAKPOINT"
_LOCAL = {
    _LOOPBACK: "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_task_events_report_interval_ms": "0",  # a history of calls, which grows and nobody reads
    "RAY_worker_niceness": "0",  # Ray's own 15 would have them wait for everything else here
    AUTH_MODE: "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
}
# A call after the end of a cluster is an error then, and starts no other one.
os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
if os.environ.get(ADDRESS):
    use_token()
elif "ray" not in sys.modules:
    os.environ |= {name: os.environ.get(name, value) for name, value in _LOCAL.items()}

import ray  # noqa: E402
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy  # noqa: E402

from flowrl.backend.weights import Weights, WeightsKind  # noqa: E402
from flowrl.config.schema import RuntimeConfig  # noqa: E402
from flowrl.errors import BackendError  # noqa: E402
from flowrl.runtime.channels import Message  # noqa: E402
from flowrl.runtime.ray.actor import (  # noqa: E402
    VISIBLE_DEVICES,
    StoredBuckets,
    WorkerActor,
    file_bytes,
)
from flowrl.runtime.ray.channel import ActorChannel  # noqa: E402
from flowrl.runtime.ray.own_node import OwnNode  # noqa: E402
from flowrl.runtime.ray.places import Places  # noqa: E402
from flowrl.runtime.worker_logs import WorkerLogs  # noqa: E402

_STORED_BYTES = 1 << 17
"""Bulk of messages from which on the store keeps it; Ray sends less than 100 KiB with a result."""


class RayCluster:
    """Joined, or started, when it is made; `close` leaves it, or ends it.

    Args:
        limits: How long it may take to give places, and an accelerator; those of a run.
        logs: Get what actors print; by default it is written nowhere.
        files: The user's Python files that workers run, as absolute paths; each node gets a copy.

    Attributes:
        description: Where it is, for people.
        places: Places of the workers.
        node: The node of this process.

    Raises:
        BackendError: it cannot be joined or started.
    """

    def __init__(
        self,
        limits: RuntimeConfig | None = None,
        logs: WorkerLogs | None = None,
        files: Sequence[Path] = (),
    ) -> None:
        self._limits = limits or RuntimeConfig()
        self._logs = logs or WorkerLogs()
        self._objects: dict[Path, Any] = {}
        self._holders: list[Any] = []
        self._joined = not ray.is_initialized()  # else a program that runs flowrl has done it
        self._copied = self._joined and bool(files)
        if self._joined:
            with _copies(files) as folder:
                _join(folder)
        try:
            if AUTH_MODE not in os.environ:
                _refuse_open_cluster()
            self.node = OwnNode()
            address = ray.get_runtime_context().gcs_address
            own = self._joined and not os.environ.get(ADDRESS)
            self.description = f"on {'a cluster of its own' if own else 'the cluster'} at {address}"
            self.places = Places(self._limits.place_timeout_s)
        except BaseException:
            if self._joined:
                ray.shutdown()
            raise
        self._actor_class: Any = ray.remote(
            max_restarts=0, concurrency_groups={"inbox": 1, "outbox": 1}
        )(WorkerActor)

    def start(
        self,
        name: str,
        target: str,
        *,
        placed: bool = False,
        here: bool = False,
        deliver: Callable[[list[Message]], None] | None = None,
    ) -> ActorChannel:
        """Starts a worker in an actor.

        Args:
            name: Its name for people; the second with that name is `NAME#2`.
            target: The worker, as `WorkerActor` has it.
            placed: True for a worker that has a place; others reserve nothing.
            here: True for a worker on the node of this process, whose folders it reads and writes.
            deliver: Gets its messages; see `ActorChannel`.

        Raises:
            BackendError: the node of its place is gone, and no other one has room.
            WorkerDied: the node of this process is gone.
        """
        self.node.require_alive()
        place = self.places.place(name) if placed else None
        numbered = self._logs.name(name)
        path = [entry or os.getcwd() for entry in sys.path]  # noqa: PTH109
        resources = {} if place is None else dict(place.resources)
        if here:
            node = ray.get_runtime_context().get_node_id()
            strategy: Any = NodeAffinitySchedulingStrategy(node, soft=False)
        else:
            strategy = self.places.roomiest() if place is None else place.strategy
        actor = self._actor_class.options(
            name=numbered,
            num_cpus=resources.pop("CPU", 0),
            num_gpus=resources.pop("GPU", 0),
            resources=resources,
            scheduling_strategy=strategy,
        ).remote(target, str(Path.cwd()), path, self._copied, _STORED_BYTES)
        log = partial(self._logs.write, numbered)
        return ActorChannel(actor, self.node, self._put, log, deliver)

    def own_device(self, kind: str, device: str) -> str:
        """Returns an accelerator of this node that no worker is given; see `PolicyContext.device`.

        Args:
            kind: Ray's name of such accelerators.
            device: What the plan has, returned where Ray has none of this node.

        Raises:
            BackendError: all of them are taken.
        """
        here = ray.get_runtime_context().get_node_id()
        (total,) = [node["Resources"] for node in ray.nodes() if node["NodeID"] == here]
        if not total.get(kind):
            return device
        holder = (
            ray.remote(_Holder)
            .options(
                num_cpus=0,
                num_gpus=1 if kind == "GPU" else 0,
                resources={} if kind == "GPU" else {kind: 1},
                scheduling_strategy=NodeAffinitySchedulingStrategy(here, soft=False),
            )
            .remote()
        )
        try:
            (given,) = ray.get(holder.given.remote(), timeout=self._limits.start_timeout_s)
        except ray.exceptions.RayError as reason:
            raise BackendError(
                f"no {kind} of this node is free for the trainers",
                where="executor=ray",
                found=f"{int(total[kind])} {kind} of this node, all taken",
                hint="end what holds them, or start the run on another node of the cluster",
            ) from reason
        self._holders.append(holder)
        seen = os.environ.get(VISIBLE_DEVICES[kind])
        index = int(given) if not seen else seen.split(",").index(given)
        return f"{device.partition(':')[0]}:{index}"

    def share(self, weights: Weights) -> Weights:
        """Puts the buckets of weights into the store, one after the other."""
        stored = StoredBuckets([self.node.put(bucket) for bucket in weights.handle])
        return replace(weights, kind=WeightsKind.RAY_OBJECTS, handle=stored)

    def _put(self, folder: Path) -> Any:
        """Puts the files of a folder into the store, once as long as the folder is there."""
        kept = {path: held for path, held in self._objects.items() if path.is_dir()}
        if folder not in kept:
            kept[folder] = self.node.put(file_bytes(folder))
        self._objects = kept
        return kept[folder]

    def close(self) -> None:
        """Leaves a cluster that was joined, and ends one that was started; idempotent."""
        self._objects.clear()
        self._holders.clear()  # an actor ends with its last handle
        self.node.close()
        if ray.is_initialized():
            self.places.release()
            if self._joined:
                ray.shutdown()


@contextmanager
def _copies(files: Sequence[Path]) -> Iterator[Path | None]:
    """Yields a folder with copies of files, by their paths from the root; None without files."""
    if not files:
        yield None
        return
    with TemporaryDirectory(prefix="flowrl-files-") as folder:
        for file in files:
            copy = Path(folder, *file.parts[1:])
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, copy)
        yield Path(folder)


def _join(folder: Path | None) -> None:
    """Joins the cluster at the address of the environment, or starts one.

    Args:
        folder: What becomes the working folder of workers, on every node.

    Raises:
        BackendError: it cannot be joined or started.
    """
    address = os.environ.get(ADDRESS)
    if address:
        require_listening(address)
    elif os.environ.get(_LOOPBACK) != "0":
        raise BackendError(
            "Ray was imported before this run, so a cluster that it starts now would listen on all "
            "interfaces",
            where="executor=ray",
            hint=f"set {_LOOPBACK}=0 before Ray is imported, or join a cluster: ray.init()",
        )
    try:
        with _process_kept():
            ray.init(
                address=address or "local",
                namespace=f"flowrl-{secrets.token_hex(4)}",
                logging_level=logging.ERROR,
                runtime_env={} if folder is None else {"working_dir": str(folder)},
                **({} if address else {"include_dashboard": False}),
            )
    except ray.exceptions.RuntimeEnvSetupError as reason:
        raise BackendError(
            "Ray cannot copy the files of rewards, environments, losses and maps to its nodes",
            where="executor=ray",
            found=" ".join(str(reason).split())[:300],
            hint="keep data out of these files and of the modules that they import",
        ) from reason
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as reason:
        if address:
            raise why_refused(address, reason) from reason
        raise BackendError(
            "Ray cannot be started here",
            where="executor=ray",
            found=" ".join(str(reason).split())[:300],
            hint="see what Ray prints on standard error",
        ) from reason


def _refuse_open_cluster() -> None:
    """Refuses a cluster of several machines that lets in everyone who reaches its port.

    Raises:
        BackendError: it was joined without a token, and nobody said that this is wanted.
    """
    machines = {str(node["NodeManagerAddress"]) for node in ray.nodes() if node["Alive"]}
    if len(machines) > 1:
        raise BackendError(
            "the Ray cluster spans machines and asks for no token, so everyone who reaches it can "
            "run code on them",
            where=ADDRESS,
            found=", ".join(sorted(machines)[:8]),
            expected=f"nodes started with {AUTH_MODE}=token and one RAY_AUTH_TOKEN_PATH",
            hint=f"where nobody else reaches this network, say so with {AUTH_MODE}=disabled",
        )


class _Holder:
    """Holds an accelerator for the process of the run; Ray gives it to no worker then."""

    def given(self) -> list[str]:
        given = ray.get_runtime_context().get_accelerator_ids()
        return [number for ids in given.values() for number in ids]


@contextmanager
def _process_kept() -> Iterator[None]:
    """Keeps this process's debugger and handlers of signals, which Ray replaces by its own."""
    debugger = os.environ.get(_DEBUGGER)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        os.environ.pop(_DEBUGGER, None)
        if debugger is not None:
            os.environ[_DEBUGGER] = debugger
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():
                signal.signal(number, handler)
