"""How long responses are, for those who need no drawn sample: distributions in closed form.

    ConstantLengths(tokens=512)
    LognormalLengths(mean=1400, sigma=1.0, maximum=4096)      a long tail, cut at the longest
    EmpiricalLengths(values=(31, 78, 512))                    each with equal chances

A cost does not draw lengths: it takes the quantiles at `(i + 1/2) / n`, n lengths that stand for
n drawn ones (`flowrl.cost.spread`), and the expected longest of n (`expected_maximum`), so that
equal questions have equal answers.

Lengths are those that a rollout really gives: none is longer than `maximum`, and what would have
been longer is there with `maximum` tokens. `mean` is the mean after this cut, as runs report it
(`flowrl.sim.lengths` draws whole tokens, and its means are those before the cut:
`lognormal_before_cut`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from statistics import NormalDist
from typing import Protocol

from flowrl.errors import ConfigError

_NORMAL = NormalDist()


class Lengths(Protocol):
    """A distribution of response tokens. Equal ones are equal and hash alike."""

    def __hash__(self) -> int: ...

    @property
    def mean(self) -> float:
        """Tokens, after the cut at `maximum`."""
        ...

    @property
    def mean_square(self) -> float:
        """Of the squared lengths: what attention over whole sequences grows with."""
        ...

    @property
    def maximum(self) -> float:
        """No response is longer."""
        ...

    def quantile(self, share: float) -> float:
        """The length that a share of responses does not exceed; 0 <= share <= 1."""
        ...


@dataclass(frozen=True, kw_only=True)
class ConstantLengths:
    """Every response has `tokens`."""

    tokens: float

    def __post_init__(self) -> None:
        _check_positive("tokens", self.tokens)

    @property
    def mean(self) -> float:
        """See `Lengths`."""
        return self.tokens

    @property
    def mean_square(self) -> float:
        """See `Lengths`."""
        return self.tokens**2

    @property
    def maximum(self) -> float:
        """See `Lengths`."""
        return self.tokens

    def quantile(self, share: float) -> float:
        """See `Lengths`."""
        return self.tokens


@dataclass(frozen=True, kw_only=True)
class LognormalLengths:
    """`min(exp(N(mu, sigma^2)), maximum)`, with `mu` so that its mean is `mean`.

    With F the normal distribution function, `u = (ln maximum - mu) / sigma`:

        mean        = exp(mu + sigma^2 / 2) F(u - sigma) + maximum (1 - F(u))
        mean_square = exp(2 mu + 2 sigma^2) F(u - 2 sigma) + maximum^2 (1 - F(u))

    Attributes:
        mean: After the cut; below `maximum`.
        sigma: Of the logarithm, above 0.
        maximum: Where responses are cut.
    """

    mean: float
    sigma: float
    maximum: float

    def __post_init__(self) -> None:
        _check_positive("mean", self.mean)
        _check_positive("sigma", self.sigma)
        if not self.mean < self.maximum < math.inf:
            raise ConfigError(
                "a mean of lengths that are cut lies below the cut",
                where="lengths",
                found=f"mean {self.mean:g}, maximum {self.maximum:g}",
                expected="mean < maximum",
                hint="lower plan.mean_response_tokens, or raise train.sampling.max_tokens",
            )

    @cached_property
    def mu(self) -> float:
        """Of the logarithm before the cut; by bisection, for the mean grows with it."""
        low = math.log(self.mean) - self.sigma**2 / 2  # what it is without a cut
        high = math.log(self.maximum) + 12 * self.sigma
        for _ in range(80):
            middle = (low + high) / 2
            if _cut_moment(middle, self.sigma, self.maximum, 1) < self.mean:
                low = middle
            else:
                high = middle
        return (low + high) / 2

    @property
    def before_cut(self) -> float:
        """The mean before the cut."""
        return math.exp(self.mu + self.sigma**2 / 2)

    @property
    def share_cut(self) -> float:
        """Of responses that reach the maximum."""
        return _NORMAL.cdf((self.mu - math.log(self.maximum)) / self.sigma)

    @cached_property
    def mean_square(self) -> float:
        """See `Lengths`."""
        return _cut_moment(self.mu, self.sigma, self.maximum, 2)

    def quantile(self, share: float) -> float:
        """See `Lengths`."""
        if share <= 0:
            return 0.0
        if share >= 1:
            return self.maximum
        return min(self.maximum, math.exp(self.mu + self.sigma * _NORMAL.inv_cdf(share)))


@dataclass(frozen=True, kw_only=True)
class EmpiricalLengths:
    """Lengths that were seen, each as likely as the others.

    Attributes:
        values: At least one, none below 0.
    """

    values: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.values or min(self.values) < 0 or max(self.values) <= 0:
            raise ConfigError(
                "lengths that cannot be used",
                where="lengths",
                found=f"{len(self.values)} values, least {min(self.values, default=0):g}",
                expected="at least one, none below 0, one above",
                hint="name a file with lengths above 0, such as samples.jsonl of a run",
            )

    @cached_property
    def _sorted(self) -> tuple[float, ...]:
        return tuple(sorted(self.values))

    @property
    def mean(self) -> float:
        """See `Lengths`."""
        return math.fsum(self.values) / len(self.values)

    @property
    def mean_square(self) -> float:
        """See `Lengths`."""
        return math.fsum(value**2 for value in self.values) / len(self.values)

    @property
    def maximum(self) -> float:
        """See `Lengths`."""
        return self._sorted[-1]

    def quantile(self, share: float) -> float:
        """See `Lengths`."""
        index = math.ceil(share * len(self.values) - 1e-9) - 1
        return self._sorted[min(max(index, 0), len(self.values) - 1)]


def lognormal_before_cut(*, mean: float, sigma: float, maximum: float) -> Lengths:
    """Lognormal lengths by their mean before they are cut; sigma 0 is constant."""
    if sigma == 0:
        return ConstantLengths(tokens=min(mean, maximum))
    mu = math.log(mean) - sigma**2 / 2
    return LognormalLengths(mean=_cut_moment(mu, sigma, maximum, 1), sigma=sigma, maximum=maximum)


def mean_by_share_cut(share: float, *, sigma: float, maximum: float) -> float:
    """The mean, after the cut, of lognormal lengths of which so many reach the maximum."""
    mu = math.log(maximum) - sigma * _NORMAL.inv_cdf(1 - share)
    return _cut_moment(mu, sigma, maximum, 1)


@lru_cache(maxsize=1024)
def expected_maximum(lengths: Lengths, num: float) -> float:
    """Mean of the longest of `num` independent lengths: the integral of `1 - (1 - S(t))^num`, with
    S(t) the share of lengths that are longer than t.

    A number with a fraction lies between its neighbours.

    With U uniform the longest is the quantile at `U^(1 / num)`, so the mean is that of the
    quantile at `((j + 1/2) / 256)^(1 / num)` over j.
    """
    if num < 1:
        return 0.0
    points = 256
    shares = [((j + 0.5) / points) ** (1 / num) for j in range(points)]
    return math.fsum(quantiles(lengths, shares)) / points


def quantiles(lengths: Lengths, shares: Sequence[float]) -> list[float]:
    """`lengths.quantile` of each share, 0 < share < 1."""
    if not isinstance(lengths, LognormalLengths):
        return [lengths.quantile(share) for share in shares]
    # The same sums, without a call for each.
    mu, sigma, maximum, exp = lengths.mu, lengths.sigma, lengths.maximum, math.exp
    return [min(maximum, exp(mu + sigma * z)) for z in map(_NORMAL.inv_cdf, shares)]


def _cut_moment(mu: float, sigma: float, maximum: float, power: int) -> float:
    """Mean of `min(X, maximum)^power` for X lognormal."""
    u = (math.log(maximum) - mu) / sigma
    below = math.exp(power * mu + (power * sigma) ** 2 / 2) * _NORMAL.cdf(u - power * sigma)
    return below + maximum**power * _NORMAL.cdf(-u)


def _check_positive(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise ConfigError(
            f"{name} of lengths must be a number above 0",
            where="lengths",
            found=repr(value),
            hint=f"give a {name} above 0 (plan.mean_response_tokens, plan.sigma)",
        )
