"""SGLang asks for the version here too."""

__version__ = "0.4.10"
