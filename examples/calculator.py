"""A policy with a calculator: it may call the tool, and ends with an answer.

    prompt  What is 47*38?
    turn 0  <calc>47*38</calc>      the tool says: 1786
    turn 1  1786                    right: reward 1

    roles:
      tool:
        backend: environment
        environment: "examples/calculator.py:Calculator"
        options: {reply: "\\n{}\\n"}
    data: {train: ROWS.jsonl}         # with `prompt` and `answer`

A chat model needs the marks of its turns around a reply: `options.reply` has them, with `{}` where
the result belongs.
"""

from flowrl_backends.environment import ToolEnvironment, ToolError, calculate


class Calculator(ToolEnvironment):
    """One episode; `call_costs` is what each call takes off the reward."""

    def __init__(self, reply="{}", call_costs=0.0):
        super().__init__({"calc": self.calculated}, reply=reply)
        self.call_costs = call_costs
        self.num_calls = 0

    def calculated(self, text):
        self.num_calls += 1
        return calculate(text)

    def grade(self, answer):
        # Through the calculator, so that 1786.0 is as right as 1786.
        try:
            right = calculate(answer) == calculate(str(self.row["answer"]))
        except ToolError:
            right = False
        return float(right) - self.call_costs * self.num_calls
