"""Environments of a run: the pool, episodes as samples, transcripts."""
