"""Three nodes on one machine, the first with the directory: what one of them computed, the others read from it."""

import os
import secrets
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from subprocess import Popen

import numpy as np

import kvtide

MODEL = kvtide.Model(kvtide.Layout.attention(layers=4, heads=2, head_dim=64, block_tokens=64), weights="tiny-model@v1")
BLOCKS = [np.arange(MODEL.layout.geometry["full"].nbytes).astype(np.uint8)] * 4
PROMPTS = np.arange(3 * 256, dtype=np.uint32).reshape(3, 256)


def start(folder: str, listen: str, directory: str, stack: ExitStack) -> kvtide.Session:
    peers = {"KVTIDE_PEERS_LISTEN": listen, "KVTIDE_PEERS_DIRECTORY": directory, "KVTIDE_PEERS_TOKEN_FILE": "secret"}
    command = [sys.executable, "-m", "kvtide", "node", "--socket", listen, "--idle-seconds", "0"]
    node = stack.enter_context(Popen(command, cwd=folder, env={**os.environ, **peers, "KVTIDE_DRAM_BUDGET": "64MiB"}))
    while node.poll() is None and not Path(folder, listen).exists():
        time.sleep(0.01)
    return stack.enter_context(kvtide.connect(f"unix:{folder}/{listen}")).session(MODEL)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        Path(folder, "secret").touch(0o600)
        Path(folder, "secret").write_text(secrets.token_hex(32))  # all nodes have it, and it is never sent
        sessions = [start(folder, "127.0.0.1:19421", "embedded", stack)]  # the directory is at the next port
        sessions += [start(folder, f"127.0.0.1:{port}", "embedded://127.0.0.1:19422", stack) for port in (19423, 19425)]
        [session.store(prompt, BLOCKS) for session, prompt in zip(sessions, PROMPTS, strict=True)]
        for number, session in enumerate(sessions, 1):
            while any(session.load(session.match(prompt, wait=1)).wait().tokens < 256 for prompt in PROMPTS):
                time.sleep(0.1)  # what is new is found after a moment
            print(f"node {number} has read all three prompts")
