"""The version of this package, and of a node or client that says hello."""

__version__ = "0.1.0"
