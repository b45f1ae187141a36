"""A guessing game: a hidden number, one guess a turn, and the environment says which way to go.

    prompt  #      turn 0  8     <      the hidden number is less
                   turn 1  3     >      it is greater
                   turn 2  5     =      right: reward 1, and the episode is over

Numbers are single characters (0 to 9, a to f), so that a turn of a character model is one token. A
turn that is no number is answered `?` and costs a little. The best a policy can do is to halve what
is left: of 16 numbers it finds 15 within 4 turns, where guessing at random finds 4.

    roles:
      game: {backend: environment, environment: "examples/guess.py:Guess", options: {size: 16}}
    data: {train: examples/guess.jsonl}

The policy's alphabet needs `#`, the numbers and `<>=?`; one turn is `max_tokens: 1`. The rows are
written anew by `python examples/guess.py 16 > examples/guess.jsonl`, and those of two games, which
the policy tells apart by their prompts, by `python examples/guess.py 8 large small >
examples/games.jsonl`.
"""

import json
import sys

from flowrl_backends.environment import Observation, Step

DIGITS = "0123456789abcdef"


class Guess:
    """One episode."""

    def __init__(self, size=16, missed=0.0, strange=-0.1):
        """Games of `size` numbers from 0; `missed` and `strange` are rewards of other turns.

        The row's number counts modulo `size`, so that the same rows serve smaller games.
        """
        self.digits = DIGITS[:size]
        self.missed = missed
        self.strange = strange

    async def reset(self, row):
        self.hidden = int(row["number"]) % len(self.digits)
        self.low, self.high = 0, len(self.digits) - 1
        return Observation(state=self.state)

    async def step(self, text):
        guess = self.digits.find(text) if len(text) == 1 else -1
        if guess < 0:
            return self.told("?", reward=self.strange, strange=1.0)
        if guess == self.hidden:
            return self.told("=", reward=1.0, done=True, solved=1.0)
        if self.hidden < guess:
            self.high = min(self.high, guess - 1)
            return self.told("<", reward=self.missed)
        self.low = max(self.low, guess + 1)
        return self.told(">", reward=self.missed)

    @property
    def state(self):
        """All that matters for what follows: which numbers are left."""
        return f"{self.low}-{self.high}"

    def told(self, said, reward, done=False, solved=0.0, strange=0.0):
        metrics = {"solved": solved, "strange": strange}
        return Step(said, reward=reward, done=done, state=self.state, metrics=metrics)


def rows(size, times, games=()):
    """Each number `times` times: rows with equal numbers are different tasks to a data cursor.

    With `games` each row comes once for every game, which it names, with a prompt of its own.
    """
    plain = {"#": {}}
    kinds = dict(zip("#=?", ({"environment": game} for game in games), strict=False)) or plain
    return [
        {"prompt": prompt, "number": number, "answer": DIGITS[number], **named}
        for _ in range(times)
        for number in range(size)
        for prompt, named in kinds.items()
    ]


if __name__ == "__main__":
    for row in rows(size=16, times=int(sys.argv[1]), games=sys.argv[2:]):
        print(json.dumps(row))
