"""Two vLLM engines, each with a node of its own, and no storage that both use: what the first engine has computed, the
second reads from the first one's node."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from kvtide.node.client.client import Client
from kvtide.testing.servers import free_ports
from tests.engines.vllm.checkpoints import checkpoint
from tests.engines.vllm.engines import Engine, engine
from tests.engines.vllm.kept import READING, TOLD, Node, ask, connector, hit, prompt, reference, same, source, stored
from tests.peers.nodes import token


class Host:
    """A node that serves the other and reads from it, and its engine, on a folder of their own."""

    def __init__(self, folder: Path, listen: str, other: str, secret: str, stack: ExitStack) -> None:
        folder.mkdir()
        self.address = listen
        # A busy machine delays answers: nothing may be a miss for that here.
        peers = {"PEERS_LISTEN": listen, "PEERS_ADDRESSES": other, "PEERS_TOKEN_FILE": secret, "PEERS_TIMEOUT": "20s"}
        self.node = Node(folder, **peers)
        stack.callback(self.node.kill)
        self.engine: Engine = stack.enter_context(engine(checkpoint(), folder / "engine.log", connector(self.node)))
        self.client = stack.enter_context(Client(self.node.path))

    def sent(self) -> int:
        """Blocks that it has sent to other nodes."""
        found = self.client.status().node.peers
        assert found is not None
        return found.blocks_sent

    def read_from(self, other: Host) -> int:
        """Bytes that it has read from another node."""
        return self.client.statistics().tiers[f"peer {other.address}"].bytes_read


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_prompt_of_one_engine_is_a_hit_for_an_engine_at_another_node(plain: Engine, tmp_path: Path) -> None:
    documents = [prompt(41, 1100), prompt(42, 600), prompt(43, 600)]
    true = [reference(plain, tokens) for tokens in documents]
    ports = [f"127.0.0.1:{port}" for port in free_ports(2)]
    secret = token(tmp_path)
    with ExitStack() as stack:
        one = Host(tmp_path / "one", ports[0], ports[1], secret, stack)
        two = Host(tmp_path / "two", ports[1], ports[0], secret, stack)

        same(stored(one.engine, one.client, documents[0]), true[0].cold)
        found = hit(two.engine, documents[0], **READING)
        same(found, true[0].warm)
        assert found.cached == sum(source(found)) == 1024, "this host has never computed it"
        footprint = two.read_from(one) // 4
        assert (one.sent(), two.read_from(one)) == (4, 4 * footprint)
        assert footprint >= 256 * 23_040, "each block, and no less than all of it"

        found = hit(two.engine, documents[0], **READING)
        same(found, true[0].warm)
        assert source(found) == (1024, 0), "it is in this node's memory now"
        assert one.sent() == 4, "and is not read again"

        same(stored(two.engine, two.client, documents[1]), true[1].cold)
        same(hit(one.engine, documents[1], **READING), true[1].warm)
        assert (two.sent(), one.read_from(two)) == (2, 2 * footprint), "the other way round too"

        same(stored(one.engine, one.client, documents[2]), true[2].cold)
        one.node.kill()
        same(ask(two.engine, documents[2], **TOLD), true[2].cold)
        same(hit(two.engine, documents[0], **READING), true[0].warm)
