"""A recording has each request of an engine once, however often its scheduler asks for it."""

from __future__ import annotations

import json
from pathlib import Path

from kvtide.node.client.client import Client
from tests.engines.connector.test_connector import BLOCK, prompt, serve
from tests.engines.connector.toy import Request, Toy
from tests.node.serving import Process


def test_one_request_is_one_line(tmp_path: Path) -> None:
    """New ones, hits, those that wait for a block that another writes, and one whose pages are taken away."""
    node = Process(tmp_path, KVTIDE_DRAM_PREFAULT="true", KVTIDE_RECORD_PATH=str(tmp_path / "trace.jsonl"))
    toy = Toy(lambda: Client(node.path), chunk=BLOCK)
    lengths = []
    try:
        for name in ("new", "hit"):
            lengths.append(len(serve(toy, name, prompt(1)).tokens))
        preempted = Request("preempted", prompt(2))
        toy.add(preempted)
        while preempted.computed < 3 * BLOCK:
            toy.step()
        toy.flush()
        toy.preempt(preempted)
        toy.run()
        lengths.append(300)
        toy.run(*(Request(f"at once {i}", prompt(3) + prompt(i, 20)) for i in range(6)))
        lengths += [320] * 6
        toy.at_rest()
        toy.close()
        node.stop()
    finally:
        node.kill()
    header, *lines = map(json.loads, (tmp_path / "trace.jsonl").read_text().splitlines())
    assert header["block_tokens"] == BLOCK
    assert [line["input_length"] for line in lines] == lengths
    assert lines[0]["hash_ids"] == lines[1]["hash_ids"] != lines[2]["hash_ids"]
    assert len({tuple(line["hash_ids"][:4]) for line in lines[3:]}) == 1
