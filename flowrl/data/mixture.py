"""A mixture of sources: a cursor for each source of prompts, taken by shares.

Prompts of a source come in epochs of their own, so a source with a large share and few rows is seen
more often. The next source follows from the numbers of prompts taken: of m prompts, a source with
the share w of all shares has had m w, within one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from hashlib import blake2b

from flowrl.config.data import CurriculumConfig
from flowrl.data.cursor import PromptCursor, PromptItem, PromptSet
from flowrl.data.rows import Row
from flowrl.data.templates import field_value
from flowrl.errors import CheckpointError, ConfigError, DataError
from flowrl.wording import suggestion


def source_field(name: str) -> Callable[[Row], str]:
    """Returns a function that reads a row's source from one of its fields.

    Raises (when called):
        ConfigError: The row has no such field, or it is no text.
    """

    def source_of(row: Row) -> str:
        try:
            value = field_value(row.fields, name, key="data.source")
            described = f"{name}={value!r}"
        except DataError as reason:
            value, described = None, reason.found or ""
        if isinstance(value, str) and value:
            return value
        raise ConfigError(
            "the row does not say its source",
            where=row.where,
            found=described,
            expected=f"a text in the field {name!r} (data.source)",
        )

    return source_of


class PromptMixture:
    """Returns prompts like a `PromptCursor`, each with its source.

    Args:
        shares: The share of every source that rows name.
        source_of: The source of a row.
        where: The config key of the shares.

    Raises:
        ConfigError: Shares and rows do not name the same sources.
    """

    def __init__(
        self,
        prompts: PromptSet,
        seed: int,
        shares: Mapping[str, float],
        source_of: Callable[[Row], str],
        *,
        where: str = "train.policies.fairness",
        curriculum: CurriculumConfig | None = None,
    ) -> None:
        self._parts = by_source = _by_source(prompts, source_of)
        self._curriculum = curriculum
        _check_names(shares, by_source, where)
        self._shares = dict(shares)
        self._taken: Counter[str] = Counter()
        self._cursors = {
            name: PromptCursor(part, _seed(seed, name), curriculum=curriculum)
            for name, part in by_source.items()
        }
        self._sources = {
            prompt.index: name for name, part in by_source.items() for prompt in part.prompts
        }

    def take(self, num: int) -> list[PromptItem]:
        """Returns the next `num` prompts, from the sources by their shares."""
        return [self.take_of(self._next(), 1)[0] for _ in range(num)]

    def take_of(self, source: str, num: int) -> list[PromptItem]:
        """Returns the next `num` prompts of one source."""
        self._taken[source] += num
        return [replace(item, source=source) for item in self._cursors[source].take(num)]

    def _next(self) -> str:
        """Returns the next source: the one that would then be least above its share."""
        return min(
            self._shares, key=lambda name: ((self._taken[name] + 1) / self._shares[name], name)
        )

    def observe(self, index: int, mean_score: float) -> None:
        """See `PromptCursor`."""
        self._cursors[self._sources[index]].observe(index, mean_score)

    def solve_rate(self, index: int) -> float | None:
        """See `PromptCursor`."""
        return self._cursors[self._sources[index]].solve_rate(index)

    def to_json(self) -> dict[str, object]:
        """Returns the positions of the cursors and the fingerprint of their data."""
        return {
            "taken": dict(self._taken),
            "sources": {name: cursor.to_json() for name, cursor in self._cursors.items()},
        }

    def restore(self, value: Mapping[str, object]) -> None:
        """Continues where the mixture that `to_json` described was.

        Raises:
            CheckpointError: It is from other data, or from other sources.
        """
        written, taken = value.get("sources"), value.get("taken")
        if (
            not isinstance(written, Mapping)
            or not isinstance(taken, Mapping)
            or written.keys() != self._cursors.keys()
        ):
            raise CheckpointError(
                "the sources of prompts are others than when the checkpoint was written",
                where="data.source",
                found=", ".join(self._cursors),
                expected=", ".join(map(str, written)) if isinstance(written, Mapping) else "none",
                hint="set data.source and the shares as they were, or start a new run",
            )
        for name, part in self._parts.items():
            self._cursors[name] = PromptCursor.from_json(written[name], part, self._curriculum)
        self._taken = Counter({str(name): int(number) for name, number in taken.items()})


def _by_source(prompts: PromptSet, source_of: Callable[[Row], str]) -> dict[str, PromptSet]:
    parts: dict[str, list[int]] = {}
    for place, prompt in enumerate(prompts.prompts):
        parts.setdefault(source_of(prompt.row), []).append(place)
    return {
        name: replace(
            prompts,
            prompts=tuple(prompts.prompts[place] for place in parts[name]),
            num_too_long=0,
            source=f"{prompts.source} ({name})",
        )
        for name in sorted(parts)
    }


def _check_names(shares: Mapping[str, float], names: Mapping[str, object], where: str) -> None:
    unknown = [name for name in shares if name not in names]
    missing = [name for name in names if name not in shares]
    if unknown or missing:
        raise ConfigError(
            "the shares of sources are not those of the data",
            where=where,
            found="; ".join(
                f"{what}: {', '.join(sources)}"
                for what, sources in (("without rows", unknown), ("without a share", missing))
                if sources
            ),
            expected=f"a share for each of {', '.join(names)}",
            hint=suggestion(unknown[0], names) if unknown else None,
        )


def _seed(seed: int, source: str) -> int:
    """Returns the seed of a source, so that its order does not depend on the other sources."""
    digest = blake2b(f"{seed}/{source}".encode(), digest_size=7).digest()
    return int.from_bytes(digest, "little")
