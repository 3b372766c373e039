"""Every error that kvtide raises, in one tree.

::

    KvtideError
    ├── ConfigError            a setting is unknown or has an invalid value
    ├── LayoutError            a layout, buffer or token range does not fit its description
    │   └── ArgumentError      an argument has a type that cannot be used
    ├── TierError              a tier cannot be opened or used at all
    │   ├── TierLockedError    another process has this directory open
    │   └── TierVersionError   the directory was written by a newer kvtide
    ├── KeyFileError           the file of wrapped keys cannot be read, written or parsed
    ├── AuditError             the audit log cannot be read or written
    ├── AccessError            the caller has no role, or an insufficient one
    ├── HeldError              a tenant's blocks are under a legal hold and cannot be forgotten
    ├── UnknownTenantError     there is neither a key nor a block of the tenant to be forgotten
    ├── TraceError             a trace cannot be read, or has nothing to replay
    ├── RightError             a lease or reservation was used after it ended
    └── ClosedError            the store or session is closed
        └── ForkedError        it was opened by the process that this one was forked from

Problems with a single *block* are not in this tree. A block that is missing, torn, corrupt or late is a miss: the
caller computes it, as it would have without kvtide. Errors are for problems that the caller can fix.
"""

from __future__ import annotations

__all__ = [
    "AccessError",
    "ArgumentError",
    "AuditError",
    "ClosedError",
    "ConfigError",
    "ForkedError",
    "HeldError",
    "KeyFileError",
    "KvtideError",
    "LayoutError",
    "RightError",
    "TierError",
    "TierLockedError",
    "TierVersionError",
    "TraceError",
    "UnknownTenantError",
]


class KvtideError(Exception):
    """The root: ``except KvtideError`` catches everything that kvtide raises on purpose."""


class ConfigError(KvtideError):
    """A setting is unknown or has an invalid value. The message names it and the nearest valid one."""


class LayoutError(KvtideError, ValueError):
    """A layout, buffer or token range does not fit its description. Check shapes and sizes."""


class ArgumentError(LayoutError, TypeError):
    """An argument has a type that cannot be used. The message names it, and what to give instead."""


class TierError(KvtideError):
    """A tier cannot be opened or used at all. The message has the system's error and what to do."""


class TierLockedError(TierError):
    """Another process has this directory open. Stop it, or give this one its own directory."""


class TierVersionError(TierError):
    """The directory was written by a newer kvtide and was left untouched. Upgrade, or use another."""


class KeyFileError(KvtideError):
    """The file of wrapped keys cannot be read, written or parsed. The message says what to do."""


class AuditError(KvtideError):
    """The audit log cannot be read or written. An action that cannot be recorded is not done."""


class AccessError(KvtideError):
    """The caller has no role at the node, or an insufficient one. The message names the role that is needed."""


class HeldError(KvtideError):
    """A tenant's blocks are under a legal hold. End it with ``kvtide hold --release`` first."""


class UnknownTenantError(KvtideError):
    """There is neither a key nor a block of the tenant to be forgotten. Check its tag, and which store or node you
    ask."""


class TraceError(KvtideError):
    """A trace cannot be read, or has nothing to replay. The message names file and line."""


class RightError(KvtideError):
    """A lease or reservation was used after it was released, sealed or aborted."""


class ClosedError(KvtideError):
    """The store or session is closed. Open a new one."""


class ForkedError(ClosedError):
    """The store or session was opened by the process that this one was forked from, and only that process may use it.

    Open the store again in the child, or let both processes use a node.
    """
