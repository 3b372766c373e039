"""transformers: a store attached to a model, so that ``generate`` loads what it can."""

from kvtide.engines.transformers.attach import Answer, Attached, AttachedStatistics, CallReport, attach

__all__ = ["Answer", "Attached", "AttachedStatistics", "CallReport", "attach"]
