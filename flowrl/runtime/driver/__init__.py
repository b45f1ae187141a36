"""The drive loop: rollout drivers, the batch program, stages, and the reports of steps."""
