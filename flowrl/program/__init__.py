"""The workflow language: a Python function that runs on symbolic handles and leaves a graph."""
