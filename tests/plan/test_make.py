"""Placement on one machine: which device, which process, what fits, and what is said otherwise."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.backend.protocols import Capabilities, Service
from flowrl.cost import ModelShape, Phase, Workload
from flowrl.errors import PlanError
from flowrl.graph import Graph
from flowrl.plan import make_plan
from flowrl.plan.dtypes import check_trained_types
from flowrl.plan.fit import Tenant, fit_device
from flowrl.plan.schema import StartUnit, Transport

GIB = 1 << 30


def test_without_an_accelerator_everything_runs_on_the_cpu(grpo: Graph, cases: Any) -> None:
    plan = make_plan(grpo, cases.request_for(), cases.pool_of(cases.cpu()))
    assert {p.role: p.devices for p in plan.placements} == {
        "actor": ("cpu:0",),
        "reference": ("cpu:0",),
        "verifier": ("cpu:0",),
    }
    assert plan.placement("actor").dtype == "float32"


def test_an_accelerator_that_the_backend_supports_is_preferred(grpo: Graph, cases: Any) -> None:
    plan = make_plan(grpo, cases.request_for(), cases.pool_of(cases.cpu(), cases.gpu(0)))
    assert plan.placement("actor").devices == ("cuda:0",)
    assert plan.placement("actor").dtype == "bfloat16"
    assert plan.placement("reference").dtype == "bfloat16"
    assert plan.placement("verifier").devices == ("cpu:0",)


def test_a_backend_for_the_cpu_alone_stays_there_and_the_plan_says_why(
    grpo: Graph, cases: Any
) -> None:
    capabilities = replace(cases.TORCH, devices=frozenset({"cpu"}))
    request = cases.request_for(capabilities=capabilities)
    plan = make_plan(grpo, request, cases.pool_of(cases.cpu(), cases.gpu(0)))
    assert plan.placement("actor").devices == ("cpu:0",)
    rejected = plan.reasons[0].rejected[0]
    assert (rejected.choice, rejected.constraint) == (
        "cuda:0",
        "backend torch does not run on cuda",
    )


def test_reserved_devices_are_never_used(grpo: Graph, cases: Any) -> None:
    pool = cases.pool_of(cases.cpu(), cases.gpu(0, reserved=True), cases.gpu(1))
    assert make_plan(grpo, cases.request_for(), pool).placement("actor").devices == ("cuda:1",)


def test_of_several_accelerators_the_one_with_most_free_memory_is_taken(
    grpo: Graph, cases: Any
) -> None:
    busy = replace(cases.gpu(0), available_bytes=20 * GIB)
    pool = cases.pool_of(cases.cpu(), busy, cases.gpu(1, 40), cases.gpu(2, 40))
    assert make_plan(grpo, cases.request_for(), pool).placement("actor").devices == ("cuda:1",)


def test_auto_dtype_is_float32_on_a_card_without_bfloat16(grpo: Graph, cases: Any) -> None:
    pool = cases.pool_of(cases.cpu(), cases.gpu(0, bfloat16=False))
    assert make_plan(grpo, cases.request_for(), pool).placement("actor").dtype == "float32"


def test_models_share_a_process_and_scorers_have_their_own(grpo: Graph, cases: Any) -> None:
    plan = make_plan(grpo, cases.request_for(), cases.pool_of(cases.cpu()))
    assert plan.placement("actor").process == plan.placement("reference").process == "main"
    verifier = plan.placement("verifier")
    assert (verifier.process, verifier.replicas) == ("verifier", 2)
    assert plan.placement("reference").copy_of == "actor"
    assert plan.placement("reference").num_slots == 0


def test_samples_are_scored_one_by_one_and_models_work_on_batches(grpo: Graph, cases: Any) -> None:
    plan = make_plan(grpo, cases.request_for(), cases.pool_of(cases.cpu()))
    assert {operation.node: operation.start for operation in plan.operations} == {
        "prompts": StartUnit.STEP,
        "actor.generate": StartUnit.BATCH,
        "verifier.score": StartUnit.SAMPLE,
        "reference.logprobs": StartUnit.BATCH,
        "advantage": StartUnit.BATCH,
        "actor.update": StartUnit.BATCH,
        "actor.sync": StartUnit.BATCH,
    }
    assert plan.operation("verifier.score").chunk == 1


def test_an_operation_does_not_wait_for_weights_of_the_same_step(grpo: Graph, cases: Any) -> None:
    plan = make_plan(grpo, cases.request_for(), cases.pool_of(cases.cpu()))
    assert plan.operation("actor.generate").after == ("prompts",)
    assert plan.operation("actor.update").after == (
        "actor.generate",
        "reference.logprobs",
        "advantage",
    )


def test_samples_go_to_scorers_by_pipe_and_within_a_process_by_reference(
    grpo: Graph, cases: Any
) -> None:
    plan = make_plan(grpo, cases.request_for(), cases.pool_of(cases.cpu()))
    by_ends = {(c.source, c.destination): c.transport for c in plan.channels}
    assert by_ends["actor.generate", "verifier.score"] is Transport.PIPE
    assert by_ends["verifier.score", "advantage"] is Transport.PIPE
    assert by_ends["actor.generate", "actor.update"] is Transport.MEMORY
    assert not any("sync" in end for ends in by_ends for end in ends)


@pytest.mark.parametrize(
    ("shares", "transport"), [(True, Transport.IN_PLACE), (False, Transport.FOLDER)]
)
def test_weights_travel_in_place_where_the_backend_shares_them(
    grpo: Graph, cases: Any, shares: bool, transport: Transport
) -> None:
    request = cases.request_for(capabilities=replace(cases.TORCH, shares_weights=shares))
    plan = make_plan(grpo, request, cases.pool_of(cases.cpu()))
    (route,) = plan.weight_routes
    assert (route.source, route.destination, route.after) == ("actor", "actor", "actor.sync")
    assert route.transport is transport
    assert "head" not in route.parameter_classes


def test_slots_beyond_a_step_s_samples_are_not_allocated(grpo: Graph, cases: Any) -> None:
    request = cases.request_for(num_slots=256, prompts_per_step=4, group_size=8, mini_batches=1)
    plan = make_plan(grpo, request, cases.pool_of(cases.cpu()))
    assert plan.placement("actor").num_slots == 32
    assert any(reason.subject == "actor.num_slots" for reason in plan.reasons)


def test_a_role_that_is_only_evaluated_gets_slots_too(sft: Graph, cases: Any) -> None:
    pool = cases.pool_of(cases.cpu())
    plain = make_plan(sft, cases.request_for(), pool)
    evaluated = make_plan(sft, cases.request_for(evaluated=True), pool)
    assert plain.placement("actor").num_slots == 0
    assert evaluated.placement("actor").num_slots == 256
    phases = [entry.memory.phase for entry in evaluated.prediction.memory]
    assert phases == [Phase.ROLLOUT, Phase.UPDATE]
    assert plain.weight_routes == ()
    assert evaluated.weight_routes[0].after == "actor.update"


def test_every_phase_counts_what_the_waiting_roles_hold(grpo: Graph, cases: Any) -> None:
    plan = make_plan(grpo, cases.request_for(), cases.pool_of(cases.cpu()))
    total = cases.TINY.parameters.total
    for entry in plan.prediction.memory:
        parameters = [p for p in entry.memory.parts if p.name == "parameters"]
        assert {p.role: p.nbytes for p in parameters} == {
            "actor": 4 * total,
            "reference": 4 * total,
        }


def big_request(cases: Any, **sizes: int) -> Any:
    """Qwen2.5-0.5B, 512 + 256 tokens."""
    return cases.request_for(
        cases.QWEN25_05B, max_prompt_tokens=512, max_response_tokens=256, **sizes
    )


def test_a_job_that_does_not_fit_is_refused_with_numbers_and_the_largest_that_does(
    grpo: Graph, cases: Any
) -> None:
    pool = cases.pool_of(cases.cpu(24))
    with pytest.raises(PlanError) as caught:
        make_plan(grpo, big_request(cases, micro_batch=64), pool)
    text = str(caught.value)
    assert text.startswith("roles.actor: update does not fit on cpu:0 (test CPU): needs ")
    assert " of 24.0 GiB: actor activations " in text
    match = re.search(r"set train\.micro_batch=(\d+) \(the largest that fits", text)
    assert match is not None
    best = int(match[1])
    make_plan(grpo, big_request(cases, micro_batch=best), pool)
    with pytest.raises(PlanError):
        make_plan(grpo, big_request(cases, micro_batch=best + 1), pool)


def test_where_slots_are_the_trouble_the_hint_is_about_slots(grpo: Graph, cases: Any) -> None:
    pool = cases.pool_of(cases.cpu(24))
    request = big_request(cases, micro_batch=1, num_slots=2048, prompts_per_step=1024)
    with pytest.raises(PlanError) as caught:
        make_plan(grpo, request, pool)
    match = re.search(r"set roles\.actor\.num_slots=(\d+) ", str(caught.value))
    assert match is not None
    best = int(match[1])
    sizes = {"micro_batch": 1, "prompts_per_step": 1024}
    make_plan(grpo, big_request(cases, num_slots=best, **sizes), pool)
    with pytest.raises(PlanError):
        make_plan(grpo, big_request(cases, num_slots=best + 1, **sizes), pool)


def test_where_neither_size_alone_is_enough_the_hint_changes_both(grpo: Graph, cases: Any) -> None:
    pool = cases.pool_of(cases.cpu(24))
    request = big_request(cases, micro_batch=64, num_slots=4096, prompts_per_step=1024)
    with pytest.raises(PlanError) as caught:
        make_plan(grpo, request, pool)
    pattern = r"set roles\.actor\.num_slots=(\d+) and train\.micro_batch=(\d+) "
    match = re.search(pattern, str(caught.value))
    assert match is not None
    slots, rows = int(match[1]), int(match[2])
    make_plan(
        grpo, big_request(cases, micro_batch=rows, num_slots=slots, prompts_per_step=1024), pool
    )


def test_the_hint_names_the_key_of_the_stage_s_own_sizes(grpo: Graph, cases: Any) -> None:
    request = replace(big_request(cases, micro_batch=64), train_key="stage.warm.train")
    with pytest.raises(PlanError, match=r"set stage\.warm\.train\.micro_batch="):
        make_plan(grpo, request, cases.pool_of(cases.cpu(24)))


def test_a_device_too_small_for_one_row_says_what_it_needs_at_least(
    grpo: Graph, cases: Any
) -> None:
    with pytest.raises(PlanError, match="even one row and one slot need 1"):
        make_plan(grpo, big_request(cases), cases.pool_of(cases.cpu(4)))


def test_a_too_small_accelerator_is_refused_and_the_cpu_not_taken_silently(
    grpo: Graph, cases: Any
) -> None:
    pool = cases.pool_of(cases.cpu(1024), cases.gpu(0, 4))
    with pytest.raises(PlanError, match="does not fit on cuda:0"):
        make_plan(grpo, big_request(cases), pool)


def test_free_memory_counts_and_not_what_the_device_has(grpo: Graph, cases: Any) -> None:
    busy = replace(cases.cpu(64), available_bytes=2 * GIB)
    with pytest.raises(PlanError, match=r"of 2\.0 GiB"):
        make_plan(grpo, big_request(cases), cases.pool_of(busy))


def test_an_engine_that_can_sleep_does_so_only_where_that_makes_it_fit(
    grpo: Graph, cases: Any
) -> None:
    sleeper = replace(cases.TORCH, sleep=True)
    sizes = {"micro_batch": 2, "num_slots": 512}

    def plan_on(gib: float, capabilities: Capabilities) -> Any:
        request = big_request(cases, capabilities=capabilities, **sizes)
        return make_plan(grpo, request, cases.pool_of(cases.cpu(gib)))

    awake = plan_on(64, sleeper)
    assert awake.residency == ()
    peaks = {entry.memory.phase: entry.memory.total for entry in awake.prediction.memory}
    assert peaks[Phase.UPDATE] > peaks[Phase.ROLLOUT]
    tight = (peaks[Phase.UPDATE] - GIB) / GIB
    with pytest.raises(PlanError):
        plan_on(tight, cases.TORCH)
    asleep = plan_on(tight, sleeper)
    assert [(s.what, s.action, s.before) for s in asleep.residency] == [
        ("kv cache", "take", "actor.generate"),
        ("kv cache", "release", "reference.logprobs"),
    ]
    names = {
        entry.memory.phase: {part.name for part in entry.memory.parts}
        for entry in asleep.prediction.memory
    }
    assert "kv cache" in names[Phase.ROLLOUT]
    assert "kv cache" not in names[Phase.UPDATE]


def test_a_role_that_nothing_plays_is_named(grpo: Graph, cases: Any) -> None:
    request = cases.request_for()
    request = replace(request, roles=request.roles[:2])
    with pytest.raises(PlanError) as caught:
        make_plan(grpo, request, cases.pool_of(cases.cpu()))
    assert caught.value.where == "roles.verifier"
    assert caught.value.found == "roles actor, reference"


def test_a_backend_that_cannot_do_its_role_s_work_is_named(grpo: Graph, cases: Any) -> None:
    capabilities = replace(cases.TORCH, services=frozenset({Service.GENERATE}))
    with pytest.raises(PlanError) as caught:
        make_plan(grpo, cases.request_for(capabilities=capabilities), cases.pool_of(cases.cpu()))
    assert "backend 'torch' cannot do logprobs (reference.logprobs)" in str(caught.value)


def test_a_dtype_that_the_backend_lacks_is_named(grpo: Graph, cases: Any) -> None:
    with pytest.raises(PlanError, match="no parameters of type float16"):
        make_plan(grpo, cases.request_for(dtype="float16"), cases.pool_of(cases.cpu()))


def test_a_type_that_its_backend_does_not_train_is_refused_where_a_role_is_updated(
    grpo: Graph, cases: Any
) -> None:
    half = replace(
        cases.TORCH,
        dtypes=frozenset({"float32", "float16"}),
        untrained_dtypes=frozenset({"float16"}),
    )
    asked = cases.request_for(capabilities=half, dtype="float16")
    with pytest.raises(PlanError, match="does not train parameters of type float16") as caught:
        check_trained_types(grpo, asked)
    assert caught.value.where == "roles.actor.dtype"
    assert caught.value.expected == "one of float32"
    # A reference computes logprobs alone.
    types = {"actor": "auto", "reference": "float16"}
    roles = tuple(replace(role, dtype=types.get(role.name, "auto")) for role in asked.roles)
    check_trained_types(grpo, replace(asked, roles=roles))


def test_no_device_of_a_supported_type_is_an_error(grpo: Graph, cases: Any) -> None:
    capabilities = replace(cases.TORCH, devices=frozenset({"npu"}))
    with pytest.raises(PlanError) as caught:
        make_plan(grpo, cases.request_for(capabilities=capabilities), cases.pool_of(cases.cpu()))
    assert "no device for actor, reference (backend torch)" in str(caught.value)
    assert caught.value.expected == "a device of type npu"


def test_a_policy_without_a_model_is_an_error(grpo: Graph, cases: Any) -> None:
    request = cases.request_for()
    roles = (replace(request.roles[0], shape=None), *request.roles[1:])
    with pytest.raises(PlanError, match="role 'actor' has no model"):
        make_plan(grpo, replace(request, roles=roles), cases.pool_of(cases.cpu()))


SHAPES = st.builds(
    ModelShape,
    family=st.just("llama"),
    vocab_size=st.integers(10, 200_000),
    hidden_size=st.integers(8, 4096),
    intermediate_size=st.integers(8, 16384),
    num_layers=st.integers(1, 48),
    num_heads=st.integers(1, 32),
    num_kv_heads=st.just(1),
    head_dim=st.integers(8, 128),
    tied=st.booleans(),
)


@settings(deadline=None)
@given(
    shape=SHAPES,
    micro_batch=st.integers(1, 64),
    num_slots=st.integers(1, 1024),
    budget=st.integers(1, 512),
    dtype=st.sampled_from(["float32", "bfloat16"]),
)
def test_what_the_hint_of_a_refusal_asks_for_always_fits(
    shape: ModelShape, micro_batch: int, num_slots: int, budget: int, dtype: str
) -> None:
    work = Workload(
        num_slots=num_slots,
        max_length=300,
        max_prompt_tokens=100,
        max_response_tokens=200,
        micro_batch=micro_batch,
        num_samples=1024,
        dtype=dtype,
        trainable=True,
    )
    tenant = Tenant(role="actor", shape=shape, work=work, phases=tuple(Phase))
    where = {"address": "cpu:0", "device_type": "cpu", "name": "CPU"}
    try:
        fit = fit_device((tenant,), **where, budget=budget * GIB)
    except PlanError as error:
        hint = error.hint or ""
        rows = re.search(r"micro_batch=(\d+)", hint)
        slots = re.search(r"num_slots=(\d+)", hint)
        if rows or slots:
            smaller = tenant.adjusted(
                int(rows[1]) if rows else micro_batch, int(slots[1]) if slots else num_slots
            )
            assert fit_device((smaller,), **where, budget=budget * GIB).peak.total <= budget * GIB
        else:
            with pytest.raises(PlanError):
                fit_device((tenant.adjusted(1, 1),), **where, budget=budget * GIB)
    else:
        assert fit.peak.total <= budget * GIB
