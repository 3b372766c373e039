"""TLS contexts with the certificates of a node's settings."""

from __future__ import annotations

import ssl

from kvtide.config import Node
from kvtide.errors import ConfigError

__all__ = ["client_tls", "unreadable"]


def client_tls(settings: Node) -> ssl.SSLContext:
    """The TLS context of a client of a node: trusts ``node.authority`` only, and presents ``node.certificate``."""
    try:
        context = ssl.create_default_context(cafile=settings.authority or None)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        if settings.certificate:
            context.load_cert_chain(settings.certificate)
    except OSError as e:
        raise unreadable(settings, e) from e
    return context


def unreadable(settings: Node, error: OSError) -> ConfigError:
    """The error for certificates that cannot be read."""
    files = f"{settings.certificate!r} and node.authority {settings.authority!r}"
    return ConfigError(
        f"node.certificate {files} cannot be used: {error.strerror or error}. The first must be a file with a "
        "certificate and its key, the second one with the certificate of an authority, both as PEM"
    )
