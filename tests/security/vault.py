"""A key service that answers as Vault's transit engine does: versions of one key, which never leave it."""

from __future__ import annotations

import base64
import contextlib
import json
import secrets
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

__all__ = ["Vault", "serving"]

TOKEN = "s.0123456789"


class Vault:
    """One mount, "transit", with one key, "kvtide"."""

    def __init__(self) -> None:
        self.versions: list[AESGCM | None] = []
        self.asked: list[str] = []
        self.sealed = False
        self.address = ""
        self.rotate()

    def rotate(self) -> None:
        self.versions.append(AESGCM(secrets.token_bytes(32)))

    def answer(self, path: str, token: str | None, body: dict[str, str]) -> tuple[int, dict[str, object]]:
        self.asked.append(path)
        if self.sealed:
            return 503, {"errors": ["Vault is sealed"]}
        if token != TOKEN:
            return 403, {"errors": ["permission denied"]}
        try:
            match path.removeprefix("/v1/transit/").split("/"):
                case ["encrypt", "kvtide"]:
                    return 200, {"data": {"ciphertext": self._encrypt(base64.b64decode(body["plaintext"]))}}
                case ["decrypt", "kvtide"]:
                    plain = base64.b64encode(self._decrypt(body["ciphertext"])).decode()
                    return 200, {"data": {"plaintext": plain}}
                case ["rewrap", "kvtide"]:
                    return 200, {"data": {"ciphertext": self._encrypt(self._decrypt(body["ciphertext"]))}}
        except (InvalidTag, ValueError, KeyError, IndexError):
            return 400, {"errors": ["invalid ciphertext"]}
        return 404, {"errors": []}

    def _encrypt(self, plain: bytes) -> str:
        nonce, key = secrets.token_bytes(12), self.versions[-1]
        assert key is not None
        return f"vault:v{len(self.versions)}:" + base64.b64encode(nonce + key.encrypt(nonce, plain, None)).decode()

    def _decrypt(self, text: str) -> bytes:
        vault, version, rest = text.split(":")
        key, data = self.versions[int(version[1:]) - 1], base64.b64decode(rest)
        if vault != "vault" or key is None:
            raise ValueError("too old")
        return key.decrypt(data[:12], data[12:], None)


@contextlib.contextmanager
def serving() -> Iterator[Vault]:
    vault = Vault()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            code, said = vault.answer(self.path, self.headers["X-Vault-Token"], body)
            data = json.dumps(said).encode()
            self.send_response(code)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    vault.address = f"http://127.0.0.1:{server.server_address[1]}/transit/kvtide"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield vault
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
