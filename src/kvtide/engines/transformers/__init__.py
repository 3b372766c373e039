"""transformers: a store attached to a model, so that ``generate`` loads what it can."""

from kvtide.engines.transformers.attached import Answer, Attached, attach
from kvtide.engines.transformers.attached import AttachedStatistics as Statistics
from kvtide.engines.transformers.attached import CallReport as Report

__all__ = ["Answer", "Attached", "Report", "Statistics", "attach"]
