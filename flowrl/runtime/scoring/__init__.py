"""Scorer processes: the pool, its workers, their messages."""
