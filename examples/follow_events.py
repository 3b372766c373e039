"""Follow the KV events of a node, as a router does: which blocks it has, in which tier."""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import numpy as np
import zmq

import kvtide

layout = kvtide.Layout.attention(layers=2, heads=2, head_dim=64, block_tokens=64)
model = kvtide.Model(layout, weights="example")
tokens, block = list(range(128)), np.zeros(layout.geometry["full"].nbytes, np.uint8)
with tempfile.TemporaryDirectory() as folder, zmq.Context() as context, context.socket(zmq.SUB) as events:
    at, where = Path(folder) / "node.sock", f"ipc://{folder}/events"
    settings = {"KVTIDE_EVENTS_ENDPOINT": where, "KVTIDE_EVENTS_TOKEN_IDS": "true", "KVTIDE_DRAM_BUDGET": "64MiB"}
    node = subprocess.Popen([sys.executable, "-m", "kvtide", "node", "--socket", at], env={**os.environ, **settings})
    events.connect(where)
    events.subscribe(b"")
    while node.poll() is None and not at.exists():
        time.sleep(0.05)
    with kvtide.connect(f"unix:{at}") as store, store.session(model) as session:
        session.store(tokens, [block, block])
        blocks = 0
        while blocks < 2:
            topic, number, batch = events.recv_multipart()
            for event in msgspec.msgpack.decode(batch)[1]:
                for one in event.get("block_hashes", []):  # none: everything that was known before is gone
                    blocks += 1
                    print(f"{event['type']} in {event['medium']}: {event['block_size']} tokens, {one:016x}")
    node.terminate()
    node.wait()
