"""The trackers that come with flowrl, each in its own module."""
