"""Whether a plan that was read, and perhaps edited, holds together, and on which line not."""
