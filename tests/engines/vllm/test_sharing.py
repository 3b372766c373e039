"""vLLM engines, each with a node, memory and a disk of its own, share a cache through a storage; so do later ones.

Sealed, with one key file for all. To an engine it makes no difference, so what is in the open is left to
``tests/engines/test_sharing.py``.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from kvtide.node.client.client import Client
from tests.engines.storages import Storage, opened
from tests.engines.vllm.checkpoints import checkpoint
from tests.engines.vllm.engines import Engine, engine
from tests.engines.vllm.kept import READING, Node, connector, hit, prompt, reference, same, source, stored


class Host:
    """A node and its engine, on a folder of their own."""

    def __init__(self, storage: Storage, folder: Path, stack: ExitStack) -> None:
        folder.mkdir(exist_ok=True)
        shared = {
            f"{section}_{name}".upper(): v for section, part in storage.settings.items() for name, v in part.items()
        }
        self.node = Node(folder, **shared)
        stack.callback(self.node.kill)
        self.engine: Engine = stack.enter_context(engine(checkpoint(), folder / "engine.log", connector(self.node)))

    def kill(self) -> None:
        self.engine.kill()
        self.node.kill()


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["files", "objects", "valkey"])
def test_engines_share_a_storage(kind: str, plain: Engine, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    prompts = [prompt(1, 300), prompt(2, 600)]
    true = [reference(plain, tokens) for tokens in prompts]
    with ExitStack() as stack:
        storage = stack.enter_context(opened(kind, True, tmp_path, request))
        hosts = [Host(storage, tmp_path / name, stack) for name in ("first", "second")]
        for host, tokens, answer in zip(hosts, prompts, true, strict=True):
            with Client(host.node.path) as client:
                same(stored(host.engine, client, tokens), answer.cold)
                assert client.flush(60)
        for host, tokens, answer in zip(hosts, prompts[::-1], true[::-1], strict=True):
            found = hit(host.engine, tokens, **READING)
            same(found, answer.warm)
            assert sum(source(found)) == answer.warm.cached, "this host has never computed it"
        for host in hosts:
            host.kill()
        storage.restart()
        later = Host(storage, tmp_path / "third", stack)
        for tokens, answer in zip(prompts, true, strict=True):
            found = hit(later.engine, tokens, **READING)
            same(found, answer.warm)
            assert sum(source(found)) == answer.warm.cached, "this host has never computed it"
