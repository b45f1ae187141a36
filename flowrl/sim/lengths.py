"""How long responses are: distributions, as words or files name them.

    constant:128                    every response has 128 tokens
    lognormal:mean=300,sigma=1.2    a long tail; sigma 0 is constant
    FILE.jsonl                      lengths one a line (a number, or an object with `num_tokens`),
                                    drawn with equal chances
    RUN/samples.jsonl               whole groups of a run, with what became of them

Sigma is that of the logarithm, and the mean is the mean: `mu = ln(mean) - sigma^2 / 2`. Lengths are
whole tokens, at least 1, and no longer than the rollout allows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from flowrl.errors import ConfigError, DataError
from flowrl.observe.rows import lengths_in

Ints = npt.NDArray[np.int64]

_FORMS = "constant:TOKENS, lognormal:mean=TOKENS,sigma=NUMBER, or a file of JSON lines"


class Lengths(Protocol):
    """A distribution of response tokens."""

    def draw(self, rng: np.random.Generator, num: int) -> Ints:
        """int64 `[num]`, at least 1."""
        ...

    def __str__(self) -> str:
        """How one writes it, for people."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """Always the same."""

    tokens: int

    def draw(self, rng: np.random.Generator, num: int) -> Ints:
        """See `Lengths`."""
        return np.full(num, self.tokens, np.int64)

    def __str__(self) -> str:
        return f"constant:{self.tokens}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lognormal:
    """`exp(N(mu, sigma^2))`, rounded; `mean` is that before lengths are cut at the longest."""

    mean: float
    sigma: float

    def draw(self, rng: np.random.Generator, num: int) -> Ints:
        """See `Lengths`."""
        mu = math.log(self.mean) - self.sigma**2 / 2
        drawn = np.rint(np.exp(mu + self.sigma * rng.standard_normal(num)))
        return np.clip(drawn, 1, 2**62).astype(np.int64)

    def __str__(self) -> str:
        return f"lognormal:mean={self.mean:g},sigma={self.sigma:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """Drawn from a list, each entry with the same chance.

    Attributes:
        source: Where the list comes from.
    """

    values: tuple[int, ...]
    source: str

    def draw(self, rng: np.random.Generator, num: int) -> Ints:
        """See `Lengths`."""
        return np.asarray(self.values, np.int64)[rng.integers(0, len(self.values), num)]

    def __str__(self) -> str:
        return f"{self.source} ({len(self.values)} lengths)"


def parse_lengths(text: str) -> Lengths | None:
    """The distribution that words name; None where they name none, so a file is meant.

    >>> print(parse_lengths("lognormal:mean=300,sigma=1.2"))
    lognormal:mean=300,sigma=1.2

    Raises:
        ConfigError: a distribution with other numbers than it has.
    """
    kind, colon, rest = text.partition(":")
    if not colon or kind not in _MAKERS:
        return None
    names, make = _MAKERS[kind]
    values: dict[str, float] = {}
    for index, part in enumerate(rest.split(",")):
        name, equals, number = part.partition("=")
        key = name.strip() if equals else names[min(index, len(names) - 1)]
        if key not in names:
            raise _unknown(text, f"{kind} lengths have no {key!r}, but {' and '.join(names)}")
        if key in values:
            raise _unknown(text, f"{kind} lengths say {key} twice")
        try:
            values[key] = float(number if equals else name)
        except ValueError:
            raise _unknown(text, f"{key} of {kind} lengths is no number") from None
    if missing := [name for name in names if name not in values]:
        raise _unknown(text, f"{kind} lengths need {' and '.join(missing)} too")
    for name, most in zip(names, (MOST_TOKENS, MOST_SIGMA), strict=False):
        least = 1 if name == names[0] else 0
        if not least <= values[name] <= most:
            raise _unknown(text, f"{name} of {kind} lengths is from {least:g} to {most:,}")
    return make(*(values[name] for name in names))


MOST_TOKENS = 100_000_000
"""On average: more is a slip of the hand."""

MOST_SIGMA = 5
"""One of forty lengths is then 18,000 times the median, as `plan.sigma` allows at most."""


_MAKERS: dict[str, tuple[tuple[str, ...], Callable[..., Lengths]]] = {
    "constant": (("tokens",), lambda tokens: Constant(tokens=int(tokens))),
    "lognormal": (("mean", "sigma"), lambda mean, sigma: Lognormal(mean=mean, sigma=sigma)),
}


def _unknown(text: str, why: str) -> ConfigError:
    return ConfigError(
        why,
        where="--lengths",
        found=text,
        expected=_FORMS,
        hint="for example --lengths lognormal:mean=300,sigma=1",
    )


def read_lengths(path: Path) -> Listed:
    """The lengths of a file of JSON lines: numbers, or objects with `num_tokens`.

    Raises:
        ConfigError: no such file.
        DataError: a line that is neither, with its number; or no line.
    """
    if not path.is_file():
        raise ConfigError(
            "no such file, and no distribution of lengths either",
            where="--lengths",
            found=str(path),
            expected=_FORMS,
            hint="for example --lengths lognormal:mean=300,sigma=1, or --lengths RUN/samples.jsonl",
        )
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            "lengths cannot be read",
            where=str(path),
            found=str(error),
            hint="name samples.jsonl of a run, or --lengths lognormal:mean=300,sigma=1",
        ) from error
    values = lengths_in(path, text)
    if not values:
        raise DataError(
            "there are no lengths",
            where=str(path),
            found="an empty file",
            expected="one JSON value a line: a number, or an object with num_tokens",
            hint="name samples.jsonl of a run, or --lengths lognormal:mean=300,sigma=1",
        )
    return Listed(values=tuple(max(1, value) for value in values), source=path.name)
