"""Adapter for Hugging Face transformers: ``generate`` loads the stored prefix of its prompts."""

from kvtide.engines.transformers.attach import Answer, Attached, AttachedStatistics, CallReport, attach

__all__ = ["Answer", "Attached", "AttachedStatistics", "CallReport", "attach"]
