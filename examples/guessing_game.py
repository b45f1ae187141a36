"""A policy learns to play a guessing game: episodes of several turns, one guess a turn.

    flowrl graph examples/guessing_game.py        # what it does, as a picture
    flowrl run configs/guess.yaml                 # run it, a minute from a new model
    flowrl run configs/guess.yaml args.compare=turns

The environment is `Guess` of examples/guess.py: it hides a number and answers each guess with `<`,
`>` or `=`. A rollout is a whole episode; the loss counts the guesses alone, and not what the
environment said. What a guess is worth can be asked of two comparisons:

    episodes  GRPO: the episode's return against the other episodes of its hidden number
    turns     GiGPO: that, and each turn against the other turns that began with the same numbers
              left (Feng et al., 2025, arXiv:2505.10978, equation 8)
"""

from typing import Literal

import flowrl as fl


@fl.workflow
def guessing_game(
    prompts: fl.Prompts,
    *,
    actor: fl.Policy,
    game: fl.Environment,
    max_turns: int = 4,
    compare: Literal["episodes", "turns"] = "episodes",
    clip: float = 0.2,
):
    """GRPO on episodes, or group-in-group on turns."""
    rollout, scores = fl.interact(
        actor, game, prompts, max_turns=max_turns, max_observation_tokens=1
    )
    if compare == "episodes":
        advantages = fl.advantage.group_relative(scores, std="group")
    else:
        advantages = fl.advantage.group_in_group(scores, rollout)
    actor.update(rollout, advantages=advantages, loss=fl.loss.policy_clip(clip))


if __name__ == "__main__":
    fl.run(guessing_game, "configs/guess.yaml")
