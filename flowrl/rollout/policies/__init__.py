"""Policies of the rollout scheduler: small frozen objects that settings name.

Each is a specification like a loss's: it prints, travels in JSON as `{"kind": ..., option: value}`
and imports nothing heavy. Where a rule is a formula, the policy holds it.
"""
