"""The version of this package, which nodes and clients also exchange in their handshake."""

__version__ = "0.1.0"
