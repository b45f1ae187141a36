"""What is said where nothing fits, and the changes that make it possible."""
