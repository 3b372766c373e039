"""Test support that is shipped with kvtide, for tests of tiers, engine adapters and callers.

``blocks`` creates keys and bytes that any reader can verify from the key alone; ``tier`` is the contract suite of a
tier. The suites need pytest, which kvtide does not install by itself.
"""
