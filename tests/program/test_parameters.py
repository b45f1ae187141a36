"""The parameters of a workflow, and what a config gives them."""

from __future__ import annotations

import pytest

import flowrl as fl
from flowrl.errors import ConfigError, TraceError

HERE = "test_parameters.py"


@fl.workflow
def options(
    examples: fl.Examples,
    actor: fl.Policy,
    lr: float = 1.0,
    size: int | None = None,
    flag: bool = False,
    name: str = "x",
):
    actor.update(examples)


@pytest.mark.parametrize(
    ("args", "where", "text"),
    [
        ({"sise": 1}, "args.sise", "did you mean 'size'?"),
        ({"zzz": 1}, "args.zzz", "one of lr, size, flag, name"),
        ({"zzz": None}, "args.zzz", "remove args.zzz; args=null removes all arguments that a file"),
        ({"lr": "fast"}, "args.lr", "found: 'fast' (str); expected: float"),
        ({"size": 1.5}, "args.size", "expected: int or null"),
        ({"size": True}, "args.size", "True (bool)"),
        ({"flag": 1}, "args.flag", "expected: bool"),
        ({"lr": None}, "args.lr", "None (NoneType)"),
    ],
)
def test_arguments_of_the_config_are_checked(args, where, text):
    with pytest.raises(ConfigError) as caught:
        options.trace(args)
    assert caught.value.where == where
    assert text in str(caught.value)


def test_a_whole_number_will_do_where_a_float_is_wanted():
    seen = []

    @fl.workflow
    def mine(examples: fl.Examples, actor: fl.Policy, lr: float = 1.0):
        seen.append(lr)
        actor.update(examples)

    mine.trace({"lr": 2})
    assert seen == [2.0]
    assert type(seen[0]) is float


def test_a_required_argument_and_a_choice_are_checked():
    from typing import Literal

    @fl.workflow
    def mine(examples: fl.Examples, actor: fl.Policy, *, std: Literal["group", "none"]):
        actor.update(examples)

    with pytest.raises(ConfigError, match="needs a value for 'std'"):
        mine.trace()
    with pytest.raises(ConfigError) as caught:
        mine.trace({"std": "grup"})
    assert "did you mean 'group'?" in str(caught.value)
    assert mine.trace({"std": "none"})


# Signatures.


def test_parameters_that_a_workflow_cannot_have_are_refused_at_their_line():
    def bare(actor): ...

    def odd(actor: fl.Policy, table: dict[str, int]): ...

    def unknown(actor: Nowhere): ...  # noqa: F821

    def many(*actors: fl.Policy): ...

    def slash(actor: fl.Policy, /): ...

    def default(actor: fl.Policy, size: int = None): ...  # noqa: RUF013

    async def later(actor: fl.Policy): ...

    def steps(actor: fl.Policy):
        yield

    def nobody(prompts: fl.Prompts): ...

    for function, text in (
        (bare, "parameter 'actor' of workflow 'bare' has no annotation"),
        (odd, "neither a role, nor data, nor a plain setting"),
        (unknown, "name 'Nowhere' is not defined"),
        (many, "has no name to give"),
        (slash, "has no name to give"),
        (default, "does not fit its annotation"),
        (later, "must be a plain function"),
        (steps, "must be a plain function"),
        (nobody, "has no role that learns"),
    ):
        with pytest.raises(TraceError) as caught:
            fl.workflow(function)
        assert text in str(caught.value)
        assert caught.value.where.endswith(f"{HERE}:{function.__code__.co_firstlineno}")


def test_max_staleness_must_count_publications():
    with pytest.raises(TraceError, match="must count weight publications"):

        @fl.workflow(max_staleness=-1)
        def mine(actor: fl.Policy): ...


def test_only_functions_are_workflows():
    with pytest.raises(TraceError, match="marks functions"):
        fl.workflow(3)  # type: ignore[call-overload]


# Lists of roles.


@fl.workflow
def taught(prompts: fl.Prompts, *, student: fl.Policy, teachers: list[fl.Policy]):
    rollout = student.generate(prompts)
    parts = [fl.where(rollout, row="teacher", equals=teacher.name) for teacher in teachers]
    judged = [
        (part, fl.advantage.distill(part, teacher=teacher.logprobs(part)))
        for part, teacher in zip(parts, teachers, strict=True)
    ]
    rollout, advantages = fl.concat(*judged)
    student.update(rollout, advantages=advantages, loss=fl.loss.policy_clip(0.2))


def test_a_list_of_roles_has_the_roles_that_the_config_binds():
    assert taught.trace().roles == ("student", "teachers_1", "teachers_2")
    bound = taught.bind({"teachers": ["maths", "code", "chess"], "student": "actor"})
    graph = bound.trace()
    assert graph.roles == ("actor", "maths", "code", "chess")
    assert [str(node.attr("spec")) for node in graph.nodes if node.op == "where"] == [
        f'row(field="teacher", values="[\\"{name}\\"]")' for name in ("maths", "code", "chess")
    ]
    assert [role.parameter for role in bound.roles] == ["student", *["teachers"] * 3]


@pytest.mark.parametrize(
    ("names", "where", "text"),
    [
        ({"teachers": "maths"}, "bind.teachers", "write teachers: [maths]"),
        ({"teachers": []}, "bind.teachers", "is a list of roles"),
        ({"student": ["maths"]}, "bind.student", "write student: NAME"),
        ({"teachers": ["maths", "maths"]}, "bind.teachers", "one role fills two"),
        ({"teachers": ["student"]}, "bind.teachers", "student for student and teachers"),
        ({"teachers": ["a b"]}, "bind.teachers", "a key of roles, without blanks"),
    ],
)
def test_a_list_of_roles_is_bound_to_different_roles(names, where, text):
    with pytest.raises(ConfigError) as caught:
        taught.bind(names)
    assert caught.value.where == where
    assert text in str(caught.value)


def test_a_workflow_passes_a_list_of_roles_on():
    @fl.workflow
    def outer(prompts: fl.Prompts, *, actor: fl.Policy, masters: list[fl.Policy]):
        taught(prompts, student=actor, teachers=masters)

    graph = outer.bind({"masters": ["maths", "code"]}).trace()
    assert graph.roles == ("actor", "maths", "code")

    @fl.workflow
    def wrong(prompts: fl.Prompts, *, actor: fl.Policy, master: fl.Policy):
        taught(prompts, student=actor, teachers=master)

    with pytest.raises(TraceError, match="cannot take this as 'teachers'"):
        wrong.trace()
