"""An environment in which two policies say digits in turns."""

from flowrl_backends.environment import Step


class Court:
    """After four turns the policy whose last digit is the higher one wins."""

    def reset(self):
        self.said = [-1, -1]
        return ""

    def step(self, text, turn):
        self.said[turn % 2] = int(text) if text.isdecimal() else -1
        if turn < 3:
            return Step("+", state=turn)
        lead = (self.said[0] > self.said[1]) - (self.said[0] < self.said[1])
        return Step(reward=(float(lead), float(-lead)), done=True)
