"""What a prompt costs that may be at any of many nodes: messages, bytes and time, with 2 to 64 of them.

::

    python -m bench.cluster [NODES ...]

The nodes are stores in this process, with real sockets; the directory is a real Valkey. *new*: a prompt of three blocks
that nobody has; *found*: one that two nodes have. The time is that of a match until it is known, on a busy machine as
it is: compare lines of one run with each other. The bytes are those of locate requests to nodes, without their heads;
questions to the directory are counted, and not their bytes.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

from kvtide import config as configuration
from kvtide.block import DIGEST
from kvtide.peers.server import PeerServer
from kvtide.store.store import Store
from kvtide.testing.interface import MODEL, PLAIN, data, prompt
from kvtide.testing.servers import ValkeyServer
from kvtide.tiers.peers.cluster import directory_of
from kvtide.tiers.peers.directory import BlockDirectory
from kvtide.tiers.peers.members import Member
from kvtide.tiers.peers.protocol import IDENTITY

_PROMPTS = 60
_LEASE = 600.0


def main() -> None:
    counts = [int(word) for word in sys.argv[1:]] or [2, 4, 8, 16, 32, 64]
    print("nodes  new: ms  node messages  bytes | found: ms  node messages  bytes  directory messages")
    for count in counts:
        with tempfile.TemporaryDirectory() as folder:
            _measure(count, Path(folder))


def _measure(count: int, folder: Path) -> None:
    secret = folder / "secret"
    secret.touch(0o600)
    secret.write_text("a secret of all the nodes: 0123456789")
    with ValkeyServer(folder / "valkey", maxmemory_policy="noeviction") as valkey:
        peers = {"directory": valkey.url, "token_file": str(secret), "timeout": 10.0, "lease": _LEASE}
        small = {"budget": "16MiB", "segment": "1MiB"}
        settings = configuration.read(None, env={}, peers={**peers, "listen": "127.0.0.1:0"}, dram=small)
        directory = directory_of(settings.peers)
        stores, servers = list[Store](), list[PeerServer]()
        alone = configuration.read(
            None, env={}, peers={"token_file": str(secret), "listen": "127.0.0.1:0"}, dram=small, explain={"memory": 0}
        )
        try:
            members = [_start(alone, directory, stores, servers) for _ in range(count)]
            for n in range(_PROMPTS):
                for k in (0, count // 2):
                    # At 8 nodes at most: from so many a node reads in the same second (``peers.most``).
                    who = (n % 4 + k) % count
                    _keep(stores[who], directory, members[who], prompt(n, 1000 + n, 2000 + n))
            reader = Store(configuration.read(None, env={}, peers=peers, dram={"budget": "64MiB", "segment": "1MiB"}))
            stores.append(reader)
            with reader.session(MODEL) as session:
                session.match(prompt(99_999), wait=10).release()
                lines = []
                for first in (50_000, 0):
                    before, asked = _asked(servers), _lookups(reader)
                    seconds = []
                    for n in range(first, first + _PROMPTS):
                        began = time.perf_counter()
                        with session.match(prompt(n, 1000 + n, 2000 + n), wait=10) as match:
                            seconds.append(time.perf_counter() - began)
                            assert match.blocks == (0 if first else 3), (n, match)
                    asks = (_asked(servers) - before) / _PROMPTS
                    sent = asks * (IDENTITY.size + 3 * DIGEST)
                    lines.append((1000 * statistics.median(seconds), asks, sent, (_lookups(reader) - asked) / _PROMPTS))
            (new, new_asks, new_sent, _), (there, asks, sent, lookups) = lines
            print(
                f"{count:5}  {new:7.2f}  {new_asks:13.1f}  {new_sent:5.0f} | {there:9.2f}  {asks:13.1f}  {sent:5.0f}"
                f"  {lookups:18.1f}",
                flush=True,
            )
        finally:
            for server in servers:
                server.close()
            for store in stores:
                store.close()
            directory.close()


def _start(
    settings: configuration.Config, directory: BlockDirectory, stores: list[Store], servers: list[PeerServer]
) -> Member:
    stores.append(Store(settings))
    servers.append(PeerServer(stores[-1]))
    return directory.join(stores[-1].name, servers[-1].address, _LEASE)


def _keep(store: Store, directory: BlockDirectory, member: Member, tokens: list[int]) -> None:
    with store.session(MODEL) as session:
        session.store(tokens, data(PLAIN, tokens))
    index = store.index
    directory.publish(member, [index.key(row) for row in range(1, index.size)], [])


def _asked(servers: list[PeerServer]) -> int:
    return sum(server.statistics().requests for server in servers)


def _lookups(store: Store) -> int:
    found = store.statistics().cluster
    return found.lookups if found is not None else 0


if __name__ == "__main__":
    main()
