"""How weights reach the engines of other processes."""
