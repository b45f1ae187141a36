"""A plan's file with its configuration: all that follows from its decisions, made anew."""
