"""The ready-made workflows and the examples: their graphs."""

from __future__ import annotations

import json
import runpy
import tomllib
from collections import Counter
from itertools import combinations
from types import SimpleNamespace

import numpy as np
import pytest
import yaml

import flowrl as fl
from flowrl.algo.maps import MapBatch
from flowrl.errors import GraphError
from flowrl.graph import Op, format_graph
from flowrl.passes import Context, run_passes
from flowrl.plan.show.plan import plan_text
from flowrl.program.registry import load_workflow
from flowrl.specs import PolicyClip
from flowrl.testing import check_map
from flowrl.user_files import import_file
from flowrl.viz import render
from flowrl_graphs.async_grpo import async_grpo
from flowrl_graphs.cispo import cispo
from flowrl_graphs.co_training import co_training
from flowrl_graphs.comparisons import comparisons
from flowrl_graphs.dapo import dapo
from flowrl_graphs.dpo import dpo
from flowrl_graphs.dr_grpo import dr_grpo
from flowrl_graphs.generative_judge import generative_judge
from flowrl_graphs.grpo import grpo
from flowrl_graphs.gspo import gspo
from flowrl_graphs.luffy import luffy
from flowrl_graphs.multi_environment import multi_environment
from flowrl_graphs.multi_teacher_opd import multi_teacher_opd
from flowrl_graphs.opd import opd
from flowrl_graphs.pass_at_k import of_subsets, pass_at_k
from flowrl_graphs.ppo import ppo
from flowrl_graphs.ppo_rm import ppo_rm
from flowrl_graphs.ppo_value_updates import ppo_value_updates
from flowrl_graphs.prime import prime
from flowrl_graphs.process_reward import normalised, process_reward
from flowrl_graphs.raft import raft
from flowrl_graphs.reference_ema import reference_ema
from flowrl_graphs.reinforce_pp import reinforce_pp
from flowrl_graphs.remax import remax
from flowrl_graphs.reward_model import reward_model
from flowrl_graphs.rloo import rloo
from flowrl_graphs.self_refine import self_refine
from flowrl_graphs.sft import sft
from flowrl_graphs.spin import spin
from flowrl_graphs.tree_rollouts import tree_rollouts

STAGES = {
    dr_grpo: ["sft", "dr_grpo"],
    dapo: ["sft", "dapo"],
    rloo: ["sft", "rloo"],
    reinforce_pp: ["sft", "reinforce_pp"],
    remax: ["sft", "remax"],
    gspo: ["sft", "gspo"],
    cispo: ["sft", "cispo"],
    ppo: ["sft", "ppo"],
    ppo_rm: ["teach", "sft", "reward_model", "comparisons", "ppo_rm"],
    async_grpo: ["sft", "async_grpo"],
    opd: ["teach", "sft", "opd"],
    dpo: ["sft", "dpo"],
    raft: ["sft", "raft"],
    pass_at_k: ["sft", "pass_at_k"],
    self_refine: ["sft", "self_refine"],
    tree_rollouts: ["sft", "tree_rollouts"],
    co_training: ["sft", "co_training"],
    generative_judge: ["sft", "co_training", "generative_judge"],
    reference_ema: ["sft", "reference_ema"],
    ppo_value_updates: ["sft", "ppo_value_updates"],
    prime: ["sft", "prime"],
    process_reward: ["sft", "process_reward"],
    spin: ["sft", "spin"],
    luffy: ["sft", "luffy"],
    multi_teacher_opd: ["teach_plain", "teach_carry", "sft", "multi_teacher_opd"],
}
"""The programs with a config of their own and its stages; `sft` and `grpo` are the quickstart's."""


@pytest.mark.parametrize(
    ("name", "flow", "args"),
    [
        ("grpo", grpo, {}),
        ("grpo_kl", grpo, {"kl": 0.001, "drop_zero_variance": False, "group_size": 4}),
        ("sft", sft, {}),
        ("dr_grpo", dr_grpo, {}),
        ("dapo", dapo, {}),
        ("rloo", rloo, {}),
        ("reinforce_pp", reinforce_pp, {}),
        ("reinforce_pp_kl", reinforce_pp, {"kl": 0.01, "baseline": True}),
        ("gspo", gspo, {}),
        ("cispo", cispo, {}),
        ("remax", remax, {}),
        ("remax_kl", remax, {"kl": 0.01}),
        ("ppo", ppo, {}),
        ("ppo_kl", ppo, {"kl": 0.01}),
        ("ppo_rm", ppo_rm, {}),
        ("reward_model", reward_model, {}),
        ("comparisons", comparisons, {}),
        ("opd", opd, {}),
        ("dpo", dpo, {}),
        ("raft", raft, {}),
        ("pass_at_k", pass_at_k, {}),
        ("self_refine", self_refine, {}),
        ("tree_rollouts", tree_rollouts, {}),
        ("co_training", co_training, {}),
        ("generative_judge", generative_judge, {}),
        ("generative_judge_pairs", generative_judge, {"opponents": 2, "group_size": 4}),
        ("reference_ema", reference_ema, {}),
        ("reference_reset", reference_ema, {"decay": 0.0, "every": 200, "reset_optimizer": True}),
        ("ppo_value_updates", ppo_value_updates, {"value_updates": 2, "actor_every": 2}),
        ("prime", prime, {}),
        ("process_reward", process_reward, {}),
        (
            "process_reward_given",
            process_reward,
            {"learn": False, "outcome": False, "separator": ""},
        ),
        ("spin", spin, {}),
        ("luffy", luffy, {}),
        ("multi_teacher_opd", multi_teacher_opd, {}),
        ("multi_environment", multi_environment, {}),
    ],
)
def test_graphs_of_ready_made_workflows_are_as_they_were(golden, name, flow, args):
    traced = flow.trace(args)
    golden(f"{name}.traced.txt", format_graph(traced))
    golden(f"{name}.lowered.txt", format_graph(run_passes(traced, Context())))
    golden(f"{name}.traced.mmd", render(traced, "mermaid"))


@pytest.mark.parametrize("mini_batches", [1, 2])
def test_the_asynchronous_graph_is_as_it_was(golden, mini_batches):
    traced = async_grpo.trace()
    golden("async_grpo.traced.txt", format_graph(traced))
    golden("async_grpo.traced.mmd", render(traced, "mermaid"))
    context = Context(max_staleness=1, mini_batches=mini_batches)
    golden(f"async_grpo.{mini_batches}.lowered.txt", format_graph(run_passes(traced, context)))


def test_grpo_needs_a_reference_only_with_kl():
    assert grpo.trace().roles == ("actor", "verifier")
    assert grpo.trace({"kl": 0.1}).roles == ("actor", "verifier", "reference")


def test_every_ready_made_workflow_names_its_paper_and_is_registered(repository):
    with (repository / "pyproject.toml").open("rb") as file:
        registered = tomllib.load(file)["project"]["entry-points"]["flowrl.graphs"]
    files = sorted((repository / "graphs" / "flowrl_graphs").glob("[!_]*.py"))
    assert list(registered) == [path.stem for path in files]
    for path in files:
        assert registered[path.stem] == f"flowrl_graphs.{path.stem}:{path.stem}"
        module = import_file(path)
        assert "arXiv:" in module.__doc__
        assert load_workflow(str(path)).name == path.stem


@pytest.mark.parametrize("flow", STAGES, ids=lambda flow: flow.name)
def test_the_config_of_a_program_says_only_what_differs(repository, flow):
    path = repository / "configs" / f"{flow.name}.yaml"
    own = yaml.safe_load(path.read_text())
    assert own["extends"] == "quickstart.yaml"
    assert own["stages"] == STAGES[flow]
    compiled = fl.compile(None, path)
    assert [stage.name for stage in compiled.stages] == STAGES[flow]
    assert compiled.graph.name == flow.name
    assert compiled.config.name == flow.name
    without = yaml.safe_load((path.parent / "quickstart.yaml").read_text())
    for key, value in _leaves(own):
        assert dict(_leaves(without)).get(key) != value


def _leaves(tree, prefix=()):
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, (*prefix, key))
        else:
            yield (*prefix, key), value


def test_a_teacher_and_a_student_are_bound_to_the_roles_of_the_config(repository):
    compiled = fl.compile(None, repository / "configs" / "opd.yaml")
    assert [stage.graph.roles for stage in compiled.stages] == [
        ("teacher",),
        ("actor",),
        ("actor", "teacher"),
    ]


def test_samples_that_are_one_publication_old_compile_where_the_loss_corrects_for_it(repository):
    path = repository / "configs" / "async_grpo.yaml"
    compiled = fl.compile(None, path)
    assert compiled.stages[-1].config.train.max_staleness == 1
    update = compiled.graph.node("actor.update")
    assert update.attr("loss").corrects_behaviour
    assert update.attr("old_logprobs") == "forward"


def test_plain_policy_gradients_refuse_stale_samples():
    for flow in (rloo, remax):
        with pytest.raises(GraphError, match="reinforce"):
            run_passes(flow.trace(), Context(max_staleness=1))
    for flow in (dr_grpo, dapo, reinforce_pp, gspo, cispo, async_grpo, ppo, ppo_rm, opd, dpo):
        run_passes(flow.trace(), Context(max_staleness=1))


@pytest.mark.parametrize("flow", [rloo, remax], ids=lambda flow: flow.name)
def test_plain_policy_gradients_make_one_update_a_step(repository, flow):
    compiled = fl.compile(None, repository / "configs" / f"{flow.name}.yaml")
    assert compiled.stages[-1].config.train.mini_batches == 1


@pytest.mark.parametrize("flow", [remax, ppo, ppo_rm], ids=lambda flow: flow.name)
def test_a_penalty_in_the_reward_needs_a_reference_only_with_a_coefficient(flow):
    assert "reference" not in flow.trace({"kl": 0.0}).roles
    assert "reference" in flow.trace({"kl": 0.1}).roles


def test_the_policy_never_sees_the_scores_of_the_annotator():
    graph = ppo_rm.trace()
    (score,) = (node for node in graph.of_op(Op.SCORE) if node.role == "annotator")
    readers = {edge.dst for edge in graph.edges if edge.src == score.id}
    assert readers == {"select"}
    assert {edge.dst for edge in graph.edges if edge.src == "select"} == {"reward.update"}


@pytest.mark.parametrize("k", [1, 2, 4])
def test_an_advantage_of_pass_at_k_is_the_mean_over_all_sets_of_k_answers(k):
    scores = np.array([1, 0, 0, 0, 0, 1, 0, 1, 1, 1], np.float64)
    groups = np.repeat([3, 8], 5)
    batch = SimpleNamespace(scores=scores, groups=groups)
    found = of_subsets.__wrapped__(batch, k=k)
    for group in (3, 8):
        rows = np.flatnonzero(groups == group)
        sets = list(combinations(rows, k))
        rewards = np.array([scores[list(each)].max() for each in sets])
        deviation = rewards.std()
        for row in rows:
            own = [r for r, each in zip(rewards, sets, strict=True) if row in each]
            wanted = (np.mean(own) - rewards.mean()) / deviation if deviation else 0.0
            assert found[row] == pytest.approx(wanted, abs=1e-9)


def test_pass_at_k_of_more_answers_than_there_are_says_what_to_set():
    batch = SimpleNamespace(scores=np.ones(2), groups=np.zeros(2))
    with pytest.raises(ValueError, match=r"set train.group_size to 4 or more"):
        of_subsets.__wrapped__(batch, k=4)


def test_rewards_of_steps_are_normalised_over_all_steps_of_a_group():
    # Two answers to one prompt, of two steps and of one, and one to another; odds of 1, 3, 1/3.
    numbers = np.array([0, np.log(3), 0, 1e-9, 0, -np.log(3), 0, 2.0])
    batch = MapBatch(
        fields={"token_reward": numbers, "response_mask": np.array([0, 1, 1, 1, 0, 1, 0, 1], bool)},
        groups=np.array([5, 5, 7]),
        offsets=np.array([0, 4, 6, 8]),
        lengths=np.array([3, 1, 1]),
        truncated=np.zeros(3, bool),
    )
    # Chances of 3/4, 1/2 and 1/4: a deviation of 1/4. The other prompt has a single step.
    found = normalised.__wrapped__(batch)
    assert found.tolist() == pytest.approx([0, 1, 0, 0, 0, -1, 0, 0], abs=1e-4)
    check_map(normalised)


def test_a_process_reward_model_that_is_given_does_not_learn():
    graph = process_reward.trace({"learn": False, "outcome": False})
    assert graph.roles == ("actor", "prm")
    assert [node.id for node in graph.of_op(Op.UPDATE)] == ["actor.update"]


def test_reinforce_pp_needs_a_reference_only_with_kl():
    assert reinforce_pp.trace().roles == ("actor", "verifier")
    assert reinforce_pp.trace({"kl": 0.1}).roles == ("actor", "verifier", "reference")


def test_the_three_line_example_is_grpo_by_default(repository):
    flow = load_workflow(str(repository / "examples" / "three_lines.py"))
    graph = run_passes(flow.trace(), Context(group_size=5))
    assert [node.id for node in graph.nodes] == [
        "prompts",
        "actor.generate",
        "reward.score",
        "advantage",
        "actor.update",
        "actor.sync",
    ]
    assert graph.node("actor.generate").attr("n") == 5
    assert graph.node("actor.update").attr("loss") == PolicyClip()


def test_the_arithmetic_example_is_the_demo_recipe(repository):
    flow = load_workflow(str(repository / "examples" / "arithmetic_grpo.py"))
    graph = run_passes(flow.trace(), Context())
    assert flow.max_staleness == 0
    assert graph.node("actor.update").attr("loss") == PolicyClip(clip_low=0.2, clip_high=0.28)
    assert [node.id for node in graph.nodes] == [
        node.id for node in run_passes(grpo.trace(), Context()).nodes
    ]


def test_the_program_of_the_guide_runs_as_written():
    @fl.workflow
    def grpo(prompts: fl.Prompts, *, actor: fl.Policy, reference: fl.Policy, verifier: fl.Reward,
             group_size: int = 8, kl: float = 0.001):  # fmt: skip
        rollout = actor.generate(prompts, n=group_size)
        scores = verifier.score(rollout)
        ref = reference.logprobs(rollout)
        adv = fl.advantage.group_relative(scores, std="group")
        actor.update(rollout, advantages=adv, reference=ref, loss=fl.loss.policy_clip(0.2), kl=fl.kl.k3(kl))  # fmt: skip  # noqa: E501

    assert grpo.trace().roles == ("actor", "verifier", "reference")
    without = run_passes(grpo.trace({"kl": 0.0}), Context())
    assert without.roles == ("actor", "verifier")


@pytest.mark.parametrize("name", ["three_lines", "arithmetic_grpo"])
def test_the_examples_compile_as_they_are_run(monkeypatch, repository, name):
    compiled = []

    def compile_only(*args: object, **kwargs: object) -> None:
        compiled.append(fl.compile(*args, **kwargs))

    monkeypatch.chdir(repository)
    monkeypatch.setattr(fl, "run", compile_only, raising=False)
    runpy.run_path(str(repository / "examples" / f"{name}.py"), run_name="__main__")
    assert compiled[0].graph.name == name
    assert [stage.name for stage in compiled[0].stages] == ["sft", "grpo"]


def test_the_reward_of_the_arithmetic_example_is_exact_match(repository):
    module = import_file(repository / "examples" / "arithmetic_grpo.py")
    assert module.exact("23+45=", "068", "068", {}) == 1.0
    assert module.exact("23+45=", "68", "068", {}) == 0.0


def test_the_games_of_a_config_are_the_environments_of_its_rows(repository):
    workflow = str(repository / "graphs" / "flowrl_graphs" / "multi_environment.py")
    compiled = fl.compile(workflow, repository / "configs" / "multi_environment.yaml")
    assert compiled.graph.roles == ("large", "actor", "small")
    with (repository / "examples" / "games.jsonl").open() as file:
        named = Counter(json.loads(line)["environment"] for line in file)
    assert named == {"large": 128, "small": 128}
    plan = plan_text(compiled.plan)
    assert "where takes the rows that meet its condition" in plan
    # A prompt has one environment: 32 prompts of 16 episodes, whichever it is.
    assert "concat joins sets of samples: at most 512" in plan
