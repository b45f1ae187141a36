"""What a run opens before its first step: inputs, models, scorers, rollouts, stages."""
