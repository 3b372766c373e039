"""Copying KV into and out of inference engines.

``vllm`` and ``transformers`` are engines; begin a new one by following ``vllm/connector.py``. ``connector`` decides
what is loaded and stored, for any engine with a scheduler and workers; ``paged`` copies an engine's pages.
"""
