"""A rank of a trainer: `python -m flowrl.runtime.local.rank_worker SOCKET PARENT`.

`flowrl.runtime.local.ranks.RankProcesses` starts it, and it dies with the process that did.

    run -> rank    ("open", plugin, PolicyContext), once
                   ("call", pickled (method, arguments))
    rank -> run    ("returned", result of rank 0 or None), or ("raised", FlowError), or
                   ("failed", BackendError) of any other exception; one for each message
"""

from __future__ import annotations

import pickle
import sys
import traceback

from flowrl.backend.protocols import PolicyContext, TrainBackend
from flowrl.errors import BackendError, FlowError
from flowrl.runtime.channels import Message
from flowrl.runtime.local.process_channel import SocketMailbox
from flowrl.runtime.local.processes import named_plugin
from flowrl.runtime.user_errors import described


def main(arguments: list[str]) -> None:
    """Runs a rank on an inherited socket until nothing more comes."""
    mailbox = SocketMailbox.inherited(arguments)
    rank = _RankWorker()
    while (messages := mailbox.receive()) is not None:
        for message in messages:
            mailbox.send(rank.answer(message))
    rank.close()


class _RankWorker:
    """A rank's trainer, once it is open."""

    def __init__(self) -> None:
        self._trainer: TrainBackend | None = None
        self._where = ""

    def answer(self, message: Message) -> Message:
        """Does what a message asks for."""
        try:
            match message:
                case ("open", str(plugin), PolicyContext() as context):
                    method, self._where = "open", f"roles.{context.role}"
                    self._is_first = context.rank is None or context.rank.number == 0
                    self._trainer = named_plugin(plugin).open_train(context)
                    return ("returned", None)
                case ("call", bytes(call)):
                    method, arguments = pickle.loads(call)  # noqa: S301  # of this run
                    result = getattr(self._trainer, method)(*arguments)
                    return ("returned", result if self._is_first else None)
                case _:
                    raise AssertionError(f"a rank received {message!r}")
        except FlowError as reason:
            return ("raised", reason)
        except Exception as reason:
            traceback.print_exc()
            found = described(reason)
            return ("failed", BackendError(f"{method} failed", where=self._where, found=found))

    def close(self) -> None:
        if self._trainer is not None:
            self._trainer.close()


if __name__ == "__main__":
    main(sys.argv[1:])
