"""Benchmarks with peers beside us; run ``python -m bench`` or ``make bench``."""
