"""Weight routes, written out: the transfers put together are what each destination must hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import flowrl as fl
from flowrl.cost.layout import Layout
from flowrl.cost.models import Experts, ModelShape
from flowrl.errors import PlanError
from flowrl.plan import PlacementPlan, PlanRequest, RoleRequest, make_plan, place
from flowrl.plan.parameters import (
    Holding,
    Parameter,
    parameter_classes,
    parameters_of,
    part_of,
)
from flowrl.plan.routes import Transfer, expand_plan_route, expand_route, holding_of
from flowrl.plan.schema import WeightRoute
from flowrl.plan.show.many import seconds_text
from flowrl.plan.show.plan import route_line, step_sentences
from tests.plan.many_cases import TORCH, VERIFY, h100, pinned, request
from tests.plan.workflows import lowered

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


@fl.workflow
def several_models(
    prompts: fl.Prompts,
    actor: fl.Policy,
    student: fl.Policy,
    critic: fl.Critic,
    reference: fl.Policy,
    verifier: fl.Reward,
) -> None:
    rollout = actor.generate(prompts, n=8)
    scores = verifier.score(rollout)
    values = critic.values(rollout)
    advantages, returns = fl.advantage.gae(
        scores, values, rollout, reference=reference.logprobs(rollout), kl=0.1
    )
    critic.update(rollout, returns=returns, values=values)
    actor.update(rollout, advantages=advantages, loss=fl.loss.policy_clip(0.2, anchor="old"))
    student.update(student.generate(prompts, n=2), loss=fl.loss.cross_entropy())
    reference.sync(actor, every=50)


def whole(parameter: Parameter) -> np.ndarray:
    """A tensor with a number of its own in every place."""
    size = int(np.prod(parameter.size))
    return np.arange(size, dtype=np.int64).reshape(parameter.size)


def cut(values: np.ndarray, box: tuple[tuple[int, int], ...]) -> np.ndarray:
    return values[tuple(slice(begin, end) for begin, end in box)]


def travel(shape: ModelShape, source: Holding, destination: Holding) -> None:
    """Sends every parameter and compares what arrives with what should be there."""
    arrives(shape, source, destination, expand_route(shape, source, destination))


def arrives(
    shape: ModelShape, source: Holding, destination: Holding, moves: Iterable[Transfer]
) -> None:
    """Compares what transfers bring to each rank with what it should hold."""
    tables = {one.name: (one, whole(one)) for one in parameters_of(shape)}
    arrived: dict[tuple[str, int], np.ndarray] = {}
    for move in moves:
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
            SMALL,
            Holding(layout=one),
            Holding(layout=one, replicas_last=True),
            own={rank: rank for rank in range(8)},
        )
    )
    assert all(move.source == move.destination for move in moves)


def plan_of_several(*pins: str) -> tuple[PlacementPlan, PlanRequest]:
    """Two policies, a critic and a reference that follows."""
    named = (
        *(("actor", SMALL, "lm", None), ("student", replace(SMALL, tied=True), "lm", None)),
        *(("critic", None, "value", "actor"), ("reference", None, "lm", "actor")),
    )
    policy = replace(TORCH, heads=frozenset({"lm", "value"}))
    roles = [
        RoleRequest(
            name=name, backend="torch", capabilities=policy, shape=shape, head=head, copy_of=copy
        )
        for name, shape, head, copy in named
    ]
    verifier = RoleRequest(name="verifier", backend="verify", capabilities=VERIFY)
    asked = pinned(replace(request(), roles=(*roles, verifier)), *pins)
    return make_plan(lowered(several_models), asked, h100(8)), asked


@pytest.fixture(scope="module")
def several() -> tuple[PlacementPlan, PlanRequest]:
    """On sets of devices that overlap."""
    pins = (
        *("actor.generate.devices=1-4", "actor.generate.tp=2", "actor.update.devices=0-3"),
        *("actor.update.pp=2", "actor.update.cp=1", "actor.update.tp=1"),
        *("critic.values.devices=4-5", "critic.values.tp=2", "critic.update.devices=6-7"),
        *("student.devices=6-7", "reference.devices=0-1"),
    )
    return plan_of_several(*pins)


def test_every_route_of_a_plan_brings_each_device_what_it_holds(
    several: tuple[PlacementPlan, PlanRequest],
):
    plan, asked = several
    found = {(route.source, route.node): route for route in plan.weight_routes}
    assert set(found) == {
        *(("actor", "actor.generate"), ("actor", "actor.logprobs")),
        ("student", "student.generate"),
        *(("critic", "critic.values"), ("actor", "reference.logprobs")),
    }
    for (role, node), route in found.items():
        assert node is not None
        shape = asked.shape_of(asked.role(role))
        assert shape is not None
        update, user = plan.operation(f"{role}.update"), plan.operation(node)
        moves = list(expand_plan_route(plan, route, shape))
        for there, here, move in moves:
            assert there == update.devices[move.source]
            assert here == user.devices[move.destination]
        arrives(shape, holding_of(update), holding_of(user), [move for _, _, move in moves])


def test_a_device_of_both_sets_keeps_what_it_has_whatever_its_rank_is(
    several: tuple[PlacementPlan, PlanRequest],
):
    plan, _ = several
    route = next(one for one in plan.weight_routes if one.node == "actor.generate")
    update, user = plan.operation("actor.update"), plan.operation("actor.generate")
    both = set(update.devices) & set(user.devices)
    assert len(both) == 3
    assert update.devices.index("cuda:1") != user.devices.index("cuda:1")
    # Of two stages each device has half of the layers.
    kept = {(here, move.parameter) for there, here, move in _moves(plan, route) if there == here}
    norms = [f"model.layers.{layer}.input_layernorm.weight" for layer in range(4)]
    trained = holding_of(update)
    for device in both:
        stage = trained.place(update.devices.index(device))[-1]
        mine = norms[:2] if stage == 0 else norms[2:]
        assert {name for here, name in kept if here == device and name in norms} == set(mine)


def test_a_pattern_leaves_the_parameters_that_it_matches_as_they_were(
    several: tuple[PlacementPlan, PlanRequest],
):
    plan, _ = several
    route = next(one for one in plan.weight_routes if one.node == "actor.generate")
    wanted = [one for one in _moves(plan, route) if ".1.mlp." in one[2].parameter]
    assert len({move.parameter for _, _, move in wanted}) == 3
    assert list(expand_plan_route(plan, route, SMALL, names="*.1.mlp.*")) == wanted


def test_a_reference_that_follows_takes_its_weights_after_its_own_sync(
    several: tuple[PlacementPlan, PlanRequest],
):
    plan, _ = several
    after = {route.node: (route.after, route.every) for route in plan.weight_routes}
    assert after["reference.logprobs"] == ("reference.sync", 50)
    assert after["actor.generate"] == ("actor.sync", 1)
    assert after["actor.logprobs"] == ("actor.update", 1)
    assert after["critic.values"] == ("critic.update", 1)
    placed = place(lowered(several_models), plan)
    assert ("transport", "collective") in placed.node("reference.sync").attrs


def test_weights_that_wait_on_the_host_tell_where_their_time_is():
    plan, _ = plan_of_several(
        *("critic.values.devices=4-5", "critic.values.tp=2", "critic.values.offload=all"),
        *("critic.update.devices=4-5", "critic.update.dp=2", "critic.update.tp=1"),
    )
    (route,) = (one for one in plan.weight_routes if one.node == "critic.values")
    assert route.seconds == 0.0
    values = plan.operation("critic.values")
    assert values.move_s > 0
    line = route_line(route, plan)
    assert "from dp 2 to tp 2, with the way to the host and back, " in line
    assert f"{seconds_text(values.move_s)} of critic.values (" in line
    on_devices = replace(values, move_s=0.0, offload=())
    kept = replace(
        plan, operations=tuple(on_devices if o is values else o for o in plan.operations)
    )
    assert "from dp 2 to tp 2, no time is counted for it (" in route_line(route, kept)
    told = step_sentences(plan)
    assert told.count("critic publishes its new weights to critic.values") == 1
    at = told.index("critic publishes its new weights to critic.values")
    assert told[at - 1].startswith("critic makes ")


def _moves(plan: PlacementPlan, route: WeightRoute) -> list[tuple[str, str, Transfer]]:
    return list(expand_plan_route(plan, route, SMALL))


@pytest.mark.parametrize(
    ("source", "destination"),
    [
        (Layout(dp=4), Layout(dp=8)),
        # The ranks that need a part are every second one, and so are those that have it.
        (Layout(tp=4, dp=2), Layout(tp=2, dp=4)),
        (Layout(tp=2, dp=4), Layout(tp=2, dp=8)),
    ],
)
def test_replicas_share_the_sending(source: Layout, destination: Layout):
    moves = expand_route(
        SMALL, Holding(layout=source), Holding(layout=destination, replicas_last=True)
    )
    sent = Counter((move.parameter, move.source) for move in moves)
    assert {rank for _, rank in sent} == set(range(source.num_devices))
    for name in {name for name, _ in sent}:
        assert len({count for (one, _), count in sent.items() if one == name}) == 1


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
