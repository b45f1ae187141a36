"""The per-sample rollout scheduler: a state machine without I/O.

`RolloutScheduler.step(event) -> list[Action]` (in `flowrl.rollout.scheduler`) owns each sample from
admission to the one end it has. Executors and simulators translate what happens into `events` and
carry the `actions` out. Rules that can be chosen are `policies`, named in the `settings`.
"""
