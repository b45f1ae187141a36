"""Every parallel layout of a role on so many devices, and why the others are none.

    rules = LayoutRules(kinds=MEGATRON_KINDS, node_size=8, rows=512, max_length=4096)
    found = layouts(shape, 16, rules)
    found.possible            # (Layout(dp=16), Layout(tp=2, dp=8), ...)
    found.refused[0]          # tp=8 does not divide 28 query heads; nearest 4

What must divide, with t, p, c, d, e for tp, pp, cp, dp, ep:
- t p c d = devices; d follows from the others.
- t: query heads and MLP columns (of the experts, where there are any); rows of the vocabulary after
  padding; key heads, or key heads divide t where a library copies them (`kv_copies`). A tensor
  group stays inside a node: it exchanges activations twice a layer, which links between nodes are
  9 to 18 times too slow for (configs/hardware).
- p: layers.
- c: a sample is cut into 2 c pieces (one early and one late piece a rank balances the causal mask);
  where heads travel instead of keys (`cp_splits_heads`), query heads per tensor rank.
- e: experts, and t c d, for an expert group lies inside a stage; and t, or t divides it, which it
  must where a library does not divide experts twice (`cuts_experts`).
- d: rows of an optimizer update, or of a forward pass. A rollout has no such rule: samples are
  routed one by one, so replicas need not get equal numbers, and a replica without one is all that
  is refused.

A refusal is told once for each value that a constraint rules out, whatever else a layout has.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from flowrl.cost.layout import Layout
from flowrl.cost.models import ModelShape
from flowrl.plan.schema import Rejection

MEGATRON_KINDS = frozenset({"tp", "pp", "dp", "cp", "ep"})
FSDP_KINDS = frozenset({"dp", "cp", "fsdp"})
ENGINE_KINDS = frozenset({"tp", "pp", "dp", "ep"})

MIN_PIECE = 256
"""Tokens of a piece of a sample below which context parallelism exchanges more than it computes."""


_MOST_NAMED = 6
"""Numbers of replicas in a message."""

FAR = 10_000
"""From a size that is refused: nearest ones are not looked for beyond."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutRules:
    """What a library and a task allow.

    Attributes:
        kinds: Dimensions that the library has, of `tp pp dp cp ep fsdp`; what it lacks stays 1.
        node_size: Devices of a node.
        rows: Samples of an optimizer update or of a forward pass, which data-parallel ranks share
            evenly; None where nothing must be even.
        rows_of: What these are samples of.
        samples: Samples of a step: more replicas than these would idle.
        max_length: Tokens of the longest sample.
        kv_copies: Key heads may be copied to several tensor ranks.
        vocabulary_step: Rows of the vocabulary are padded to a multiple of it, then split;
            0 pads to whatever a layout needs.
        cp_splits_heads: Context-parallel ranks exchange heads (Ulysses) instead of keys (ring).
        max_pp: Stages at most.
        cuts_experts: An expert group may lie inside a tensor group, whose ranks divide its experts.
    """

    kinds: frozenset[str]
    node_size: int
    rows: int | None = None
    rows_of: str = "an update"
    samples: int | None = None
    max_length: int = 1 << 20
    kv_copies: bool = True
    vocabulary_step: int = 64
    cp_splits_heads: bool = False
    max_pp: int = 16
    cuts_experts: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundLayouts:
    """What there is on so many devices.

    Attributes:
        possible: Fewest split dimensions first.
        refused: One entry for each value that a constraint rules out.
    """

    num_devices: int
    possible: tuple[Layout, ...]
    refused: tuple[Rejection, ...]


@lru_cache(maxsize=1024)
def layouts(shape: ModelShape, num_devices: int, rules: LayoutRules) -> FoundLayouts:
    """All layouts of a model on exactly `num_devices` devices.

    Args:
        num_devices: At least 1.
    """
    sizes = _sizes(shape, rules)
    possible: list[Layout] = []
    refused = list(sizes.refused)
    seen_dp: set[int] = set()
    for layout in _combinations(num_devices, sizes, without_dp=seen_dp):
        problem = _combined_problem(shape, layout, rules)
        if problem is None:
            possible.append(layout)
        elif problem.choice.startswith("dp="):
            seen_dp.add(layout.dp)
            refused.append(problem)
    possible.sort(key=_plainness)
    return FoundLayouts(num_devices=num_devices, possible=tuple(possible), refused=tuple(refused))


def _combinations(
    num_devices: int, sizes: _Sizes, without_dp: Collection[int] = ()
) -> Iterator[Layout]:
    """Layouts on so many devices, of sizes that are possible one by one.

    Args:
        without_dp: Numbers of replicas that are refused whatever the rest is; may grow meanwhile.
    """
    for tp in sizes.tp:
        for pp in sizes.pp:
            for cp in sizes.cp:
                replica = tp * pp * cp
                if num_devices % replica:
                    continue
                dp = num_devices // replica
                for ep in sizes.ep:
                    # An expert group lies inside a stage, and holds tensor groups or lies in one.
                    fits = not (tp * cp * dp) % ep and not (ep % tp and tp % ep)
                    if fits and dp not in without_dp:
                        yield Layout(tp=tp, pp=pp, dp=dp, cp=cp, ep=ep)


def why_none(
    shape: ModelShape,
    num_devices: int,
    rules: LayoutRules,
    takes: Callable[[Layout], bool] = lambda _: True,
) -> str | None:
    """What so many devices leave, and what is wrong with it, where no layout is possible on them;
    None where they are not divided at all.

    Whatever else divides a model, the rest of the devices is its replicas: where no number of them
    shares the rows evenly, it is that and nothing else that is told.

    Args:
        takes: Layouts that are asked for.
    """
    every = [layout for layout in _combinations(num_devices, _sizes(shape, rules)) if takes(layout)]
    replicas = sorted({layout.dp for layout in every})
    if len(replicas) > 1 and rules.rows is not None and all(rules.rows % dp for dp in replicas):
        *most, last = map(str, replicas[:_MOST_NAMED])
        some = f"{', '.join(most)} or {last}"
        if len(replicas) > _MOST_NAMED:
            some = f"{', '.join((*most, last))} and so on to {replicas[-1]}"
        return (
            f"dp {some}, whatever else is divided, and none of these "
            f"divides {rules.rows} samples of {rules.rows_of}"
        )
    for layout in every:
        found = _combined_problem(shape, layout, rules)
        if found is not None:
            return f"{layout.describe()}, where {_in_words(found)}"
    return None


def uneven_replicas(
    shape: ModelShape,
    num_devices: int,
    rules: LayoutRules,
    takes: Callable[[Layout], bool] = lambda _: True,
) -> tuple[int, ...]:
    """The numbers of replicas that a model could have on so many devices, where it has no layout
    for the one reason that none of them divides the rows; empty elsewhere. Ascending.

    Args:
        takes: As for `why_none`.
    """
    if rules.rows is None or any(map(takes, layouts(shape, num_devices, rules).possible)):
        return ()
    any_rows = layouts(shape, num_devices, replace(rules, rows=None))
    return tuple(sorted({layout.dp for layout in any_rows.possible if takes(layout)}))


def _in_words(refused: Rejection) -> str:
    numbers = [text for text in (refused.found, limit_words(refused)) if text]
    more = f" ({', '.join(numbers)})" if numbers else ""
    return f"{refused.choice} {refused.constraint}{more}"


def limit_words(refused: Rejection) -> str | None:
    """The limit that a size breaks."""
    limit = refused.limit
    return limit if not limit or limit.startswith("at ") else f"at most {limit}"


def possible_sizes(shape: ModelShape, rules: LayoutRules, name: str) -> tuple[int, ...]:
    """The sizes of one dimension but `dp` that no constraint rules out on its own, ascending."""
    found: tuple[int, ...] = getattr(_sizes(shape, rules), name)
    return found


def with_possible(refused: Rejection, size: int, possible: Collection[int]) -> Rejection:
    """The same with those of its nearest values that no other constraint rules out.

    Args:
        possible: All that none does; where `refused` names none of them, the nearest is named.
    """
    named = [text for text in refused.nearest.split(", ") if text in map(str, possible)]
    if not named and possible:
        named = [str(min(possible, key=lambda one: (abs(one - size), one)))]
    return replace(refused, nearest=", ".join(named))


def nearest_divisors(number: int, size: int) -> str:
    """The two numbers nearest to `size` that divide `number`: `4, 7` for 28 and 8.

    Of large numbers those are left out that are far from `size`.
    """
    found = [number, 1] if size > FAR else []
    known = _divisors(number, number)
    below, above = bisect_left(known, size), bisect_right(known, size)
    sides = known[max(0, below - 2) : below], known[above : above + 2]
    found += [other for side in sides for other in side if abs(other - size) <= FAR]
    near = sorted({*found} - {size}, key=lambda other: (abs(other - size), other))[:2]
    return ", ".join(str(other) for other in sorted(near))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    """Sizes of each dimension that are possible on their own."""

    tp: tuple[int, ...]
    pp: tuple[int, ...]
    cp: tuple[int, ...]
    ep: tuple[int, ...]
    refused: tuple[Rejection, ...]


@lru_cache(maxsize=256)
def _sizes(shape: ModelShape, rules: LayoutRules) -> _Sizes:
    asked = {
        "tp": {*_powers(2 * rules.node_size), *_divisors(shape.num_heads, rules.node_size)},
        "pp": {*_powers(rules.max_pp), *_divisors(shape.num_layers, rules.max_pp)},
        "cp": set(_powers(2 * rules.node_size)),
        "ep": set(_powers(shape.experts.num_experts)) if shape.experts is not None else {1},
    }
    possible: dict[str, tuple[int, ...]] = {}
    refused: list[Rejection] = []
    for name, sizes in asked.items():
        if name not in rules.kinds:
            possible[name] = (1,)
            continue
        found = {size: check_size(shape, rules, name, size) for size in sorted(sizes)}
        good = possible[name] = tuple(size for size, problems in found.items() if not problems)
        refused += [
            with_possible(problems[0], size, good) for size, problems in found.items() if problems
        ]
    return _Sizes(
        tp=possible["tp"],
        pp=possible["pp"],
        cp=possible["cp"],
        ep=possible["ep"],
        refused=tuple(refused),
    )


def check_size(
    shape: ModelShape, rules: LayoutRules, name: str, size: int
) -> tuple[Rejection, ...]:
    """What is wrong with one size of one dimension, whatever the others are."""
    if size == 1:
        return ()
    if name == "dp":
        problem = _dp_problem(rules, size)
        return () if problem is None else (problem,)
    if name not in rules.kinds:
        has = ", ".join(sorted(rules.kinds)) or "nothing"
        return (
            Rejection(
                choice=f"{name}={size}",
                constraint=f"splits what the library does not (it has {has})",
                nearest="1",
            ),
        )
    return tuple(problem for check in _CHECKS[name] if (problem := check(shape, rules, size)))


def _undivided(name: str, size: int, number: int, what: str) -> Rejection | None:
    if number % size == 0:
        return None
    return Rejection(
        choice=f"{name}={size}",
        constraint=f"does not divide {number} {what}",
        nearest=nearest_divisors(number, size),
    )


def _in_node(name: str, size: int, rules: LayoutRules) -> Rejection | None:
    if size <= rules.node_size:
        return None
    return Rejection(
        choice=f"{name}={size}",
        constraint="would leave the node with its exchanges in every layer",
        found=f"{size} devices",
        limit=f"{rules.node_size} of a node",
        nearest=str(rules.node_size),
    )


def _tp_in_node(shape: ModelShape, rules: LayoutRules, tp: int) -> Rejection | None:
    return _in_node("tp", tp, rules)


def _tp_heads(shape: ModelShape, rules: LayoutRules, tp: int) -> Rejection | None:
    return _undivided("tp", tp, shape.num_heads, "query heads")


def _tp_kv_heads(shape: ModelShape, rules: LayoutRules, tp: int) -> Rejection | None:
    heads = shape.num_kv_heads
    if shape.latent is not None:
        return None  # one latent serves all heads; every rank holds it
    if heads % tp == 0 or (rules.kv_copies and tp % heads == 0):
        return None
    how = "and is no multiple of them" if rules.kv_copies else "and the library copies none"
    return Rejection(
        choice=f"tp={tp}",
        constraint=f"does not divide {heads} key heads, {how}",
        nearest=nearest_divisors(heads, tp),
    )


def _tp_mlp(shape: ModelShape, rules: LayoutRules, tp: int) -> Rejection | None:
    experts = shape.experts
    if experts is not None:
        wide = experts.expert_size, "columns of an expert"
        if problem := _undivided("tp", tp, *wide):
            return problem
        if experts.num_dense_layers == 0:
            return None
    return _undivided("tp", tp, shape.intermediate_size, "columns of the MLP")


def _tp_vocabulary(shape: ModelShape, rules: LayoutRules, tp: int) -> Rejection | None:
    step = rules.vocabulary_step
    rows = -(-shape.vocab_size // step) * step if step else 0
    return _undivided("tp", tp, rows, f"rows of the vocabulary ({shape.vocab_size}, padded)")


def _pp_layers(shape: ModelShape, rules: LayoutRules, pp: int) -> Rejection | None:
    return _undivided("pp", pp, shape.num_layers, "layers")


def _cp_pieces(shape: ModelShape, rules: LayoutRules, cp: int) -> Rejection | None:
    piece = rules.max_length // (2 * cp)
    if piece >= MIN_PIECE:
        return None
    most = max(1, rules.max_length // (2 * MIN_PIECE))
    return Rejection(
        choice=f"cp={cp}",
        constraint=f"cuts the longest sample of {rules.max_length} tokens into too short pieces",
        found=f"{piece} tokens",
        limit=f"at least {MIN_PIECE} tokens a piece",
        nearest=str(1 << (most.bit_length() - 1)),
    )


def _cp_heads(shape: ModelShape, rules: LayoutRules, cp: int) -> Rejection | None:
    return _undivided("cp", cp, shape.num_heads, "query heads") if rules.cp_splits_heads else None


def _cp_in_node(shape: ModelShape, rules: LayoutRules, cp: int) -> Rejection | None:
    return _in_node("cp", cp, rules)


def _ep_experts(shape: ModelShape, rules: LayoutRules, ep: int) -> Rejection | None:
    if shape.experts is None:
        return Rejection(
            choice=f"ep={ep}", constraint="has no use: the model has no experts", nearest="1"
        )
    return _undivided("ep", ep, shape.experts.num_experts, "experts")


_Check = Callable[[ModelShape, LayoutRules, int], Rejection | None]

_CHECKS: dict[str, tuple[_Check, ...]] = {
    "tp": (_tp_heads, _tp_kv_heads, _tp_mlp, _tp_vocabulary, _tp_in_node),
    "pp": (_pp_layers,),
    "cp": (_cp_pieces, _cp_heads, _cp_in_node),
    "ep": (_ep_experts,),
}


def _combined_problem(shape: ModelShape, layout: Layout, rules: LayoutRules) -> Rejection | None:
    """What is wrong with sizes that are possible one by one."""
    if layout.tp > 1 and layout.cp > 1 and layout.tp * layout.cp > rules.node_size:
        return Rejection(
            choice=f"tp={layout.tp} cp={layout.cp}",
            constraint="would leave the node with its exchanges in every layer",
            found=f"{layout.tp * layout.cp} devices",
            limit=f"{rules.node_size} of a node",
        )
    if rules.cp_splits_heads and (shape.num_heads // layout.tp) % layout.cp:
        return Rejection(
            choice=f"tp={layout.tp} cp={layout.cp}",
            constraint=f"cp does not divide the {shape.num_heads // layout.tp} heads of a rank",
        )
    if layout.ep > 1 and layout.ep % layout.tp and not rules.cuts_experts:
        return Rejection(
            choice=f"tp={layout.tp} ep={layout.ep}",
            constraint="would divide experts twice, which the library does not",
            limit=f"at least ep={layout.tp}",
        )
    return _dp_problem(rules, layout.dp)


def _dp_problem(rules: LayoutRules, dp: int) -> Rejection | None:
    if dp > 1 and "dp" not in rules.kinds and "fsdp" not in rules.kinds:
        return Rejection(
            choice=f"dp={dp}",
            constraint="is more than the one replica that the library runs",
            nearest="1",
        )
    if rules.rows is not None and rules.rows % dp:
        return _undivided("dp", dp, rules.rows, f"samples of {rules.rows_of}")
    if rules.samples is not None and dp > rules.samples:
        return Rejection(
            choice=f"dp={dp}",
            constraint="is more than the samples of a step",
            found=str(dp),
            limit=str(rules.samples),
            nearest=str(rules.samples),
        )
    return None


def _plainness(layout: Layout) -> tuple[int, int, int, int, int]:
    return (layout.tp * layout.pp * layout.cp, layout.pp, layout.cp, layout.tp, layout.ep)


def _powers(most: int) -> Iterable[int]:
    size = 1
    while size <= most:
        yield size
        size *= 2


@lru_cache(maxsize=256)
def _divisors(number: int, most: int) -> tuple[int, ...]:
    """Those of a number, ascending, up to `most`."""
    small = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    found = {*small, *(number // size for size in small)}
    return tuple(sorted(size for size in found if size <= most))
