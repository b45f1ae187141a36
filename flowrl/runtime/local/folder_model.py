"""The weights of a role that only generates: those of its model's folder, which never change."""

from __future__ import annotations

from pathlib import Path

from flowrl.backend.protocols import PolicyContext


class FolderModel:
    """What a run needs of a `TrainBackend` for a role whose plug-in has none.

    The compiler refuses programs that ask the role for more.
    """

    def __init__(self, context: PolicyContext) -> None:
        self._folder = context.model

    def export(self, folder: Path) -> None:
        """Makes links to the files of the model's folder."""
        for file in self._folder.iterdir():
            if file.is_file():
                (folder / file.name).symlink_to(file.resolve())

    def offload(self) -> None:
        """Does nothing: an engine has all the memory that is used."""

    def reload(self) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing."""
