"""Opens the resources of a run before its first step: inputs, models, scorers, rollouts, stages."""
