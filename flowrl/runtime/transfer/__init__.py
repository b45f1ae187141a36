"""Publication of weights to engine processes."""
