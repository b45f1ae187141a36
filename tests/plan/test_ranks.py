"""`roles.NAME.ranks`: several processes of one machine that train a model together, in its plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from flowrl.backend.protocols import Capabilities
from flowrl.cost import Phase
from flowrl.cost.layout import Layout
from flowrl.errors import PlanError
from flowrl.graph.ir import Graph
from flowrl.plan import PlacementPlan, PlanRequest, make_plan
from flowrl.plan.schema import Transport


def _asked(request: PlanRequest, ranks: int, *, able: bool = True) -> PlanRequest:
    """The request with `ranks` for its actor."""

    def of(capabilities: Capabilities) -> Capabilities:
        return replace(capabilities, ranks=able)

    roles = tuple(
        replace(role, capabilities=of(role.capabilities), ranks=ranks)
        if role.name == "actor"
        else role
        for role in request.roles
    )
    return replace(request, roles=roles)


def _bytes(plan: PlacementPlan, phase: Phase, *names: str) -> int:
    (memory,) = [
        entry.memory
        for entry in plan.prediction.memory
        if entry.active == "actor" and entry.memory.phase is phase
    ]
    return sum(
        part.nbytes for part in memory.parts if part.role in ("actor", "") and part.name in names
    )


def test_ranks_are_in_the_layout_and_each_is_in_the_memory(grpo: Graph, cases: Any) -> None:
    pool, request = cases.pool_of(cases.cpu(64)), cases.request_for(max_response_tokens=512)
    one, plan = (make_plan(grpo, _asked(request, ranks), pool) for ranks in (1, 3))
    assert one.placement("actor").layout == Layout()
    assert plan.placement("actor").layout == Layout(dp=3)
    assert plan.placement("reference").layout == Layout()
    each = _bytes(plan, Phase.ROLLOUT, "runtime", "parameters")
    assert _bytes(plan, Phase.ROLLOUT, "rank processes") == 3 * each
    working = _bytes(plan, Phase.UPDATE, "activations", "logits", "gradients", "margin")
    assert _bytes(plan, Phase.UPDATE, "rank processes") == 3 * each + 2 * working
    assert _bytes(one, Phase.UPDATE, "rank processes") == 0


def test_the_engine_of_several_ranks_has_weights_of_its_own(grpo: Graph, cases: Any) -> None:
    pool, request = cases.pool_of(cases.cpu(64)), cases.request_for(max_response_tokens=512)
    for ranks, transport in ((1, Transport.IN_PLACE), (2, Transport.FOLDER)):
        plan = make_plan(grpo, _asked(request, ranks), pool)
        assert [route.transport for route in plan.weight_routes] == [transport]


def test_ranks_that_nothing_offers_are_refused(grpo: Graph, cases: Any) -> None:
    request = cases.request_for(max_response_tokens=512)
    cpu, gpu = cases.pool_of(cases.cpu(64)), cases.pool_of(cases.cpu(64), cases.gpu(0))
    for pool, able, what in (
        (cpu, False, "trains in one process"),
        (gpu, True, "processes on the cores of one machine"),
    ):
        with pytest.raises(PlanError, match=what) as caught:
            make_plan(grpo, _asked(request, 2, able=able), pool)
        assert caught.value.where == "roles.actor.ranks"
