"""What is collected depends on what is installed: tests with a real vLLM run in an environment of their own."""

from __future__ import annotations

import importlib.util

_VLLM = importlib.util.find_spec("vllm") is not None

collect_ignore_glob = [] if _VLLM else ["engines/vllm/*"]


def pytest_report_header() -> list[str]:
    if _VLLM:
        return []
    return ["tests/engines/vllm: left out, vllm is not installed here; run them with .venv-vllm/bin/pytest (make test)"]
