"""vLLM: its connector, where its KV lies, and whose it is."""

from kvtide.engines.vllm.connector import KvtideConnector

__all__ = ["KvtideConnector"]
