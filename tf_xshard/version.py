"""Holds the package's version, which an installer reads without imports."""

__version__ = "0.2.0"
