"""Why a record was rejected. The values are shown in statistics, metrics and logs."""

from __future__ import annotations

from enum import StrEnum

from kvtide.security.wrapping import KeyState

__all__ = ["NO_KEY", "UNUSABLE", "Reason"]


class Reason(StrEnum):
    """Why a record, or a blob with one, was rejected."""

    # The bytes are not a whole record.
    TORN = "torn"
    NO_RECORD = "no record"
    NO_SEGMENT = "no segment"
    CORRUPT_HEADER = "corrupt header"
    CORRUPT_PAYLOAD = "corrupt payload"
    FORGED_HEADER = "forged header"
    UNDECODABLE = "undecodable section"
    UNREADABLE = "unreadable"
    # It is a record, but not the requested one.
    ANOTHER_BLOCK = "another block"
    ANOTHER_OWNER = "another model or tenant"
    ANOTHER_LAYOUT = "another layout"
    ANOTHER_VERSION = "another version"
    NO_SUCH_SECTIONS = "no such sections"
    NOT_ENCRYPTED = "not sealed"
    NO_CODEC = "its codec is not installed"
    # Its key cannot be used.
    KEY_NOT_HERE = "its key is not here"
    KEY_UNKNOWN = KeyState.UNKNOWN.value
    KEY_DESTROYED = KeyState.DESTROYED.value
    KEY_UNAVAILABLE = "its key cannot be had"
    # The block is gone, or is being removed.
    GONE = "gone"
    EXPIRED = "expired"
    EVICTED = "evicted"
    DROPPED = "dropped"
    LEAVING = "leaving"
    # It cannot be written.
    FULL = "full"
    SHORT_WRITE = "short write"
    TOO_LARGE = "too large"
    OVER_BUDGET = "larger than the budget of the storage"
    NO_CREDIT = "no credit to write"
    CREDIT_ENDED = "its credit ended before it was written"
    DROPS_UNKNOWN = "it was not heard what others have dropped"
    NAME_IS_A_FOLDER = "a folder has its name"
    FOLDER_IS_NO_FOLDER = "its folder is a link or a file"


NO_KEY = frozenset({Reason.KEY_NOT_HERE, Reason.KEY_UNKNOWN, Reason.KEY_DESTROYED, Reason.KEY_UNAVAILABLE})
"""An encrypted record may be whole, but cannot be read."""

UNUSABLE = frozenset(
    {
        Reason.TORN,
        Reason.NO_RECORD,
        Reason.CORRUPT_HEADER,
        Reason.CORRUPT_PAYLOAD,
        Reason.FORGED_HEADER,
        Reason.UNDECODABLE,
        Reason.ANOTHER_BLOCK,
        Reason.NOT_ENCRYPTED,
        Reason.KEY_DESTROYED,
        Reason.EXPIRED,
        Reason.DROPPED,
    }
)
"""A blob that is rejected for one of these can never be read under its name, and may be deleted."""
