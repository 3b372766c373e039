"""Shipped with kvtide: what a tier, an engine adapter or a caller's own test needs to check itself.

``blocks`` makes keys and bytes that any reader can verify from the key alone; ``tier`` is the contract suite of a
tier. The suites need pytest, which kvtide does not install by itself.
"""
