"""What a verified certificate says about its owner."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["names_in"]


def names_in(certificate: Mapping[str, Any]) -> list[str]:
    """The common name and the alternative names of a verified certificate, as ``SSLSocket.getpeercert`` returns it."""
    common = [value for part in certificate.get("subject", ()) for kind, value in part if kind == "commonName"]
    return common + [value for _, value in certificate.get("subjectAltName", ()) if isinstance(value, str)]
