"""Episodes in which the policy may call tools before it answers.

A turn with a call `<NAME>ARGUMENT</NAME>` gets the tool's result for the argument; the first call
of a turn counts. A turn without a call is the answer: it is graded, and the episode is over. The
policy ends a call with its stop token, as any turn.

    prompt      What is 47*38, and 5 more?
    turn 0      <calc>47*38+5</calc>
    tool        1791
    turn 1      1791                        graded, done

A subclass defines the tools and the grading of answers:

>>> class Shout(ToolEnvironment):
...     def __init__(self) -> None:
...         super().__init__({"upper": str.upper})
...
...     def grade(self, answer: str) -> float:
...         return float(answer == self.row["answer"])
>>> episode = Shout()
>>> episode.reset({"answer": "HEY"}, 0)
''
>>> episode.step("<upper>hey</upper>").observation
'HEY'
>>> episode.step("HEY")
Step(observation='', reward=1.0, done=True, state=None, metrics={'calls': 0.0})

Tools are plain functions from text to text; `step` runs in a thread, so they may be slow. For a
mistake of the policy, a tool raises `ToolError`, and the policy gets its message.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from flowrl_backends.environment.step import Step


class ToolError(Exception):
    """A tool cannot use its argument; the policy gets the message."""


class ToolEnvironment:
    """One episode with tools; see the module.

    Args:
        tools: The tools by the names in calls, which consist of letters, digits and `_`.
        reply: The template of the observation; `{}` is the tool's result. For a chat model, it
            contains the marks of a new turn.
        error: The template of the result after a `ToolError`; `{}` is its message.

    Attributes:
        row: The data row of the episode.
    """

    def __init__(
        self,
        tools: Mapping[str, Callable[[str], str]],
        *,
        reply: str = "{}",
        error: str = "error: {}",
    ) -> None:
        if not tools or not all(re.fullmatch(r"\w+", name, re.ASCII) for name in tools):
            raise ValueError(f"tools need names of letters, digits and _, not {sorted(tools)}")
        self._tools = dict(tools)
        self._reply = reply
        self._error = error
        names = "|".join(map(re.escape, tools))
        self._call = re.compile(rf"<({names})>(.*?)</\1>", re.DOTALL)
        self.row: Mapping[str, object] = {}

    def reset(self, row: Mapping[str, object], seed: int) -> str:
        """Begins an episode without an observation besides the prompt."""
        self.row = row
        return ""

    def step(self, text: str) -> Step:
        """Answers a call, or grades an answer."""
        call = self._call.search(text)
        if call is None:
            return Step(reward=self.grade(text), done=True, metrics={"calls": 0.0})
        name, argument = call.groups()
        try:
            result = self._tools[name](argument)
        except ToolError as mistake:
            result = self._error.replace("{}", str(mistake))
        return Step(self._reply.replace("{}", result), metrics={"calls": 1.0})

    def grade(self, answer: str) -> float:
        """Returns the reward of the policy's answer, a turn without a call; `row` is the task's."""
        raise NotImplementedError(f"{type(self).__name__} does not define grade(answer)")
