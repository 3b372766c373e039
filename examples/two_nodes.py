"""Two nodes on one machine: a prompt that was stored at the first is read from the second, over TCP."""

import secrets
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import kvtide

MODEL = kvtide.Model(kvtide.Layout.attention(layers=4, heads=2, head_dim=64, block_tokens=64), weights="tiny-model@v1")
PROMPT = np.arange(64 * 4, dtype=np.uint32)
BLOCK = np.arange(MODEL.layout.geometry["full"].nbytes).astype(np.uint8)


def start(folder: str, name: str, peers: str) -> subprocess.Popen[bytes]:
    Path(folder, name).write_text(f'[dram]\nbudget = "64MiB"\n[peers]\ntoken_file = "secret"\n{peers}\n')
    node = subprocess.Popen(f"{sys.executable} -m kvtide node --socket {name}.sock --config {name}".split(), cwd=folder)
    while node.poll() is None and not Path(folder, f"{name}.sock").exists():
        time.sleep(0.01)
    return node


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "secret").touch(0o600)
        Path(folder, "secret").write_text(secrets.token_hex(32))  # all nodes have it, and it is never sent
        nodes = start(folder, "1", 'listen = "127.0.0.1:19411"'), start(folder, "2", 'addresses = "127.0.0.1:19411"')
        with kvtide.connect(f"unix:{folder}/1.sock") as client, client.session(MODEL) as session:
            print("at the first node: ", session.store(PROMPT, [BLOCK] * 4))
        with kvtide.connect(f"unix:{folder}/2.sock") as client, client.session(MODEL) as session:
            loaded = session.load(session.match(PROMPT, wait=10)).wait()
            right = all((np.frombuffer(view, np.uint8) == BLOCK).all() for view in loaded.views["full"])
            print(f"at the second node: {loaded.tokens} of {len(PROMPT)} tokens, right in every byte: {right}")
        for node in nodes:
            node.terminate()
        assert [node.wait() for node in nodes] == [0, 0]
