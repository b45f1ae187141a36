"""The output of a run: rows of its logs, its folder, and the display on a terminal."""
