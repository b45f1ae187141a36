"""Checkpoints, the journal, and what a resumed run is compared with."""
