"""The package's version; imports nothing, so that an installer can read it."""

__version__ = "0.1.0"
