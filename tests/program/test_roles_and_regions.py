"""Critics, reward models, environments, pairs and periodic syncs in programs."""

from __future__ import annotations

from dataclasses import replace

import pytest

import flowrl as fl
from flowrl.errors import ConfigError, FlowError, GraphError, TraceError
from flowrl.graph import Op, format_graph, graph_from_json, graph_to_json, sample_sets, verify
from flowrl.graph.sample_sets import sampling_node
from flowrl.passes import Context, run_passes
from flowrl.specs.filters import Turns
from tests.graph_text import parse


@fl.workflow
def ppo(
    prompts: fl.Prompts,
    *,
    actor: fl.Policy,
    critic: fl.Critic,
    verifier: fl.Reward,
    reference: fl.Policy,
) -> None:
    rollout = actor.generate(prompts)
    scores = verifier.score(rollout)
    values = critic.values(rollout)
    advantages, returns = fl.advantage.gae(
        scores, values, rollout, reference=reference.logprobs(rollout), kl=0.01
    )
    fl.log("advantage", advantages)
    critic.update(rollout, returns=returns, values=values)
    actor.update(rollout, advantages=advantages)
    reference.sync(actor, every=50)


@fl.workflow
def game(prompts: fl.Prompts, *, actor: fl.Policy, world: fl.Environment) -> None:
    rollout, returns = fl.interact(actor, world, prompts, n=4, max_turns=3, max_tokens=8)
    advantages = fl.advantage.group_in_group(returns, rollout)
    actor.update(rollout, advantages=advantages)


@fl.workflow
def learn_to_score(pairs: fl.Pairs, *, judge: fl.RewardModel) -> None:
    judge.update(pairs)


def refusal(function) -> FlowError:
    with pytest.raises(FlowError) as caught:
        fl.workflow(function).trace()
    return caught.value


@pytest.mark.parametrize("program", [ppo, game, learn_to_score])
def test_text_and_json_of_a_graph_lose_nothing(program):
    graph = program.trace()
    assert format_graph(parse(format_graph(graph))) == format_graph(graph)
    assert graph_from_json(graph_to_json(graph)) == graph


def test_a_critic_values_before_it_learns_and_gets_its_targets_from_the_advantage():
    graph = ppo.trace()
    update = graph.node("critic.update")
    assert graph.feeding("critic.update", "returns").src == "advantage"
    assert graph.feeding("critic.update", "values").src == "critic.values"
    assert str(update.attr("loss")).startswith("value_clip(clip=0.2")
    assert [f.name for f in graph.node("advantage").outputs] == ["advantage", "returns"]


def test_a_critic_without_old_values_is_not_clipped():
    @fl.workflow
    def plain(prompts: fl.Prompts, actor: fl.Policy, critic: fl.Critic, verifier: fl.Reward):
        rollout = actor.generate(prompts)
        values = critic.values(rollout)
        advantages, returns = fl.advantage.gae(verifier.score(rollout), values, rollout)
        critic.update(rollout, returns=returns)
        actor.update(rollout, advantages=advantages)

    assert str(plain.trace().node("critic.update").attr("loss")).startswith("value_clip(clip=null")


def test_values_after_the_update_are_refused():
    def late(prompts: fl.Prompts, actor: fl.Policy, critic: fl.Critic, verifier: fl.Reward):
        rollout = actor.generate(prompts)
        values = critic.values(rollout)
        advantages, returns = fl.advantage.gae(verifier.score(rollout), values, rollout)
        critic.update(rollout, returns=returns)
        fl.log("values", critic.values(rollout))
        actor.update(rollout, advantages=advantages)

    assert "critic.values.2 comes after critic.update" in str(refusal(late))


def test_an_episode_is_a_region_of_two_roles_with_a_cycle():
    graph = game.trace()
    episodes, turns = graph.node("world.interact"), graph.node("actor.generate")
    assert episodes.region == turns.region == "interact"
    assert graph.feeding(turns.id, "observation").src == episodes.id
    assert graph.feeding(episodes.id, "turns").src == turns.id
    assert (turns.attr("n"), turns.attr("max_tokens")) == (4, 8)
    assert sample_sets(graph)["actor.update"] == "world.interact"


def test_a_cycle_outside_a_region_is_refused():
    graph = game.trace()
    nodes = [replace(node, region=None) for node in graph.nodes]
    with pytest.raises(GraphError, match="has a cycle"):
        verify(graph.with_nodes(nodes))


def test_two_regions_have_names_of_their_own():
    @fl.workflow
    def two(prompts: fl.Prompts, actor: fl.Policy, left: fl.Environment, right: fl.Environment):
        for world in (left, right):
            rollout, returns = fl.interact(actor, world, prompts)
            fl.log(f"returns/{world.name}", returns)
        actor.update(rollout, advantages=fl.advantage.group_relative(returns))

    graph = two.trace()
    assert [node.region for node in graph.of_op(Op.INTERACT)] == ["interact", "interact.2"]


def test_turns_are_asked_of_an_interaction_alone():
    def single(prompts: fl.Prompts, actor: fl.Policy, verifier: fl.Reward):
        rollout = actor.generate(prompts)
        advantages = fl.advantage.group_in_group(verifier.score(rollout), rollout)
        actor.update(rollout, advantages=advantages)

    error = refusal(single)
    assert "advantage group_in_group needs 'turn' per token" in str(error)
    assert error.hint == "pass the rollout that fl.interact returned"


def test_a_reward_model_learns_from_pairs_and_scores_rollouts():
    @fl.workflow
    def both(prompts: fl.Prompts, pairs: fl.Pairs, actor: fl.Policy, judge: fl.RewardModel):
        rollout = actor.generate(prompts)
        scores = judge.score(rollout)
        judge.update(pairs)
        actor.update(rollout, scores)

    graph = both.trace()
    assert graph.node("judge.score").attr("by") == "model"
    assert str(graph.node("judge.update").attr("loss")).startswith("bradley_terry(")


def test_pairs_need_a_loss_that_says_how():
    def silent(pairs: fl.Pairs, actor: fl.Policy):
        actor.update(pairs)

    assert "learns from pairs, and no loss says how" in str(refusal(silent))


def test_a_loss_of_pairs_refuses_a_rollout():
    def wrong(prompts: fl.Prompts, actor: fl.Policy, reference: fl.Policy):
        rollout = actor.generate(prompts)
        actor.update(rollout, reference=reference.logprobs(rollout), loss=fl.loss.dpo(0.1))

    error = refusal(wrong)
    assert "needs 'preferred' per sample" in str(error)
    assert "fl.select.best_and_worst" in error.hint


def test_a_refresh_of_what_nothing_updated_is_refused():
    def early(prompts: fl.Prompts, actor: fl.Policy, reference: fl.Policy, verifier: fl.Reward):
        reference.sync(actor, every=2)
        rollout = actor.generate(prompts)
        actor.update(rollout, verifier.score(rollout))

    error = refusal(early)
    assert isinstance(error, TraceError)
    assert "which nothing has updated yet" in str(error)


def test_a_refresh_counts_steps():
    def never(prompts: fl.Prompts, actor: fl.Policy, reference: fl.Policy, verifier: fl.Reward):
        rollout = actor.generate(prompts)
        actor.update(rollout, verifier.score(rollout))
        reference.sync(actor, every=0)

    assert "a whole number from 1 up" in str(refusal(never))


def test_a_baseline_has_one_sample_a_prompt():
    def with_baseline(n: int):
        @fl.workflow
        def program(prompts: fl.Prompts, actor: fl.Policy, verifier: fl.Reward):
            rollout = actor.generate(prompts)
            greedy = verifier.score(actor.generate(prompts, n=n, temperature=0))
            advantages = fl.advantage.remax(verifier.score(rollout), rollout, baseline=greedy)
            actor.update(rollout, advantages=advantages)

        return program

    assert with_baseline(1).trace().feeding("advantage", "baseline").src == "verifier.score"
    with pytest.raises(GraphError, match=r"one baseline a prompt, but 'verifier\.score' has 2"):
        with_baseline(2).trace()


def test_roles_are_told_apart_at_the_call():
    def swapped(prompts: fl.Prompts, actor: fl.Policy, world: fl.Environment):
        rollout, returns = fl.interact(world, actor, prompts)
        actor.update(rollout, returns)

    error = refusal(swapped)
    assert "fl.interact cannot take this 'policy'" in str(error)
    assert error.expected.startswith("a policy, a role of the workflow")


@pytest.mark.parametrize(
    ("players", "argument", "found", "said"),
    [
        (lambda red, blue, game, _: ({"me": red}, game), "policy", "{'me': <fl", "(pro, con)"),
        (
            lambda red, blue, game, _: ((red, game), game),
            "policy",
            "tuple of the role 'red', the role 'game'",
            "(pro, con)",
        ),
        (lambda red, blue, game, _: ([], game), "policy", "[]", "(pro, con)"),
        (lambda red, blue, game, _: (red, blue), "environment", "the role 'blue'", "(pro, con)"),
        (
            lambda red, blue, game, _: (red, (game, blue)),
            "environment",
            "tuple of the role 'game'",
            "(pro, con)",
        ),
        (
            lambda red, blue, game, judge: (red, judge),
            "environment",
            "the role 'judge'",
            "(pro, con)",
        ),
    ],
)
def test_two_models_that_act_in_one_episode_are_told_where_the_other_one_goes(
    players, argument, found, said
):
    def duel(
        prompts: fl.Prompts,
        red: fl.Policy,
        blue: fl.Policy,
        game: fl.Environment,
        judge: fl.RewardModel,
    ):
        rollout, returns = fl.interact(*players(red, blue, game, judge), prompts)
        red.update(rollout, returns)

    error = refusal(duel)
    assert f"fl.interact cannot take this '{argument}'" in str(error)
    assert str(error.found).startswith(found)
    assert said in f"{error.expected}; {error.hint}"


def debated(*, max_turns: int = 4) -> fl.Workflow:
    @fl.workflow
    def debate(prompts: fl.Prompts, red: fl.Policy, blue: fl.Policy, game: fl.Environment):
        (mine, my_scores), _ = fl.interact((red, blue), game, prompts, max_turns=max_turns)
        red.update(mine, my_scores)

    return debate


def test_policies_that_take_turns_each_have_their_turns_and_scores():
    graph = debated().trace()
    assert [edge.src for edge in graph.in_edges("game.interact")] == [
        "prompts",
        "red.generate",
        "blue.generate",
    ]
    assert parse(format_graph(graph)) == parse(format_graph(parse(format_graph(graph))))
    assert graph_from_json(graph_to_json(graph)) == graph
    lowered = run_passes(graph, Context())
    # Nothing learns from the turns of the other one, and it still generates them.
    assert [node.id for node in lowered.of_op(Op.SELECT)] == ["turns"]
    assert lowered.node("blue.generate").region == lowered.node("game.interact").region
    assert sampling_node(lowered, lowered.node("red.update")).role == "red"


def test_an_episode_has_a_turn_for_each_policy():
    error = refusal(debated(max_turns=1).function)
    assert error.what.startswith("fl.interact cannot take this 'max_turns'")
    assert error.expected == "at least 2, a turn of each policy"


def test_the_turns_of_several_policies_are_no_rollout_of_one():
    graph = debated().trace()
    update = graph.node("red.update")
    whole = replace(
        graph,
        edges=[
            replace(edge, src="game.interact") if edge.dst == update.id else edge
            for edge in graph.edges
        ],
    )
    with pytest.raises(GraphError, match="reads the turns of several policies at once"):
        verify(whole)
    other = graph.node("turns").with_attrs(spec=Turns(policy=2, of=3))
    with pytest.raises(GraphError, match=r"takes turn 2 of 3 policies of 'game\.interact'"):
        verify(graph.replacing(other))


def test_policies_of_an_episode_have_as_many_of_them():
    graph = debated().trace()
    with pytest.raises(GraphError, match="act in the same episodes"):
        verify(graph.replacing(graph.node("blue.generate").with_attrs(n=3)))


def test_a_region_that_reads_the_turns_of_one_of_its_policies_alone_is_no_graph():
    graph = game.trace()
    other = replace(graph.node("actor.generate"), id="actor.generate.2")
    edges = [replace(edge, dst=other.id) for edge in graph.in_edges("actor.generate")]
    doubled = replace(graph, nodes=(*graph.nodes, other), edges=(*graph.edges, *edges))
    with pytest.raises(GraphError, match="needs the turns of each policy that is in its region"):
        verify(doubled)


def test_a_grammar_is_part_of_the_rollout():
    @fl.workflow
    def held(prompts: fl.Prompts, actor: fl.Policy, verifier: fl.Reward):
        rollout = actor.generate(prompts, grammar=fl.grammar.regex("[0-9]+"))
        actor.update(rollout, verifier.score(rollout))

    text = format_graph(held.trace())
    assert 'attr grammar = grammar:regex(pattern="[0-9]+")' in text
    assert parse(text) == parse(format_graph(parse(text)))


def test_only_numbers_are_logged():
    def tokens(prompts: fl.Prompts, actor: fl.Policy, verifier: fl.Reward):
        fl.log("prompts", prompts)

    assert "something with a field of numbers" in str(refusal(tokens))


def test_a_workflow_is_bound_to_other_roles():
    graph = learn_to_score.bind({"judge": "style"}).trace()
    assert [node.id for node in graph.nodes] == ["pairs", "style.update"]
    assert graph.roles == ("style",)
    assert learn_to_score.trace().roles == ("judge",)


def test_a_binding_of_unknown_or_equal_roles_is_refused():
    with pytest.raises(ConfigError, match="has no role 'jugde'") as caught:
        learn_to_score.bind({"jugde": "style"})
    assert caught.value.hint == "did you mean 'judge'?"
    with pytest.raises(ConfigError, match="one role fills two") as caught:
        ppo.bind({"reference": "actor"})
    assert caught.value.where == "bind.reference"
