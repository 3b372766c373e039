"""Adapter for vLLM: its connector, the layout of its KV, and the identity of its model."""

from kvtide.engines.vllm.connector import KvtideConnector

__all__ = ["KvtideConnector"]
