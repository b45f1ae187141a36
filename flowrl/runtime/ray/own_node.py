"""The Ray node of this process, in whose store it puts and finds objects.

Ray ends a process without a message as soon as it uses the store of a node that has died: its
client of the store calls `_exit(1)`. So everything that puts objects asks before, and a node that
has died is an error like that of any other worker. What Ray does between the two is left.
"""

from __future__ import annotations

import socket
from typing import Any

import ray

from flowrl.errors import WorkerDied


class OwnNode:
    """See the module. Ray must be initialised."""

    def __init__(self) -> None:
        here = ray.get_runtime_context().get_node_id()
        (path,) = [node["RayletSocketName"] for node in ray.nodes() if node["NodeID"] == here]
        # Nothing is sent over it: it ends with the node.
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(path)
        self._connection.setblocking(False)

    def require_alive(self) -> None:
        """Checks that the node is there; in any thread.

        Raises:
            WorkerDied: it has died.
        """
        if self._has_ended():
            raise WorkerDied(
                "the Ray node of this process died",
                where="executor=ray",
                found="its raylet has ended",
                hint="see what Ray prints on standard error; is there memory enough? `flowrl run "
                "--resume RUN` goes on from the last checkpoint",
            )

    def _has_ended(self) -> bool:
        try:
            self._connection.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            pass
        return True

    def put(self, value: object) -> Any:
        """Returns the reference to an object that is put into the store.

        Raises:
            WorkerDied: the node has died.
        """
        self.require_alive()
        return ray.put(value)

    def close(self) -> None:
        """Ends the connection; idempotent."""
        self._connection.close()
