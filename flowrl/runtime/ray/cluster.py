"""The Ray cluster of a run: the one at RAY_ADDRESS, or else one on this machine that ends with it.

A cluster that is started here listens on the loopback interface only, has no dashboard, sends no
usage statistics, and asks everyone who connects for a token that this process makes and that is
written nowhere. What is asked of a cluster that exists already, and of whom, is its own affair.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Set before Ray is imported, which reads it then: addresses of this machine are loopback ones.
_LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
_LOCAL = {
    _LOOPBACK: "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
}
if not os.environ.get("RAY_ADDRESS") and "ray" not in sys.modules:
    os.environ |= {name: os.environ.get(name, value) for name, value in _LOCAL.items()}

import ray  # noqa: E402

from flowrl.errors import BackendError  # noqa: E402
from flowrl.runtime.channels import Message  # noqa: E402
from flowrl.runtime.ray.actor import WorkerActor, file_bytes  # noqa: E402
from flowrl.runtime.ray.channel import ActorChannel  # noqa: E402
from flowrl.runtime.ray.places import Places  # noqa: E402

__all__ = ["RayCluster"]


class RayCluster:
    """Joined, or started, when it is made; `close` leaves it, or ends it.

    Attributes:
        places: Places of the workers.

    Raises:
        BackendError: it cannot be joined or started.
    """

    def __init__(self) -> None:
        self._objects: dict[Path, Any] = {}
        self._numbers: dict[str, int] = {}
        self._joined = not ray.is_initialized()  # else a program that runs flowrl has done it
        if self._joined:
            address = os.environ.get("RAY_ADDRESS")
            if not address and os.environ.get(_LOOPBACK) != "0":
                raise BackendError(
                    "Ray was imported before this run, so a cluster that it starts now would "
                    "listen on all interfaces",
                    where="executor=ray",
                    hint=f"set {_LOOPBACK}=0 before Ray is imported, or join a cluster: ray.init()",
                )
            try:
                with _signals_kept():
                    ray.init(
                        address=address or "local",
                        namespace=f"flowrl-{secrets.token_hex(4)}",
                        logging_level=logging.ERROR,
                        **({} if address else {"include_dashboard": False}),
                    )
            except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as reason:
                raise BackendError(
                    "no Ray cluster can be joined" if address else "Ray cannot be started here",
                    where=f"RAY_ADDRESS={address}" if address else "executor=ray",
                    found=" ".join(str(reason).split())[:300],
                    hint="give the address of a running cluster, and the token that it asks for "
                    "(RAY_AUTH_TOKEN)"
                    if address
                    else "see what Ray prints on standard error",
                ) from reason
        self.places = Places()
        self._actor_class: Any = ray.remote(
            max_restarts=0, concurrency_groups={"inbox": 1, "outbox": 1}
        )(WorkerActor)

    def start(
        self,
        name: str,
        target: str,
        *,
        placed: bool = False,
        deliver: Callable[[list[Message]], None] | None = None,
    ) -> ActorChannel:
        """Starts a worker in an actor.

        Args:
            name: Its name for people; the second with that name is `NAME#2`.
            target: The worker, as `WorkerActor` has it.
            placed: True for a worker that has a place; others reserve nothing.
            deliver: Gets its messages; see `ActorChannel`.

        Raises:
            BackendError: the node of its place is gone, and no other one has room.
        """
        place = self.places.place(name) if placed else None
        number = self._numbers[name] = self._numbers.get(name, 0) + 1
        path = [entry or os.getcwd() for entry in sys.path]  # noqa: PTH109
        resources = {} if place is None else dict(place.resources)
        actor = self._actor_class.options(
            name=name if number == 1 else f"{name}#{number}",
            num_cpus=resources.pop("CPU", 0),
            num_gpus=resources.pop("GPU", 0),
            resources=resources,
            scheduling_strategy=self.places.roomiest() if place is None else place.strategy,
        ).remote(target, str(Path.cwd()), path)
        return ActorChannel(actor, self._put, deliver)

    def _put(self, folder: Path) -> Any:
        """Puts the files of a folder into the store, once as long as the folder is there."""
        kept = {path: held for path, held in self._objects.items() if path.is_dir()}
        if folder not in kept:
            kept[folder] = ray.put(file_bytes(folder))
        self._objects = kept
        return kept[folder]

    def close(self) -> None:
        """Leaves a cluster that was joined, and ends one that was started; idempotent."""
        self._objects.clear()
        if ray.is_initialized():
            self.places.release()
            if self._joined:
                ray.shutdown()


@contextmanager
def _signals_kept() -> Iterator[None]:
    """Keeps this process's handlers of signals, which Ray replaces."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
