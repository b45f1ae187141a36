"""`environment`: a game or a tool that the user writes as a small class, one object an episode.

In the config:

    roles:
      game: {backend: environment, environment: "examples/guess.py:Guess", options: {size: 16}}

The file defines a class whose `reset` begins an episode and whose `step` answers a turn. Both may
be plain functions (run in threads) or coroutines:

    class Guess:
        def __init__(self, size=16): ...
        async def reset(self, row, seed):      # also: prompt, answer, sample
            self.hidden = int(row["number"])
            return ""                          # the text after the prompt
        async def step(self, text):            # also: turn, finish, tokens
            return Step("=", reward=1.0, done=True) if int(text) == self.hidden else Step("<")
"""

from flowrl.backend.environment import Observation
from flowrl_backends.environment.arithmetic import calculate
from flowrl_backends.environment.plugin import plugin
from flowrl_backends.environment.step import Step
from flowrl_backends.environment.tools import ToolEnvironment, ToolError

__all__ = ["Observation", "Step", "ToolEnvironment", "ToolError", "calculate", "plugin"]
