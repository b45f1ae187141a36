"""Ready-made workflows, one algorithm a file; each is a program to read, copy and change.

They are registered under the entry point group `flowrl.graphs`, so that a config names them:
`stages: [sft, grpo]`.
"""
