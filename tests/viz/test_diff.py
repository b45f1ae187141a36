"""What a difference between two graphs shows, and where."""

from __future__ import annotations

from dataclasses import replace

from flowrl.graph import Graph, Level
from flowrl.viz import render_diff
from tests.graph_text import parse

BASE = """graph one traced

prompts = source
  attr data = "prompts"
  out prompt: int64/prompts

actor.generate = generate by actor
  in prompts = prompts{prompt}
  attr n = 8
  attr sampling = null
  out tokens: int64/tokens
  out response_mask: bool/tokens
  out rollout_logprobs: float32/tokens

reward.score = score by reward
  in rollout = actor.generate{tokens, response_mask}
  out score: float32/samples

reference.logprobs = logprobs by reference
  in rollout = actor.generate{tokens, response_mask}
  out logprobs: float32/tokens

actor.update = update by actor
  in rollout = actor.generate{tokens, response_mask, rollout_logprobs}
  in rewards = reward.score{score}
  in reference = reference.logprobs{logprobs}
  attr loss = null
  attr kl = kl:kl(estimator="k3", coefficient=0.1)
  out weights: model/roles
"""


def without_the_reference() -> Graph:
    blocks = BASE.replace("  in reference = reference.logprobs{logprobs}\n", "").split("\n\n")
    text = "\n\n".join(block for block in blocks if not block.startswith("reference"))
    return parse(text.replace('kl:kl(estimator="k3", coefficient=0.1)', "null"))


def test_graphs_that_say_the_same_have_no_difference() -> None:
    assert render_diff(parse(BASE), parse(BASE)) == "one (traced) -> one (traced): no difference\n"


def test_a_removed_node_is_shown_as_a_whole_and_a_changed_one_by_its_lines() -> None:
    assert render_diff(parse(BASE), without_the_reference()) == (
        """one (traced) -> one (traced): 1 removed, 1 changed

- reference.logprobs = logprobs by reference
-   in rollout = actor.generate{tokens, response_mask}
-   out logprobs: float32/tokens

actor.update
  - in reference = reference.logprobs{logprobs}
  - attr kl = kl:kl(estimator="k3", coefficient=0.1)
  + attr kl = null
"""
    )


def test_the_other_way_round_it_is_added_at_its_place() -> None:
    lines = render_diff(without_the_reference(), parse(BASE)).splitlines()
    assert lines[0] == "one (traced) -> one (traced): 1 added, 1 changed"
    assert lines[2] == "+ reference.logprobs = logprobs by reference"
    assert "  + in reference = reference.logprobs{logprobs}" in lines


def test_names_levels_and_the_order_of_nodes_are_told() -> None:
    graph = parse(BASE)
    nodes = list(graph.nodes)
    nodes[2], nodes[3] = nodes[3], nodes[2]
    other = replace(graph, name="two", level=Level.LOWERED, nodes=tuple(nodes))
    assert render_diff(graph, other) == (
        "one (traced) -> two (lowered): the same nodes in another order\n\n"
        "order of nodes\n"
        "  - prompts, actor.generate, reward.score, reference.logprobs, actor.update\n"
        "  + prompts, actor.generate, reference.logprobs, reward.score, actor.update\n"
    )


def test_a_node_that_another_role_performs_is_changed() -> None:
    graph = parse(BASE)
    other = parse(BASE.replace("score by reward", "score by judge"))
    lines = render_diff(graph, other).splitlines()
    assert lines[2:] == [
        "reward.score",
        "  - reward.score = score by reward",
        "  + reward.score = score by judge",
    ]
