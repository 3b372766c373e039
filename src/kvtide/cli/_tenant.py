"""The --tenant option of commands."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from kvtide.errors import ConfigError

if TYPE_CHECKING:
    from kvtide.config import Security
    from kvtide.security.audit import Audit

__all__ = ["TenantName", "log_of", "tag_of"]

TenantName = Annotated[
    str,
    typer.Option(
        "--tenant",
        help="The tenant's tag, 32 hexadecimal digits, as kvtide inspect and kvtide keys list show it; or default.",
        show_default=False,
    ),
]


def tag_of(tenant: str) -> bytes:
    from kvtide.index.keys import parse_tag
    from kvtide.security.key_ring import OWN

    try:
        tag = parse_tag(tenant)
    except ValueError:
        tag = OWN
    # the store's own key belongs to no tenant: the names of all shared blobs derive from it
    if tag == OWN:
        raise ConfigError(
            f"--tenant is {tenant!r}; it must be a tag of 32 hexadecimal digits, or default. In a program a tenant's "
            "is tenant.tag.hex()"
        )
    return tag


def log_of(settings: Security) -> Audit:
    """The audit log. Raises ConfigError without one, because these commands must be logged."""
    from kvtide.security.audit import audit_of

    found = audit_of(settings)
    if found is None:
        raise ConfigError(
            "this must be written down in the audit log, and none is set: set security.audit to a file's path, or "
            "security.key_file, beside which the log is then"
        )
    return found
