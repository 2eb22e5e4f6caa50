"""The package's version. An installer can read it without other imports."""

__version__ = "0.2.0"
