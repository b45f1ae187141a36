"""The executor on a Ray cluster (`executor=ray`); nothing outside this package imports Ray."""

ENDED = "ended"
"""The last message of a worker in an actor: `(ENDED, how)`."""

OUTPUT = "output"
"""A message of what an actor has printed: `(OUTPUT, bytes)`."""
