"""Handles as Python values, programs inside programs, weights that nothing uses are refused."""

from __future__ import annotations

import asyncio
import copy
import math
import pickle
import threading
from collections.abc import Callable
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

import flowrl as fl
from flowrl.compiler import lower
from flowrl.errors import ConfigError, TraceError
from flowrl.graph import Op
from tests.program.refusals import program, refusal_in

refusal = partial(refusal_in, "test_misuse.py")


@fl.workflow
def simple(prompts: fl.Prompts, actor: fl.Policy, judge: fl.Reward):
    rollout = actor.generate(prompts)
    actor.update(rollout, judge.score(rollout))


def _set_item(handle: Any) -> None:
    handle[0] = 1


def _del_item(handle: Any) -> None:
    del handle[0]


def _set_attribute(handle: Any) -> None:
    handle.best = 1


def _set_fields(handle: Any) -> None:
    handle.fields = ()


def _del_attribute(handle: Any) -> None:
    del handle.node


def _with(handle: Any) -> None:
    with handle:
        pass


def _await(handle: Any) -> None:
    async def wait() -> None:
        await handle

    asyncio.run(wait())


def _async_for(handle: Any) -> None:
    async def wait() -> None:
        async for _ in handle:
            pass

    asyncio.run(wait())


USES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "item is set": (_set_item, "cannot be used with [...] ="),
    "item is deleted": (_del_item, "cannot be used with del"),
    "attribute is set": (_set_attribute, "cannot be changed"),
    "fields are set": (_set_fields, "cannot be changed"),
    "attribute is deleted": (_del_attribute, "cannot be changed"),
    "call": (lambda handle: handle(), "cannot be used as a function"),
    "with": (_with, "cannot be used in `with`"),
    "await": (_await, "cannot be used with `await`"),
    "async for": (_async_for, "cannot be used in `async for`"),
    "next": (next, "cannot be used in a loop"),
    "reversed": (reversed, "cannot be used in a loop"),
    "divmod": (lambda handle: divmod(handle, 2), "cannot be used in arithmetic"),
    "divmod from the right": (lambda handle: divmod(2, handle), "cannot be used in arithmetic"),
    "shift": (lambda handle: handle << 1, "cannot be used in arithmetic"),
    "shift from the right": (lambda handle: 1 >> handle, "cannot be used in arithmetic"),
    "pow of three": (lambda handle: pow(handle, 2, 3), "cannot be used in arithmetic"),
    "floor": (math.floor, "cannot be used in arithmetic"),
    "ceil": (math.ceil, "cannot be used in arithmetic"),
    "trunc": (math.trunc, "cannot be used as a number"),
    "complex": (complex, "cannot be used as a number"),
    "pickle": (pickle.dumps, "cannot be used outside the process"),
    "numpy's mean": (np.mean, "has no 'mean' to take out"),
    "numpy's arithmetic": (lambda handle: np.ones(2) * handle, "cannot be used as an array"),
}


@pytest.mark.parametrize("use", USES)
def test_a_handle_used_as_a_value_is_refused_at_the_user_s_line(use):
    function, what = USES[use]
    error = refusal(lambda rollout, scores, *_: function(scores))
    assert what in error.what
    assert error.hint


def test_a_copy_of_a_handle_is_the_handle():
    def body(rollout, scores, *_):
        assert copy.copy(rollout) is rollout
        assert copy.deepcopy({"scores": scores})["scores"] is scores

    program(body).trace()


def test_what_a_library_probes_for_is_not_there():
    def body(rollout, *_):
        assert not hasattr(rollout, "_repr_html_")
        assert not hasattr(rollout, "__dataclass_fields__")

    program(body).trace()


def installed(tmp_path: Path, name: str, code: str) -> Any:
    """A module as an installed distribution has it."""
    file = tmp_path / "site-packages" / f"{name}.py"
    file.parent.mkdir()
    file.write_text(code)
    spec = spec_from_file_location(name, file)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_line_within_an_installed_library_is_no_line_of_the_user_s(tmp_path):
    library = installed(tmp_path, "sums", "def total(scores):\n    return scores + 1\n")
    error = refusal(lambda rollout, scores, *_: library.total(scores))
    assert "sums.py" not in error.where


def test_an_installed_program_has_lines_of_its_own(tmp_path):
    code = """
import flowrl as fl
@fl.workflow
def mine(prompts: fl.Prompts, actor: fl.Policy, judge: fl.Reward):
    rollout = actor.generate(prompts)
    actor.update(rollout, judge.score(rollout) + 1)
"""
    with pytest.raises(TraceError) as caught:
        installed(tmp_path, "programs", code).mine.trace()
    assert caught.value.where.endswith("programs.py:6")


# Roles.


@pytest.mark.parametrize(
    ("call", "expected", "hint"),
    [
        (lambda r, s, actor, other, judge: actor.score(r), "generate", "fl.Reward or fl.RewardM"),
        (lambda r, s, actor, other, judge: judge.update(r), "score", "annotate it judge: fl.Po"),
        (lambda r, s, actor, other, judge: actor.genrate(r), "generate", "did you mean 'generate'"),
    ],
)
def test_an_operation_that_a_role_does_not_have_is_told_with_those_who_do(call, expected, hint):
    error = refusal(call)
    assert "which has no '" in error.what
    assert expected in error.expected
    assert hint in error.hint


def test_an_environment_scores_nothing():
    @fl.workflow
    def mine(prompts: fl.Prompts, actor: fl.Policy, game: fl.Environment):
        rollout = actor.generate(prompts)
        actor.update(rollout, game.score(rollout))

    error = refusal(mine)
    assert "the role 'game' is an environment, which has no 'score'" in error.what
    assert error.expected == "fl.interact(actor, game, ...)"


def test_a_role_keeps_its_name():
    def body(rollout, scores, actor, *_):
        actor.name = "other"

    assert "no setter" in refusal(body).what


# What is returned together, and names of operations.


def test_things_returned_together_are_to_be_unpacked():
    def filtered(rollout, scores, actor, other, judge):
        actor.update(fl.filter.zero_variance(rollout, scores), scores)

    error = refusal(filtered)
    assert error.found == "the rollout of 'filter' and the scores of 'filter'"
    assert "unpack what is returned together" in error.hint


def test_operations_are_called_as_a_program_calls_them():
    for call, name in (
        (lambda rollout, *_: fl.filter.zero_variance(rollout), "fl.filter.zero_variance: missing"),
        (lambda rollout, *_: fl.select.top(rollout), "fl.select.top: missing"),
        (lambda *_: fl.log("x"), "fl.log: missing"),
        (lambda rollout, scores, *_: fl.advantage.gae(scores), "fl.advantage.gae: missing"),
        (lambda rollout, scores, *_: fl.shaping.repetition(scores), "fl.shaping.repetition: mis"),
        (lambda *_: fl.interact(), "fl.interact: missing"),
        (lambda rollout, scores, actor, *_: actor.generate(), "Policy.generate: missing"),
    ):
        assert refusal(call).what.startswith(name)


# Programs inside programs.


def test_a_workflow_that_traces_itself_calls_itself():
    @fl.workflow
    def mine(prompts: fl.Prompts, actor: fl.Policy):
        mine.trace()

    error = refusal(mine)
    assert error.what == "workflow 'mine' calls itself"
    assert error.found == "mine -> mine"


def test_two_workflows_of_one_name_may_call_each_other():
    inner = simple

    def made() -> fl.Workflow:
        @fl.workflow
        def simple(prompts: fl.Prompts, actor: fl.Policy, judge: fl.Reward):
            inner(prompts, actor, judge)

        return simple

    assert made().name == inner.name
    assert [node.id for node in made().trace().nodes] == [node.id for node in inner.trace().nodes]


def test_another_workflow_may_be_traced_inside_one():
    seen = []

    def body(*_):
        seen.append(simple.trace())

    graph = program(body).trace()
    assert seen[0] == simple.trace()
    assert "actor.update" in [node.id for node in graph.nodes]


def test_a_handle_of_the_trace_around_is_refused():
    def body(rollout, scores, actor, other, judge):
        @fl.workflow
        def inner(prompts: fl.Prompts, actor: fl.Policy, judge: fl.Reward):
            actor.update(rollout, scores)

        inner.trace()

    error = refusal(body)
    assert "made in workflow 'mine', which is being traced around it" in error.what


def test_a_handle_that_was_kept_is_told_with_its_workflow():
    kept = []
    program(lambda rollout, *_: kept.append(rollout)).trace()
    error = refusal(lambda rollout, scores, actor, other, judge: judge.score(kept[0]))
    assert "made in workflow 'mine', which has been traced already" in error.what


def test_another_thread_adds_nothing():
    def body(rollout, scores, actor, other, judge):
        raised = []

        def work() -> None:
            try:
                other.logprobs(rollout)
            except TraceError as error:
                raised.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        raise raised[0]

    assert "in another thread than the one that runs the workflow" in refusal(body).what


def test_an_async_generator_is_no_workflow():
    with pytest.raises(TraceError, match="must be a plain function"):

        @fl.workflow
        async def mine(prompts: fl.Prompts, actor: fl.Policy):
            yield 1


def test_settings_of_a_workflow_that_is_called_are_checked_as_those_of_a_config():
    @fl.workflow
    def inner(
        prompts: fl.Prompts,
        actor: fl.Policy,
        judge: fl.Reward,
        size: int = 2,
        std: Literal["group", "none"] = "group",
    ):
        simple(prompts, actor, judge)

    def outer(**settings: Any) -> fl.Workflow:
        @fl.workflow
        def mine(prompts: fl.Prompts, actor: fl.Policy, judge: fl.Reward):
            inner(prompts, actor, judge, **settings)

        return mine

    outer(size=3, std="none").trace()
    for settings, expected in (
        ({"size": "3"}, "int"),
        ({"std": "batch"}, "one of 'group', 'none'"),
    ):
        error = refusal(outer(**settings))
        assert "workflow 'inner' cannot take this as" in error.what
        assert error.expected == expected


def test_a_step_has_one_bound_on_the_age_of_its_samples():
    def nested(outer: int | None, inner: int | None) -> fl.Workflow:
        @fl.workflow(max_staleness=inner)
        def part(prompts: fl.Prompts, actor: fl.Policy, judge: fl.Reward):
            simple(prompts, actor, judge)

        @fl.workflow(max_staleness=outer)
        def whole(prompts: fl.Prompts, actor: fl.Policy, judge: fl.Reward):
            part(prompts, actor, judge)

        return whole

    for same in ((2, 2), (2, None), (None, None), (0, 0)):
        nested(*same).trace()
    error = refusal(nested(0, 3))
    assert "'part' is declared with max_staleness=3, and 'whole', which calls it, with 0" in (
        error.what
    )
    assert "which calls it, with None" in refusal(nested(None, 0)).what


# What nothing uses.


def test_episodes_that_nothing_uses_are_refused():
    @fl.workflow
    def mine(prompts: fl.Prompts, actor: fl.Policy, game: fl.Environment, judge: fl.Reward):
        fl.interact(actor, game, prompts)
        simple(prompts, actor, judge)

    assert refusal(mine).what == "nothing uses what game.interact makes"


def test_weights_that_nothing_uses_are_refused():
    @fl.workflow
    def mine(prompts: fl.Prompts, actor: fl.Policy, judge: fl.Reward, reference: fl.Policy):
        simple(prompts, actor, judge)
        reference.sync(actor, every=50)

    assert refusal(mine).what == "nothing uses the weights that reference takes over"


def test_a_reference_that_lowering_drops_takes_over_no_weights():
    def penalised(kl: float) -> fl.Workflow:
        @fl.workflow
        def mine(prompts: fl.Prompts, actor: fl.Policy, judge: fl.Reward, reference: fl.Policy):
            rollout = actor.generate(prompts)
            scores, ref = judge.score(rollout), reference.logprobs(rollout)
            actor.update(rollout, scores, reference=ref, kl=fl.kl.k3(kl))
            reference.sync(actor, every=50)

        return mine

    assert "reference.sync" in [node.id for node in lower(penalised(0.1)).of_op(Op.SYNC)]
    graph = lower(penalised(0.0))
    assert [node.id for node in graph.of_op(Op.SYNC)] == ["actor.sync"]
    assert graph.roles == ("actor", "judge")


def refreshing(body: Callable[..., Any]) -> fl.Workflow:
    @fl.workflow
    def mine(prompts: fl.Prompts, actor: fl.Policy, judge: fl.Reward, reference: fl.Policy):
        rollout = actor.generate(prompts)
        scores = judge.score(rollout)
        fl.log("reference", reference.logprobs(rollout))
        actor.update(rollout, scores)
        reference.sync(actor)
        body(rollout, scores, actor, reference)

    return mine


@pytest.mark.parametrize(
    ("body", "what"),
    [
        (
            lambda rollout, scores, actor, reference: reference.logprobs(rollout),
            "reference.logprobs.2 comes after reference.sync",
        ),
        (
            lambda rollout, scores, actor, reference: actor.update(rollout, scores),
            "actor.update.2 comes after reference.sync",
        ),
        (
            lambda rollout, scores, actor, reference: reference.sync(actor, every=2),
            "reference takes over weights twice in a step",
        ),
    ],
)
def test_a_sync_takes_the_weights_that_a_step_ends_with(body, what):
    refreshing(lambda *_: None).trace()
    assert what in refusal(refreshing(body)).what


def test_each_logged_number_has_a_name_of_its_own():
    def body(rollout, scores, *_):
        fl.log("reward", scores)
        fl.log("reward", scores)

    error = refusal(body)
    assert error.what == "'reward' is logged twice"
    assert "test_misuse.py" in error.found


# Parameters.


def test_a_literal_beside_a_type_names_one_more_value():
    @fl.workflow
    def mine(
        prompts: fl.Prompts, actor: fl.Policy, judge: fl.Reward, size: Literal["auto"] | int = 3
    ):
        rollout = actor.generate(prompts, n=None if size == "auto" else size)
        actor.update(rollout, judge.score(rollout))

    assert mine.trace().node("actor.generate").attr("n") == 3
    assert mine.trace({"size": 5}).node("actor.generate").attr("n") == 5
    assert mine.trace({"size": "auto"}).node("actor.generate").attr("n") is None
    for wrong in ("best", True, 2.5):
        with pytest.raises(ConfigError) as caught:
            mine.trace({"size": wrong})
        assert caught.value.expected == "int or 'auto'"


def test_a_choice_of_numbers_holds_no_truth_value():
    @fl.workflow
    def mine(prompts: fl.Prompts, actor: fl.Policy, judge: fl.Reward, size: Literal[1, 2] = 2):
        simple(prompts, actor, judge)

    with pytest.raises(ConfigError, match="cannot have this value"):
        mine.trace({"size": True})


def test_roles_and_data_have_no_defaults():
    with pytest.raises(TraceError, match=r"parameter 'reference' .* has a default") as caught:

        @fl.workflow
        def mine(prompts: fl.Prompts, actor: fl.Policy, reference: fl.Policy = None):
            pass

    assert "inside `if kl:`" in caught.value.hint


def test_annotations_that_have_no_meaning_are_told_with_what_was_meant():
    with pytest.raises(TraceError) as caught:

        @fl.workflow
        def optional(prompts: fl.Prompts, actor: fl.Policy, reference: fl.Policy | None):
            pass

    assert "fl.Policy" in caught.value.expected
    assert "inside `if kl:`" in caught.value.hint
    with pytest.raises(TraceError) as caught:

        @fl.workflow
        def many(prompts: fl.Prompts, actor: fl.Policy, judges: dict[str, fl.Reward]):
            pass

    assert "list[fl.Policy] for several" in caught.value.hint
    with pytest.raises(TraceError) as caught:

        @fl.workflow
        def of_handles(rollout: fl.Rollout, actor: fl.Policy):
            pass

    assert "neither a role, nor data" in caught.value.what
    with pytest.raises(TraceError) as caught:

        @fl.workflow
        def misspelt(prompts: fl.Prompts, actor: fl.Polcy):
            pass

    assert "did you mean 'Policy'?" in caught.value.found


@pytest.mark.parametrize("name", ["my actor", "", "a\nb"])
def test_a_role_s_name_has_no_blanks(name):
    with pytest.raises(ConfigError, match="cannot be the name of a role"):
        simple.bind({"actor": name})
