"""vLLM: where its KV lies, and whose it is."""
