"""Episodes in which the policy may call tools, and ends with an answer.

A turn that holds a call `<NAME>ARGUMENT</NAME>` is answered with what the tool of that name says of
the argument; the first call of a turn counts. A turn without a call is the answer: it is graded,
and the episode is over. The policy hands over by its stop token, as after any turn.

    prompt      What is 47*38, and 5 more?
    turn 0      <calc>47*38+5</calc>
    tool        1791
    turn 1      1791                        graded, done

A class of one's own says which tools there are and how an answer is graded:

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

Tools are plain functions from text to text; `step` runs in a thread, so they may take their time.
A policy's mistake is answered: a tool raises `ToolError`, and the policy reads what is wrong.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from flowrl_backends.environment.step import Step

__all__ = ["ToolEnvironment", "ToolError"]


class ToolError(Exception):
    """A tool cannot do anything with its argument; the policy is told why."""


class ToolEnvironment:
    """One episode with tools; see the module.

    Args:
        tools: By the name that calls have. Plain words of letters, digits and `_`.
        reply: What the policy reads; `{}` is what the tool said. With a chat model, the place for
            the marks of a new turn.
        error: What stands for the result where a tool raised a `ToolError`; `{}` is its message.

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
        """Begins an episode; the prompt says it all."""
        self.row = row
        return ""

    def step(self, text: str) -> Step:
        """Answers a call, or grades an answer."""
        call = self._call.search(text)
        if call is None:
            return Step(reward=self.grade(text), done=True, metrics={"calls": 0.0})
        name, argument = call.groups()
        try:
            said = self._tools[name](argument)
        except ToolError as mistake:
            said = self._error.replace("{}", str(mistake))
        return Step(self._reply.replace("{}", said), metrics={"calls": 1.0})

    def grade(self, answer: str) -> float:
        """The reward of the policy's answer, a turn without a call; `row` is the task's."""
        raise NotImplementedError(f"{type(self).__name__} says not how answers are graded")
