"""What a run shows and leaves behind: rows, the run folder, the terminal display."""
