"""Every error that kvtide raises, in one tree.

::

    KvtideError
    ├── ConfigError            a setting is unknown or has a value that cannot work
    ├── LayoutError            a layout, buffer or token range does not fit its description
    │   └── ArgumentError      an argument is of a type that cannot be used
    ├── TierError              a tier cannot be opened or used at all
    │   ├── TierLockedError    another process has this directory open
    │   └── TierVersionError   the directory was written by a newer kvtide
    ├── KeyFileError           the file of wrapped keys cannot be read, written or understood
    ├── AuditError             the audit log cannot be read or written
    ├── AccessError            whoever asks has no role, or one that does not suffice
    ├── HeldError              a tenant's blocks are under a legal hold and cannot be forgotten
    ├── UnknownTenantError     there is neither a key nor a block of the tenant that is to be forgotten
    ├── TraceError             a trace cannot be read, or has nothing to replay
    ├── RightError             a lease or reservation was used after it ended
    └── ClosedError            the store or session is closed
        └── ForkedError        it was opened by the process that this one was forked from

What can go wrong with a *block* is not in this tree. A block that is missing, torn, corrupt or late is
a miss: the caller computes it, as it would have without us. Errors are for what the caller can mend.
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
    """A setting is unknown or has a value that cannot work. The text names it and the nearest good one."""


class LayoutError(KvtideError, ValueError):
    """A layout, buffer or token range does not fit its description. Check shapes and sizes."""


class ArgumentError(LayoutError, TypeError):
    """An argument is of a type that cannot be used. The text names it, and what to give instead."""


class TierError(KvtideError):
    """A tier cannot be opened or used at all. The text says what the system answered and what to do."""


class TierLockedError(TierError):
    """Another process has this directory open. Stop it, or give this one a directory of its own."""


class TierVersionError(TierError):
    """The directory was written by a newer kvtide and was left untouched. Upgrade, or use another."""


class KeyFileError(KvtideError):
    """The file of wrapped keys cannot be read, written or understood. The text says what to do."""


class AuditError(KvtideError):
    """The audit log cannot be read or written. An act that cannot be written down is not done."""


class AccessError(KvtideError):
    """Whoever asks has no role at the node, or one that does not suffice. The text names the role that is needed."""


class HeldError(KvtideError):
    """A tenant's blocks are under a legal hold. End it with ``kvtide hold --release`` first."""


class UnknownTenantError(KvtideError):
    """There is neither a key nor a block of the tenant that is to be forgotten. Check its tag, and whom you ask."""


class TraceError(KvtideError):
    """A trace cannot be read, or has nothing to replay. The text names file and line."""


class RightError(KvtideError):
    """A lease or reservation was used after it was released, sealed or aborted."""


class ClosedError(KvtideError):
    """The store or session is closed. Open a new one."""


class ForkedError(ClosedError):
    """The store or session was opened by the process that this one was forked from, and is that one's alone.

    Open the store again in the child, or let both processes use a node.
    """
