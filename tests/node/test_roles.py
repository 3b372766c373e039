"""Every operation of the protocol, with every role: what the documentation says is what the node does."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from kvtide.errors import AccessError
from kvtide.index.keys import DEFAULT_TENANT
from kvtide.node import protocol as p
from kvtide.node.client.client import Client
from kvtide.node.roles import NEEDS, Role
from kvtide.node.server.access import Access, AccessList
from kvtide.testing.interface import MODEL, PLAIN, SIZE, data, length, prompt
from tests.node.raw import answer, dialled, greet, packed
from tests.node.serving import Thread

PAGE = Path(__file__).parents[2] / "docs" / "protocol.md"
OPERATIONS: tuple[type[msgspec.Struct], ...] = get_args(p.Operation)
VALUES: dict[str, Any] = {
    "groups": [list(msgspec.structs.astuple(g)) for g in p.describe(PLAIN)],
    "block_tokens": PLAIN.block_tokens,
    "namespace": MODEL.namespace(DEFAULT_TENANT),
    "tenant": DEFAULT_TENANT.tag,
    "parent": bytes(32),
    "digests": b"".join(MODEL.namer(DEFAULT_TENANT).chain(prompt(1)).digests),
    "holdings": [],
    "rights": [],
    "names": [],
    "token": "a token of a worker group that does not exist",
    "ttl": None,
    "sealed": True,
    "good": True,
    "on": True,
    "reason": "late",
}
"""Of fields that are no number."""


class Roles(AccessList):
    """Gives everybody the same: only root could come as several users."""

    def __init__(self, role: Role) -> None:
        super().__init__("")
        self.role = role

    def of(self, *_: object) -> Access:
        return Access(self.role)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Thread]:
    thread = Thread(tmp_path_factory.mktemp("node") / "node.sock", dram={"budget": "16MiB", "segment": "4MiB"})
    yield thread
    thread.close()


def become(node: Thread, role: Role) -> None:
    node.node._access_list = Roles(role)


def tag(kind: type[msgspec.Struct]) -> str:
    return str(kind.__struct_config__.tag)


def written() -> dict[str, str]:
    """The documentation's table: operation and role."""
    rows = re.findall(r'^\| `\["(\w+)".*?`  *\| (\w+) \|', PAGE.read_text(), re.MULTILINE)
    assert len(rows) == len(dict(rows))
    return dict(rows)


def test_the_documented_table_is_that_of_the_code() -> None:
    assert written() == {tag(kind): str(NEEDS[kind]) for kind in OPERATIONS}


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("kind", OPERATIONS, ids=tag)
def test_an_operation_is_refused_to_those_whose_role_is_too_small_and_to_nobody_else(
    node: Thread, kind: type[msgspec.Struct], role: Role
) -> None:
    become(node, role)
    needed = Role[written()[tag(kind)].upper()]
    values = VALUES | ({"groups": [0]} if kind is p.Reserve else {})
    fields = [values.get(field.name, 1) for field in msgspec.structs.fields(kind) if field.required]
    with dialled(node.path) as sock:
        greet(sock)
        assert answer(sock)[0] == "welcome"
        sock.sendall(packed([1, [[tag(kind), *fields]]]))
        number, (found,), *_ = answer(sock)
        assert number == 1
    refused = isinstance(found, list) and found[:2] == ["failure", "AccessError"]
    assert refused == (role < needed), found
    if refused:
        assert f"needs the role {needed}, and user" in found[2]


def test_what_is_refused_is_not_done(node: Thread) -> None:
    become(node, Role.WRITE)
    with Client(node.path) as writer, writer.session(MODEL) as session:
        session.store(prompt(1), data(PLAIN, prompt(1)))
        with pytest.raises(AccessError, match="erase needs the role admin"):
            writer.forget(DEFAULT_TENANT.tag)
        become(node, Role.READ)
        with Client(node.path) as reader, reader.session(MODEL) as reading:
            assert reading.store(prompt(2), data(PLAIN, prompt(2))).dropped == 1
            for attempt in (reading.drop, reading.pin):
                with pytest.raises(AccessError, match="needs the role write"):
                    attempt(prompt(1))
            assert (length(reading, prompt(1)), length(reading, prompt(2))) == (SIZE, 0)
        assert session.drop(prompt(1)) == 1
