"""The processes between which ``other_nodes.py`` measures: nodes, their readers, and the two ends of bare streams.

The bare stream moves the same bytes between as many processes over as many connections: a request of 16 bytes for each
8 MiB (or block, if that is larger), the bytes in one ``sendmsg``, and ``recvmsg_into`` with MSG_WAITALL. It computes no
checksum, or, on both ends, what records need: XXH3-128 of every block.
"""

from __future__ import annotations

import datetime
import ipaddress
import itertools
import multiprocessing
import queue
import secrets
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from xxhash import xxh3_128_digest

import kvtide
from kvtide import config as configuration
from kvtide.benchmarks.record import Sample
from kvtide.benchmarks.settings import MIB, SMALL, block_sources, layout_of
from kvtide.block import BLOCK_TOKENS, BlockKey
from kvtide.peers.server import PeerServer
from kvtide.store.store import Store
from kvtide.testing.blocks import aligned
from kvtide.tiers.base import FoundBlock, Identity, Read
from kvtide.tiers.peers.tier import PeerTier, connections_of
from kvtide.tiers.peers.trust import PeerTrust

__all__ = [
    "CONNECTIONS",
    "TOTAL",
    "Contest",
    "Worker",
    "make_credentials",
    "match",
    "read",
    "receive_stream",
    "send_stream",
    "serve",
    "settings_of",
]

TOTAL = 512 * MIB
"""Bytes that a server has, and that each client of one reads in a round."""
_CALL = 8 * MIB
CONNECTIONS = 2
_REQUEST = struct.Struct("<QQ")
Message = tuple[Any, ...]


class Worker:
    """A process that runs ``work`` with the other end of ``pipe``."""

    def __init__(self, stack: ExitStack, work: Callable[..., None], *arguments: object) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(target=work, args=(theirs, *arguments), daemon=True)
        self._process.start()
        theirs.close()
        stack.callback(self._end)

    def _end(self) -> None:
        self.pipe.close()
        self._process.join(30)
        self._process.kill()

    def ask(self, *message: object) -> Any:
        self.pipe.send(message)
        return self.pipe.recv()


def answer_all(pipe: Connection, answer: Callable[[Message], object]) -> None:
    """Answer messages until the other end is closed. ``cpu`` is answered with this process's CPU seconds."""
    while True:
        try:
            message = pipe.recv()
        except EOFError:
            return
        pipe.send(time.process_time() if message == ("cpu",) else answer(message))


def settings_of(folder: str, tls: bool, **peers: object) -> configuration.Config:
    trust: dict[str, object] = {"token_file": f"{folder}/token"}
    if tls:
        trust = {"certificate": f"{folder}/host.pem", "authority": f"{folder}/ca.pem", "names": "host"}
    # What is used is far less. Of this, a part is what answers to one address may hold, and all clients have the same.
    budget = 16 * TOTAL
    return configuration.read(
        None, env={}, dram={"budget": budget, "segment": 64 * MIB}, peers={**trust, **peers, "timeout": 30.0}
    )


def _shape(nbytes: int) -> kvtide.Layout:
    return layout_of(nbytes) if nbytes >= MIB else SMALL


def identity_of(nbytes: int) -> Identity:
    layout = _shape(nbytes)
    model = kvtide.Model(layout, "bench")
    group = layout.groups[0]
    return Identity(
        model.namespace(),
        kvtide.Tenant("", b"kvtide: the tenant of those who named none").tag,
        layout.digest,
        group.suffix,
        layout.block_tokens,
        layout.geometry[group.name],
        group.itemsize,
    )


def _tokens(count: int) -> np.ndarray[Any, np.dtype[np.uint32]]:
    return np.arange(count * BLOCK_TOKENS, dtype=np.uint32)


def serve(pipe: Connection, folder: str, tls: bool, nbytes: int, count: int, fabric: str = "tcp") -> None:
    """A node that has ``count`` blocks of ``nbytes``. Says its address and the blocks' keys."""
    with (
        Store(settings_of(folder, tls, listen="127.0.0.1:0", fabric=fabric)) as store,
        closing(PeerServer(store)) as server,
    ):
        sources = block_sources(nbytes)
        with store.session(kvtide.Model(_shape(nbytes), "bench")) as session:
            chain = session.chain(_tokens(count))
            session.store(chain, [sources[i % 4] for i in range(count)])
            assert store.statistics().tiers["dram"].blocks == count
            pipe.send((server.address, [bytes(digest) for digest in chain.digests]))
            answer_all(pipe, lambda _: None)


def read(
    pipe: Connection,
    folder: str,
    tls: bool,
    nbytes: int,
    addresses: Sequence[str],
    keys: list[bytes],
    fabric: str = "tcp",
    connections: int = 0,
) -> None:
    """A reader of a node's blocks. To ("read", n): the start and the end of reading the first n. ``connections``: 0: as
    many as a node chooses."""
    config = settings_of(folder, tls, addresses=" ".join(addresses), fabric=fabric, connections=connections)
    trust, who = PeerTrust(config.peers, config.security), identity_of(nbytes)
    names = [BlockKey(key + who.group) for key in keys]
    memory = aligned(nbytes * len(keys))
    np.frombuffer(memory, np.uint8)[:] = 1
    spans = [memory[i : i + nbytes] for i in range(0, len(memory), nbytes)]
    expected = bytes(block_sources(nbytes)[0][:64])  # to make them takes long, and would count as reading
    tiers = [PeerTier(a, trust, connections=connections_of(config.peers), timeout=30.0) for a in addresses]

    def answer(message: Message) -> object:
        if message[0] == "read":
            ended: queue.SimpleQueue[Sequence[object]] = queue.SimpleQueue()
            items = [Read(names[i], who, 0, spans[i]) for i in range(message[1])]
            start = time.perf_counter()
            tiers[0].read(items, ended.put)
            results = ended.get()
            stop = time.perf_counter()
            assert all(result is True for result in results), "not all blocks were read"
            assert bytes(spans[0][:64]) == expected
            return start, stop
        found: queue.SimpleQueue[Sequence[FoundBlock | None]] = queue.SimpleQueue()
        wishes = [(name, who) for name in names]
        start = time.perf_counter()
        for tier in tiers:
            tier.find(wishes, found.put)
        answers = [found.get() for _ in tiers]
        stop = time.perf_counter()
        assert any(None not in entries for entries in answers), "not all blocks were found"
        return start, stop

    while fabric == "nixl" and tiers[0].statistics().carrier != "NIXL":  # its agent starts with the first connection
        answer(("read", len(keys)))
    pipe.send("ready")
    answer_all(pipe, answer)
    for tier in tiers:
        tier.close()


def match(pipe: Connection, folder: str, addresses: Sequence[str]) -> None:
    """Matches of new prompts of three blocks, in a store that asks other nodes or, without addresses, none. To
    ("match",): the seconds of one."""
    with (
        Store(settings_of(folder, False, addresses=" ".join(addresses))) as store,
        store.session(kvtide.Model(SMALL, "bench")) as session,
    ):
        numbers = itertools.count(1)

        def answer(_: Message) -> float:
            tokens = np.full(3 * BLOCK_TOKENS, next(numbers), np.uint32)
            start = time.perf_counter()
            with session.match(tokens, wait=30) as found:
                assert found.tokens == 0
            return time.perf_counter() - start

        pipe.send("ready")
        answer_all(pipe, answer)


def _filled(sock: socket.socket, span: memoryview) -> None:
    """Receive so many bytes."""
    if isinstance(sock, ssl.SSLSocket):
        while span:
            count = sock.recv_into(span)
            assert count
            span = span[count:]
        return
    while span:
        count = sock.recv_into(span, 0, socket.MSG_WAITALL)
        assert count
        span = span[count:]


def _checksum(span: memoryview, nbytes: int) -> None:
    for i in range(0, len(span), nbytes):
        xxh3_128_digest(span[i : i + nbytes])


def _context(folder: str, side: int) -> ssl.SSLContext:
    context = ssl.SSLContext(side)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(f"{folder}/host.pem")
    context.load_verify_locations(f"{folder}/ca.pem")
    return context


def send_stream(pipe: Connection, folder: str, tls: bool, nbytes: int, count: int, checked: bool) -> None:
    """A bare sender. Says its address."""
    blocks = aligned(nbytes * count)
    sources = block_sources(nbytes)
    for i in range(count):
        np.frombuffer(blocks, np.uint8)[i * nbytes : (i + 1) * nbytes] = sources[i % 4]
    listener = socket.create_server(("127.0.0.1", 0))

    def send(sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if tls:
            sock = _context(folder, ssl.PROTOCOL_TLS_SERVER).wrap_socket(sock, server_side=True)
        request = bytearray(_REQUEST.size)
        with sock:
            while sock.recv_into(request, 0, 0 if tls else socket.MSG_WAITALL):
                start, size = _REQUEST.unpack(request)
                part = blocks[start : start + size]
                if checked:
                    _checksum(part, nbytes)
                if tls:
                    sock.sendall(part)
                else:
                    while part:
                        part = part[sock.sendmsg([part]) :]

    def accept() -> None:
        while True:
            sock, _ = listener.accept()
            threading.Thread(target=send, args=(sock,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    pipe.send(listener.getsockname())
    answer_all(pipe, lambda _: None)


def receive_stream(
    pipe: Connection,
    folder: str,
    tls: bool,
    nbytes: int,
    count: int,
    address: tuple[str, int],
    connections: int,
    checked: bool,
) -> None:
    """A bare receiver. To ("read", n): the start and the end of receiving the first n blocks."""
    blocks = aligned(nbytes * count)
    np.frombuffer(blocks, np.uint8)[:] = 1
    step = max(nbytes, _CALL)
    expected = bytes(block_sources(nbytes)[0][:64])
    sockets = []
    for _ in range(connections):
        sock = socket.create_connection(address)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sockets.append(_context(folder, ssl.PROTOCOL_TLS_CLIENT).wrap_socket(sock) if tls else sock)

    def answer(message: Message) -> object:
        parts: queue.SimpleQueue[int] = queue.SimpleQueue()
        total = message[1] * nbytes
        for start in range(0, total, step):
            parts.put(start)

        def work(sock: socket.socket) -> None:
            while True:
                try:
                    start = parts.get_nowait()
                except queue.Empty:
                    return
                size = min(step, total - start)
                sock.sendall(_REQUEST.pack(start, size))
                part = blocks[start : start + size]
                _filled(sock, part)
                if checked:
                    _checksum(part, nbytes)

        threads = [threading.Thread(target=work, args=(sock,)) for sock in sockets]
        began = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        ended = time.perf_counter()
        assert bytes(blocks[:64]) == expected
        return began, ended

    pipe.send("ready")
    answer_all(pipe, answer)


class Contest:
    """One contestant: a server process, and its clients."""

    def __init__(self, server: Worker, clients: Sequence[Worker], nbytes: int, count: int) -> None:
        self._server = server
        self._clients = clients
        self._count = count
        self._nbytes = nbytes

    def round(self) -> Sample:
        workers = [self._server, *self._clients]
        before = sum(worker.ask("cpu") for worker in workers)
        for client in self._clients:
            client.pipe.send(("read", self._count))
        moments = [client.pipe.recv() for client in self._clients]
        cpu = sum(worker.ask("cpu") for worker in workers) - before
        seconds = max(stop for _, stop in moments) - min(start for start, _ in moments)
        return Sample(seconds, cpu, len(self._clients) * self._count * self._nbytes)


def make_credentials(folder: Path) -> None:
    """Write what nodes authenticate each other with: a secret, a certificate for host, and that of its authority."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    def made(name: str, key: Any, by: str, signer: Any, authority: bool) -> bytes:
        subject, issuer = (x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, n)]) for n in (name, by))
        now, day = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=1)
        builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key.public_key())
        builder = builder.serial_number(x509.random_serial_number()).not_valid_before(now - day)
        builder = builder.not_valid_after(now + day)
        builder = builder.add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
        if not authority:
            here = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
            builder = builder.add_extension(x509.SubjectAlternativeName([here]), critical=False)
        return builder.sign(signer, hashes.SHA256()).public_bytes(pem)

    (folder / "token").write_text(secrets.token_hex(32))
    (folder / "token").chmod(0o600)
    pem = serialization.Encoding.PEM
    ca, host = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    (folder / "ca.pem").write_bytes(made("ca", ca, "ca", ca, authority=True))
    secret = host.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (folder / "host.pem").write_bytes(made("host", host, "ca", ca, authority=False) + secret)
