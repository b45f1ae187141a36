"""Weight routes, written out: the transfers put together are what each destination must hold."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.cost.layout import Layout
from flowrl.cost.models import Experts, ModelShape
from flowrl.errors import PlanError
from flowrl.plan.parameters import (
    Holding,
    Parameter,
    parameter_classes,
    parameters_of,
    part_of,
)
from flowrl.plan.routes import expand_route

SMALL = ModelShape(
    family="qwen2",
    vocab_size=50,
    hidden_size=16,
    intermediate_size=24,
    num_layers=4,
    num_heads=8,
    num_kv_heads=2,
    head_dim=2,
    tied=False,
    qkv_bias=True,
)

MOE = replace(
    SMALL,
    family="qwen3_moe",
    qk_norm=True,
    experts=Experts(num_experts=8, num_active=2, expert_size=8),
)


def whole(parameter: Parameter) -> np.ndarray:
    """A tensor with a number of its own in every place."""
    size = int(np.prod(parameter.size))
    return np.arange(size, dtype=np.int64).reshape(parameter.size)


def cut(values: np.ndarray, box: tuple[tuple[int, int], ...]) -> np.ndarray:
    return values[tuple(slice(begin, end) for begin, end in box)]


def travel(shape: ModelShape, source: Holding, destination: Holding, **options: bool) -> None:
    """Sends every parameter and compares what arrives with what should be there."""
    tables = {one.name: (one, whole(one)) for one in parameters_of(shape)}
    arrived: dict[tuple[str, int], np.ndarray] = {}
    for move in expand_route(shape, source, destination, **options):
        parameter, values = tables[move.parameter]
        held = part_of(parameter, move.source, source, shape)
        wanted = part_of(parameter, move.destination, destination, shape)
        assert held is not None
        assert wanted is not None
        place = arrived.setdefault(
            (move.parameter, move.destination),
            np.full([end - begin for begin, end in wanted], -1),
        )
        # Only what the source rank holds, at the place the transfer says, is used.
        piece = cut(cut(values, held), move.source_slice)
        target = cut(place, move.destination_slice)
        assert (target == -1).all(), "an element came twice"
        target[...] = piece
    for name, (parameter, values) in tables.items():
        for rank in range(destination.layout.num_devices):
            wanted = part_of(parameter, rank, destination, shape)
            if wanted is None:
                assert (name, rank) not in arrived
            else:
                np.testing.assert_array_equal(arrived[name, rank], cut(values, wanted))


@pytest.mark.parametrize(
    ("source", "destination"),
    [
        (Layout(tp=2, pp=2, dp=2), Layout(tp=4, dp=2)),
        (Layout(tp=1, dp=8), Layout(tp=8)),
        (Layout(tp=2, pp=4), Layout(tp=1, dp=8)),
        (Layout(tp=2, cp=2, dp=2), Layout(tp=2, pp=2, dp=2)),
        (Layout(tp=4, dp=2), Layout(tp=2, dp=3)),
    ],
)
def test_a_trainers_parameters_arrive_whole_at_an_engine(source: Layout, destination: Layout):
    travel(
        SMALL,
        Holding(layout=source, vocabulary_step=0),
        Holding(layout=destination, replicas_last=True),
    )


@pytest.mark.parametrize("shards", [2, 3, 8])
def test_fully_sharded_parameters_are_gathered(shards: int):
    travel(
        SMALL,
        Holding(layout=Layout(dp=shards), shard="full"),
        Holding(layout=Layout(tp=4, dp=2), replicas_last=True),
    )


@pytest.mark.parametrize(
    ("source", "destination"),
    [
        (Layout(dp=8, ep=4), Layout(tp=2, dp=4)),
        (Layout(tp=2, dp=4, ep=8), Layout(tp=4, ep=2, dp=2)),
        (Layout(pp=2, dp=4, ep=2), Layout(tp=8, ep=8)),
    ],
)
def test_experts_arrive_where_they_belong(source: Layout, destination: Layout):
    travel(
        MOE,
        Holding(layout=source, vocabulary_step=0),
        Holding(layout=destination, replicas_last=True),
    )


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.tuples(*[st.sampled_from([1, 2, 4])] * 4),
    engine=st.tuples(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2])),
    tied=st.booleans(),
    full=st.booleans(),
)
def test_any_two_layouts_have_a_route(
    sizes: tuple[int, ...], engine: tuple[int, int], tied: bool, full: bool
):
    tp, pp, cp, dp = sizes
    travel(
        replace(SMALL, tied=tied),
        Holding(
            layout=Layout(tp=min(tp, 2), pp=pp, cp=min(cp, 2), dp=dp),
            shard="full" if full else "none",
        ),
        Holding(layout=Layout(tp=engine[0], dp=engine[1]), replicas_last=True),
    )


def test_a_rank_that_has_what_it_needs_sends_it_to_itself():
    one = Layout(tp=2, dp=4)
    moves = list(
        expand_route(
            SMALL, Holding(layout=one), Holding(layout=one, replicas_last=True), together=True
        )
    )
    assert all(move.source == move.destination for move in moves)


def test_replicas_share_the_sending():
    moves = expand_route(
        SMALL, Holding(layout=Layout(dp=4)), Holding(layout=Layout(dp=8), replicas_last=True)
    )
    sent = Counter(move.source for move in moves)
    assert len(set(sent.values())) == 1
    assert set(sent) == {0, 1, 2, 3}


def test_each_tensor_has_a_class_and_the_sizes_of_the_model():
    for shape in (SMALL, MOE, replace(SMALL, tied=True), SMALL.with_value_head()):
        listed = list(parameters_of(shape))
        assert {one.kind for one in listed} == set(parameter_classes(shape))
        total = sum(int(np.prod(one.size)) for one in listed)
        assert total == shape.parameters.total
        assert len({one.name for one in listed}) == len(listed)


def test_a_source_that_lacks_something_is_told():
    # Six experts in four sets of one: two are nowhere.
    shape = replace(MOE, experts=Experts(num_experts=6, num_active=2, expert_size=8))
    with pytest.raises(PlanError, match="are on no source device"):
        list(expand_route(shape, Holding(layout=Layout(dp=4, ep=4)), Holding(layout=Layout(dp=1))))


def test_stages_may_be_uneven():
    travel(
        replace(SMALL, num_layers=7),
        Holding(layout=Layout(pp=3, dp=2)),
        Holding(layout=Layout(tp=2, pp=2), replicas_last=True),
    )
