"""Tests in ``inside`` run in a network namespace that has nothing but loopback, where test_namespace.py runs them."""

from __future__ import annotations

from tests.mooncake.servers import alone

collect_ignore_glob = [] if alone() else ["inside/*"]
