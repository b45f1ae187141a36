"""The pieces of a step that need a model's devices, and the ways to run each."""
