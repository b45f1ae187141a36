"""`roles.NAME.recompute` on a single device: in the plan, in its memory, and in the update."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import flowrl as fl
from flowrl.backend.protocols import Capabilities
from flowrl.cost import Phase
from flowrl.errors import PlanError
from flowrl.graph.ir import Graph
from flowrl.plan import PlacementPlan, PlanRequest, make_plan


def asked(request: PlanRequest, recompute: str, can: frozenset[str]) -> PlanRequest:
    """The request with `recompute` for its actor, of a backend that can do `can`."""
    roles = tuple(
        replace(
            role,
            recompute=recompute if role.name == "actor" else role.recompute,
            capabilities=_able(role.capabilities, can),
        )
        for role in request.roles
    )
    return replace(request, roles=roles)


def _able(capabilities: Capabilities, can: frozenset[str]) -> Capabilities:
    return replace(capabilities, recompute=can)


def activations(plan: PlacementPlan) -> int:
    (update,) = [
        entry.memory
        for entry in plan.prediction.memory
        if entry.active == "actor" and entry.memory.phase is Phase.UPDATE
    ]
    return sum(part.nbytes for part in update.parts if part.name == "activations")


def test_recompute_is_in_the_plan_s_update_and_in_its_memory(grpo: Graph, cases: Any) -> None:
    pool = cases.pool_of(cases.cpu(64))
    request = cases.request_for(max_response_tokens=512)
    can = frozenset({"full"})
    kept = make_plan(grpo, asked(request, "auto", can), pool)
    again = make_plan(grpo, asked(request, "full", can), pool)
    found = {operation.node: operation.recompute for operation in again.operations}
    assert found.pop("actor.update") == "full"
    assert set(found.values()) == {"none"}
    assert kept.operation("actor.update").recompute == "none"
    # Of two layers one is there at a time, beside both inputs.
    assert activations(again) < activations(kept) * 0.6


def test_a_backend_that_cannot_recompute_is_named(grpo: Graph, cases: Any) -> None:
    request = asked(cases.request_for(max_response_tokens=512), "full", frozenset())
    with pytest.raises(PlanError, match="has no full recompute") as caught:
        make_plan(grpo, request, cases.pool_of(cases.cpu(64)))
    assert caught.value.where == "roles.actor.recompute"
    assert caught.value.expected == "one of none"


def test_the_key_of_a_config_reaches_the_plan(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(repository)
    compiled = fl.compile(None, "configs/quickstart.yaml", overrides=["roles.actor.recompute=full"])
    for stage in compiled.stages:
        (update,) = [o for o in stage.plan.operations if o.op == "update"]
        assert update.recompute == "full"


def test_what_does_not_fit_is_told_that_recomputation_would(grpo: Graph, cases: Any) -> None:
    request = asked(
        cases.request_for(max_response_tokens=2048, micro_batch=64), "auto", frozenset({"full"})
    )
    with pytest.raises(PlanError) as caught:
        make_plan(grpo, request, cases.pool_of(cases.cpu(2)))
    assert "set roles.actor.recompute=full" in str(caught.value.hint)
    again = replace(
        request,
        roles=tuple(
            replace(role, recompute="full") if role.name == "actor" else role
            for role in request.roles
        ),
    )
    assert "(it fits with" in str(caught.value.hint)
    make_plan(grpo, again, cases.pool_of(cases.cpu(2)))
