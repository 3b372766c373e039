"""A trace with which the size of a cache is tested."""

from __future__ import annotations

import json
from pathlib import Path

__all__ = ["returning_users"]


def returning_users(path: Path) -> Path:
    """Twenty users who each come five times with a block of 256 tokens more."""
    requests = [(turn, user) for turn in range(5) for user in range(20)]
    lines = [
        {
            "timestamp": 1000 * i,
            "input_length": 256 * (turn + 1),
            "hash_ids": [100 * user + block for block in range(turn + 1)],
        }
        for i, (turn, user) in enumerate(requests)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path
