"""A plug-in whose ranks answer, raise, die or keep silent, as a call asks."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from flowrl.backend.protocols import PolicyContext, Rank
from flowrl.errors import BackendError
from flowrl_backends.torch.plugin import TorchPlugin


class _Trainer:
    def __init__(self, context: PolicyContext) -> None:
        assert context.rank is not None
        self._rank: Rank = context.rank
        self._folder = context.model

    def logprobs(self, wanted: str, rank: int) -> str:
        mine = self._rank.number == rank
        match wanted:
            case "raise":
                raise BackendError("a bad batch", where="everywhere")
            case "raise alone" if mine:
                raise BackendError("a bad rank", where=f"rank {rank}")
            case "fail alone" if mine:
                raise ZeroDivisionError(f"by rank {rank}")
            case "die" if mine:
                os.kill(os.getpid(), signal.SIGKILL)
            case "die":  # as a collective does whose other end is gone
                raise ConnectionError("closed by its peer")
            case "silence" if mine:
                signal.pause()
        return f"{self._rank.number} of {self._rank.size}"

    def export(self, folder: Path) -> None:
        (folder / str(self._rank.number)).write_text(str(os.getpid()), encoding="utf-8")

    def close(self) -> None:
        (self._folder / f"closed-{self._rank.number}").touch()


class _Plugin(TorchPlugin):
    def open_train(self, context: PolicyContext) -> _Trainer:  # type: ignore[override]
        if context.device == "npu" and context.rank is not None and context.rank.number:
            raise BackendError("no such device", where=f"rank {context.rank.number}")
        return _Trainer(context)


plugin = _Plugin()
