"""A program that answers as a server of vLLM with the connector does, as far as ``kvtide demo`` asks.

Its tokens are bytes. Its store is a file, which outlives it, as a node's disk does; its own cache is in its memory.
"""

from __future__ import annotations

import json
import os
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

BLOCK = 256
STORE = Path(os.environ["PRETEND_VLLM_STORE"])
own: set[str] = set()
RESETS: dict[str, int] = {}


class Handler(BaseHTTPRequestHandler):
    """One request."""

    def do_GET(self) -> None:
        self._send(b"")

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        asked: Any = json.loads(self.rfile.read(length)) if length else {}
        if self.path == "/reset_prefix_cache":
            refused = RESETS.get("refused", 0)
            RESETS["refused"] = refused + 1
            if refused:  # as vLLM does while a connector still has pages: the first time it keeps all
                own.clear()
            self._send(json.dumps({"success": bool(refused)}).encode())
        elif self.path == "/tokenize":
            tokens = list(asked["messages"][0]["content"].encode())
            self._send(json.dumps({"count": len(tokens), "tokens": tokens}).encode())
        else:
            self._send(self._complete(asked))

    def _complete(self, asked: Any) -> bytes:
        prompt = json.dumps(asked["prompt"])
        whole = len(asked["prompt"]) // BLOCK * BLOCK
        stored = STORE.read_text().splitlines() if STORE.exists() else []
        cached = whole if prompt in own or prompt in stored else 0
        own.add(prompt)
        if prompt not in stored and not asked["kv_transfer_params"].get("no_store"):
            STORE.write_text("\n".join([*stored, prompt]))
        events: list[Any] = [
            {"choices": [{"text": "x", "token_ids": [len(prompt) % 256 + n]}]} for n in range(asked["max_tokens"])
        ]
        usage = {"prompt_tokens": len(asked["prompt"]), "prompt_tokens_details": {"cached_tokens": cached}}
        events.append({"choices": [], "usage": usage})
        lines = [f"data: {json.dumps(event)}\n\n" for event in events]
        return "".join([*lines, "data: [DONE]\n\n"]).encode()

    def _send(self, content: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass


if __name__ == "__main__":
    port = int(sys.argv[sys.argv.index("--port") + 1])
    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
