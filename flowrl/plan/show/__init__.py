"""Plans for people to read, and in what two of them differ."""
