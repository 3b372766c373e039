"""Settings: one frozen tree, read from defaults < file < environment < arguments.

::

    kvtide.toml            environment                    arguments

    [nvme]
    path = "/mnt/kvtide"   KVTIDE_NVME_PATH=/mnt/kvtide   read(nvme={"path": "/mnt/kvtide"})
    budget = "9GiB"        KVTIDE_NVME_BUDGET=9GiB        read(overrides={"nvme.budget": "9GiB"})

The structs below are the whole description. A field's annotation has its help, its limits and its unit; everything else
follows from that, so that a new setting is one new field. Nothing is ignored: an unknown key is a ``ConfigError`` that
names the nearest known one, and a bad value is an error even if a later layer would have replaced it.

A ``kvtide.toml`` that was not named, but found in the working directory, may have been put there by another user. It is
used only if it belongs to root or to this user, and may not name secrets: see ``_implicit``.
"""

from __future__ import annotations

import grp
import logging
import os
import pwd
import stat
import tomllib
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from functools import cache
from itertools import chain
from math import isfinite
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Struct, ValidationError, convert, field, inspect, structs

from kvtide.errors import ConfigError
from kvtide.units import Unit
from kvtide.units import cpus as _cpus
from kvtide.units import path as _path
from kvtide.units import plain as _plain
from kvtide.units import shares as _shares
from kvtide.units import size as _size
from kvtide.units import time as _time

log = logging.getLogger("kvtide.config")

Value = bool | int | float | str
_Given = tuple[str, str, str, object]  # source, section, name, value
MiB, GiB = 1 << 20, 1 << 30

# --- the tree (annotations are evaluated at first use, so they may call what is defined below) ---


_Policies = Literal["auto", "lru", "reuse"]
_POLICY = (
    "Eviction order. lru: the least recently used block first; reuse: the block least worth keeping by past traffic "
    "first; auto: whichever of the two does better."
)
_Stores = Literal["through", "second-touch", "ghost", "eviction"]
_STORE = (
    "When a block is written to this tier. through: at once; second-touch: when it is used again; ghost: if blocks of "
    "its kind are known to return; eviction: before DRAM evicts it."
)

_QUOTAS = (
    "The most that each named tenant may use of this tier; beyond it, blocks of that tenant are evicted. Tenants that "
    "are not named have no limit."
)
_RESERVED = (
    "The part of this tier reserved for each named tenant. The tenant uses that part only, and other tenants cannot "
    "cause evictions in it."
)


class _Section(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    def __post_init__(self) -> None:
        for name, known in _fields(type(self)).items():
            value = known.clean(getattr(self, name), f"{type(self).__name__}.{name}", "argument")
            structs.force_setattr(self, name, value)


class Dram(_Section, frozen=True):
    """Host memory."""

    budget: Annotated[int, _size("Host memory for blocks.", ge=MiB)] = 4 * GiB
    segment: Annotated[
        int, _size("Size of the segments in which memory is taken from the system.", ge=MiB, multiple_of=4096)
    ] = 256 * MiB
    huge_pages: Annotated[
        Literal["no", "transparent", "2MiB"],
        _plain(
            "Memory pages. no: the system's default; transparent: huge pages where possible; 2MiB: huge pages "
            "reserved with vm.nr_hugepages."
        ),
    ] = "transparent"
    prefault: Annotated[bool, _plain("Take the whole dram.budget when the store opens, in the background.")] = False
    checksum: Annotated[
        bool,
        _plain("Checksum blocks in memory when they are sealed and verify them when they are read, for debugging."),
    ] = False
    policy: Annotated[_Policies, _plain(_POLICY)] = "auto"
    quotas: Annotated[str, _shares(_QUOTAS)] = ""
    reserved: Annotated[str, _shares(_RESERVED)] = ""


class Nvme(_Section, frozen=True):
    """A local disk."""

    path: Annotated[str, _path("Folder for the blocks of this tier; empty turns the tier off.")] = ""
    budget: Annotated[int, _size("Disk space for blocks.", ge=16 * MiB)] = 64 * GiB
    segment: Annotated[
        int,
        _size(
            "Size of the segments in which disk space is taken; less if blocks have many sizes.",
            ge=MiB,
            multiple_of=4096,
        ),
    ] = 256 * MiB
    threads: Annotated[int, _plain("Blocks written to the disk in parallel; twice as many are read.", ge=1, le=64)] = 8
    direct: Annotated[bool, _plain("Use O_DIRECT if the filesystem supports it.")] = True
    durable: Annotated[bool, _plain("Flush the device before a block counts as written.")] = False
    codec: Annotated[Literal["raw", "zstd"], _plain("Compression of blocks on disk.")] = "raw"
    store: Annotated[_Stores, _plain(_STORE)] = "ghost"
    write_limit: Annotated[
        int, _size("The most bytes per second written to the disk, on average; 0: no limit.", ge=0)
    ] = 0
    drive_writes_per_day: Annotated[
        float, _plain("How many times per day nvme.budget may be written, on average; 0: no limit.", ge=0)
    ] = 0.0
    queue: Annotated[
        int, _size("The most bytes that may wait to be written to this tier; writes beyond that are dropped.", ge=1)
    ] = GiB
    token_ids: Annotated[bool, _plain("Store the token ids of blocks in their headers on disk.")] = False
    policy: Annotated[_Policies, _plain(_POLICY)] = "lru"
    quotas: Annotated[str, _shares(_QUOTAS)] = ""
    reserved: Annotated[str, _shares(_RESERVED)] = ""


class Storage(_Section, frozen=True):
    """Settings of all storage that other hosts use too."""

    threads: Annotated[
        int, _plain("Blocks written to this storage in parallel; twice as many are read.", ge=1, le=256)
    ] = 8
    timeout: Annotated[
        float, _time("How long a block's read or write may take before the storage counts as hung.", ge=0.01)
    ] = 10.0
    codec: Annotated[Literal["raw", "zstd"], _plain("Compression of blocks in this storage.")] = "raw"
    store: Annotated[_Stores, _plain(_STORE)] = "through"
    budget: Annotated[
        int,
        _size(
            "The most bytes that all stores and nodes together may use in this storage; must be the same for each of "
            "them; 0: no limit.",
            ge=0,
        ),
    ] = 0
    quotas: Annotated[
        str,
        _shares(
            "The most that each named tenant may use of this storage; each node counts only what it has written since "
            "it started."
        ),
    ] = ""
    lease: Annotated[
        float,
        _time(
            "How long the process that coordinates this storage's byte budget may be silent before another process "
            "takes over.",
            ge=0.1,
        ),
    ] = 6.0
    queue: Annotated[
        int, _size("The most bytes that may wait to be written to this tier; writes beyond that are dropped.", ge=1)
    ] = GiB


class Files(Storage, frozen=True):
    """A filesystem that other hosts, or other processes, use too."""

    path: Annotated[str, _path("Folder for the blocks of this tier; empty turns the tier off.")] = ""
    direct: Annotated[bool, _plain("Use O_DIRECT if the filesystem supports it.")] = True


class Objects(Storage, frozen=True):
    """An object store: S3, Google Cloud Storage, Azure. Credentials come from where its own tools look for them."""

    url: Annotated[
        str,
        _plain(
            "Bucket and folder: s3://BUCKET/FOLDER, gs://... or az://ACCOUNT/CONTAINER/...; empty turns the tier off."
        ),
    ] = ""
    endpoint: Annotated[
        str,
        _plain("Server to use instead of the default one for the kind of objects.url, for example https://minio:9000."),
    ] = ""
    region: Annotated[str, _plain("Region of the bucket; empty: taken from the environment, else us-east-1.")] = ""
    certificate: Annotated[
        str, _path("File with the CA certificate that verifies the server; empty: the system's CA certificates.")
    ] = ""
    requests: Annotated[int, _plain("The most concurrent requests to the object store.", ge=1, le=1024)] = 32


class Valkey(Storage, frozen=True):
    """Valkey, Redis or a cluster of them. It must have a maxmemory, and evict by use."""

    threads: Annotated[
        int, _plain("Write calls in parallel, each for several blocks; twice as many read calls.", ge=1, le=256)
    ] = 2
    url: Annotated[
        str, _plain("Server address: valkey://HOST:6379/0, or valkeys:// for TLS; empty turns the tier off.")
    ] = ""
    user: Annotated[str, _plain("User name for authentication; empty: the default user.")] = ""
    password_file: Annotated[str, _path("File with the password; empty: no password.")] = ""
    certificate: Annotated[
        str, _path("File with the CA certificate that verifies the server; empty: the system's CA certificates.")
    ] = ""
    identity: Annotated[str, _path("File with the client certificate and its key, if the server requires one.")] = ""
    ttl: Annotated[
        float, _time("How long Valkey keeps a block after it was written; 0: until it is evicted.", ge=0)
    ] = 0.0


class Mooncake(Storage, frozen=True):
    """A Mooncake Store: memory that Mooncake's clients put together. It evicts by itself, so budget must be 0."""

    threads: Annotated[
        int,
        _plain(
            "Calls of Mooncake's library that move bytes at a time; twice as many blocks are verified.",
            ge=1,
            le=256,
        ),
    ] = 2
    url: Annotated[
        str,
        _plain(
            "Address of the master: mooncake://HOST:50051?metadata=P2PHANDSHAKE&segment=0&admin=9003; empty turns the "
            "tier off."
        ),
    ] = ""


class Peers(_Section, frozen=True):
    """Other nodes, whose memory and disks this node reads, and which may read its own."""

    addresses: Annotated[
        str,
        _plain(
            'Addresses of nodes whose blocks this node reads: "10.0.0.7:9411 10.0.0.8:9411"; its own may be among '
            "them, so that all nodes can have the same list; empty: those in peers.directory, or none."
        ),
    ] = ""
    directory: Annotated[
        str,
        _plain(
            "Valkey server that keeps the list of nodes and who has which block: valkey://HOST:6379/0, or valkeys:// "
            "for TLS; embedded: this node starts a server itself, at the next port after that of peers.listen; "
            "embedded://HOST:PORT: one that another node has started; empty: none."
        ),
    ] = ""
    directory_user: Annotated[
        str, _plain("User name for authentication at peers.directory; empty: the default user.")
    ] = ""
    directory_password_file: Annotated[
        str, _path("File with the password for peers.directory; empty: no password.")
    ] = ""
    directory_certificate: Annotated[
        str,
        _path(
            "File with the CA certificate that verifies the server of peers.directory; empty: the system's CA "
            "certificates."
        ),
    ] = ""
    directory_identity: Annotated[
        str,
        _path("File with the client certificate and its key, if the server of peers.directory requires one."),
    ] = ""
    cluster: Annotated[
        str,
        _plain("Name of the cluster in peers.directory: nodes with different names do not know of each other."),
    ] = "kvtide"
    lease: Annotated[
        float,
        _time(
            "How long peers.directory lists a node that it does not hear from; must be the same for all nodes.", ge=1.0
        ),
    ] = 10.0
    most: Annotated[
        int,
        _plain(
            "The most nodes of peers.directory that are read from at a time; others replace them when they are needed. "
            "Each takes 9 bytes of memory for every block that the index has room for, also if it is never needed.",
            ge=1,
            le=32,
        ),
    ] = 8
    listen: Annotated[
        str,
        _plain(
            "Address at which other nodes may read this node's blocks, for example 10.0.0.7:9411; empty: they may not."
        ),
    ] = ""
    announce: Annotated[
        str,
        _plain(
            "Address of this node that peers.directory tells other nodes, if they cannot use that of peers.listen, "
            "for example because that is 0.0.0.0:9411; empty: that of peers.listen."
        ),
    ] = ""
    token_file: Annotated[
        str,
        _path(
            "File with a secret that all the nodes have, by which they authenticate each other; it is never sent; "
            "empty: they authenticate by certificates."
        ),
    ] = ""
    certificate: Annotated[
        str, _path("File with the certificate of this node and its key, for mutual TLS among the nodes; empty: no TLS.")
    ] = ""
    authority: Annotated[str, _path("File with the CA certificate that verifies the certificates of other nodes.")] = ""
    names: Annotated[
        str, _plain('Names in the certificates of nodes that may read, and be read from: "host7 host8.example.com".')
    ] = ""
    timeout: Annotated[
        float,
        _time(
            "How long a node may take to connect, to answer or to take an answer, and a second more for each 16 MiB of "
            "blocks; a lookup may take half a second at most.",
            ge=0.01,
        ),
    ] = 2.0
    hedge: Annotated[
        float,
        _plain(
            "The part of the reads from nodes that may be ended because they take much longer than expected, to read "
            "from a second node that has the blocks; 0: none.",
            ge=0,
            le=1,
        ),
    ] = 0.05
    connections: Annotated[
        int,
        _plain(
            "Connections to each node for blocks; there is one more for lookups. 0: four, or two with TLS, with "
            "peers.fabric, or if this process may use fewer than four CPUs.",
            ge=0,
            le=32,
        ),
    ] = 0
    fabric: Annotated[
        Literal["tcp", "auto", "nixl"],
        _plain(
            "What moves blocks between nodes: tcp; auto: NIXL between two nodes that both have it and an RDMA device, "
            "and TCP otherwise; nixl: NIXL without an RDMA device too. It needs the package nixl-cu12. Who can reach "
            "the RDMA network can read blocks on their way and end that transport: docs/peers.md."
        ),
    ] = "tcp"


class Plan(_Section, frozen=True):
    """What is loaded or recomputed."""

    prefill_tokens_per_second: Annotated[
        float,
        _plain(
            "The engine's prefill speed: blocks that would load more slowly than that are recomputed; 0: unknown, so "
            "that everything is loaded.",
            ge=0,
        ),
    ] = 0.0
    deadline_seconds: Annotated[
        float, _time("Time after which a load ends with the blocks that have arrived; 0: no limit.", ge=0)
    ] = 0.0


class Naming(_Section, frozen=True):
    """How blocks get their keys."""

    weights_cache: Annotated[
        str, _path("File that caches the digests of model weights; empty: kvtide/weights.json in ~/.cache.")
    ] = ""


class Security(_Section, frozen=True):
    """Encryption at rest, keys, and the audit log."""

    encrypt: Annotated[bool, _plain("Encrypt all data written outside DRAM, with a key for each tenant.")] = False
    accept_open: Annotated[
        bool,
        _plain(
            "Accept unencrypted records on NVMe, written before security.encrypt was turned on; such records could "
            "also be forged without a key."
        ),
    ] = False
    key_source: Annotated[
        str,
        _plain(
            "What encrypts (wraps) the tenants' keys: a key in file:PATH or env:NAME, or the transit engine of a Vault "
            "server at vault:https://HOST:8200/transit/NAME."
        ),
    ] = ""
    key_file: Annotated[
        str, _path("File of wrapped keys and legal holds. Keep it on a disk other than the one that it protects.")
    ] = ""
    lease: Annotated[
        float, _time("How long a key is used after it was last found in security.key_file.", ge=1, le=86400)
    ] = 60.0
    audit: Annotated[str, _path("File of the audit log; empty: audit.jsonl in the folder of security.key_file.")] = ""


class Record(_Section, frozen=True):
    """Records requested prompts, without their content, for kvtide replay."""

    path: Annotated[
        str,
        _path(
            "New file for a recording of requests, gzip if its name ends in .gz; or a folder, in which each start "
            "creates its own file; empty: nothing is recorded."
        ),
    ] = ""
    limit: Annotated[int, _size("Size of the file at which recording ends.", ge=4096)] = GiB


class Explain(_Section, frozen=True):
    """Records of why blocks are absent, for kvtide explain."""

    memory: Annotated[
        int,
        _size(
            "Memory for records of why blocks left the store or did not get in, 16 bytes each; half as much again for "
            "recent requests, and an eighth for descriptions of models; 0: nothing is recorded.",
            ge=0,
        ),
    ] = 4 * MiB


class Events(_Section, frozen=True):
    """KV events: a node tells routers over ZeroMQ which blocks it has."""

    endpoint: Annotated[
        str,
        _plain(
            "Address at which a node publishes KV events to whoever connects, for example tcp://127.0.0.1:5557 or "
            "ipc:///run/kvtide.events; empty: it publishes none."
        ),
    ] = ""
    replay: Annotated[
        str,
        _plain(
            "Address at which consumers ask for events that they missed, for example tcp://127.0.0.1:5558; empty: they "
            "cannot."
        ),
    ] = ""
    topic: Annotated[
        str, _plain("Topic of the events. llm-d needs kv@ADDRESS@MODEL, with the address of the engine's server.")
    ] = ""
    form: Annotated[
        Literal["map", "array"],
        _plain("Form of an event. map: as vLLM sends them from 0.24 on; array: as before, and as SGLang sends them."),
    ] = "map"
    token_ids: Annotated[
        bool,
        _plain("Send the token ids of blocks, so the text of prompts. Routers cannot use events without them."),
    ] = False
    tenants: Annotated[
        str,
        _plain("Tags of tenants whose blocks are published, besides those of the default tenant; each 32 hex digits."),
    ] = ""
    block_tokens: Annotated[
        int, _plain("Tokens of a block in events, as routers expect them; 0: those of the node's own blocks.", ge=0)
    ] = 0
    shared: Annotated[
        Literal["local", "remote", "no"],
        _plain(
            "How blocks in shared storage and in other nodes are published. local: like those on the local disk; "
            "remote: as remote, which today's routers ignore; no: not at all."
        ),
    ] = "local"
    buffer: Annotated[
        int,
        _size("Memory for the last events, for replays, and for those that each consumer has not read.", ge=MiB),
    ] = 64 * MiB


class Node(_Section, frozen=True):
    """A store in its own process, the node."""

    client_share: Annotated[
        float,
        _plain("The share of DRAM that one client may hold; blocks beyond that are misses for it.", ge=0.01, le=1),
    ] = 0.9
    users: Annotated[
        str,
        _plain(
            'Users and @groups that may connect, with trust domain and role: "1001:blue 1002:blue:read @ops::admin".'
        ),
    ] = ""
    http: Annotated[
        str,
        _plain(
            "Address of the HTTP server for /healthz, /metrics and /status, for example 127.0.0.1:9410; empty: no "
            "server."
        ),
    ] = ""
    hosts: Annotated[
        str,
        _plain(
            "Host names accepted in requests for /metrics and /status if neither certificates nor tokens are required, "
            "in addition to localhost, the server's address and this host's name."
        ),
    ] = ""
    certificate: Annotated[str, _path("File with the node's certificate and its key, for HTTPS; empty: HTTP.")] = ""
    authority: Annotated[
        str,
        _path("File with the CA certificate for HTTPS clients' certificates; if set, clients must have a certificate."),
    ] = ""
    names: Annotated[
        str,
        _plain('Roles of HTTPS clients, by the names in their certificates: "prometheus:read ops.example.com:admin".'),
    ] = ""
    tokens: Annotated[
        str,
        _plain(
            "Bearer tokens, instead of client certificates: file:PATH or env:NAME with lines of a name, a role and a "
            "token."
        ),
    ] = ""
    cpus: Annotated[
        str,
        _cpus(
            "CPUs that the node uses. Empty: all that its control group allows if an engine started it, else those of "
            "the process that started it. inherit: always those of the process that started it."
        ),
    ] = ""


class Engine(_Section, frozen=True):
    """The connector of an inference engine, for example vLLM."""

    address: Annotated[
        str,
        _plain(
            "Address of the node on this host, for example unix:/run/kvtide.sock; empty: the engine's own node, "
            "started if necessary."
        ),
    ] = ""
    weights_id: Annotated[
        str,
        _plain("The identity of the model's weights; empty: the Hugging Face hub's commit, or a digest of the files."),
    ] = ""
    store: Annotated[
        Literal["auto", "through", "second-touch"],
        _plain(
            "Which blocks the engine stores. through: every block as it is computed, and to the disk at once in a node "
            "that the engine starts; second-touch: blocks that are used again; auto: every block if DRAM is larger "
            "than the engine's own pool, else blocks that are used again."
        ),
    ] = "auto"
    trust_tenants: Annotated[
        bool,
        _plain("Whether a request may name its tenant. It must then also have a cache salt, set by the front end."),
    ] = False


class Config(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every setting. ``Config()`` has the defaults; ``read()`` also reads the file and the environment."""

    dram: Dram = field(default_factory=Dram)
    nvme: Nvme = field(default_factory=Nvme)
    valkey: Valkey = field(default_factory=Valkey)
    mooncake: Mooncake = field(default_factory=Mooncake)
    files: Files = field(default_factory=Files)
    objects: Objects = field(default_factory=Objects)
    peers: Peers = field(default_factory=Peers)
    plan: Plan = field(default_factory=Plan)
    naming: Naming = field(default_factory=Naming)
    security: Security = field(default_factory=Security)
    record: Record = field(default_factory=Record)
    explain: Explain = field(default_factory=Explain)
    events: Events = field(default_factory=Events)
    node: Node = field(default_factory=Node)
    engine: Engine = field(default_factory=Engine)


class Setting(Struct, frozen=True):
    """One value and its source: ``default``, a file, an environment variable or ``argument``."""

    name: str
    value: Value
    text: str
    source: str
    help: str
    accepts: str
    """The values that it may have, in words."""


# --- a setting ----------------------------------------------------------------------------------

_WANTED = {inspect.BoolType: "true or false", inspect.IntType: "a whole number", inspect.StrType: "text"}
_LIMITS = {"ge": "at least", "le": "at most", "multiple_of": "a multiple of"}


class _Field(Struct, frozen=True):
    type: Any  # as annotated
    kind: inspect.Type
    unit: Unit
    help: str
    default: Value

    def clean(self, given: object, name: str, source: str) -> Value:
        plain = os.fspath(given) if isinstance(given, os.PathLike) else given
        try:
            parsed = self.unit.parse(plain) if isinstance(plain, str) else plain
            value: Value = convert(parsed, self.type, strict=False)
            if isinstance(value, str) or isfinite(value):
                return value
        except (ConfigError, ValidationError, OverflowError, RuntimeError):  # RuntimeError: "~nobody" has no home
            pass
        raise ConfigError(f"{source}: {name} is {given!r}; it must be {self.accepts()}")

    def accepts(self) -> str:
        if isinstance(self.kind, inspect.LiteralType):
            return f"one of {', '.join(map(repr, self.kind.values))}"
        limits = ((words, getattr(self.kind, limit, None)) for limit, words in _LIMITS.items())
        said = [f"{words} {self.unit.format(at)}" for words, at in limits if at is not None]
        return ", ".join([self.unit.wanted or _WANTED.get(type(self.kind), "a number"), *said])


@cache
def _fields(section: type[Struct]) -> dict[str, _Field]:
    found = {}
    for info in structs.fields(section):
        meta: Any = inspect.type_info(info.type)  # always Metadata: every field is Annotated
        unit, text = meta.extra["unit"], meta.extra_json_schema["description"]
        found[info.name] = _Field(info.type, meta.type, unit, text, info.default)
    return found


@cache
def _sections() -> dict[str, type[Struct]]:
    return {info.name: info.type for info in structs.fields(Config)}


# --- where values come from ----------------------------------------------------------------------


def read(
    file: str | Path | None = None,
    env: Mapping[str, str] | None = None,
    overrides: Mapping[str, object] | None = None,
    **sections: object,
) -> Config:
    """The settings in force.

    ``file`` defaults to ``$KVTIDE_CONFIG``, else to ``./kvtide.toml`` if that exists and belongs to root or this user;
    ``env`` defaults to the process's environment. Arguments are sections (``dram={"budget": "1GiB"}``) or dotted names
    in a mapping (``{"dram.budget": "1GiB"}``). Raises ``ConfigError``.
    """
    tree: dict[str, dict[str, Value]] = {section: {} for section in _sections()}
    for setting in explain(file, env, overrides, **sections):
        section, _, name = setting.name.partition(".")
        tree[section][name] = setting.value
    return convert(tree, Config)


def explain(
    file: str | Path | None = None,
    env: Mapping[str, str] | None = None,
    overrides: Mapping[str, object] | None = None,
    **sections: object,
) -> list[Setting]:
    """Every setting in the order of the tree, with its source. Takes the same arguments as ``read``."""
    env = os.environ if env is None else env
    found: dict[tuple[str, str], tuple[Value, str]] = {}
    arguments = _from_tree({**(overrides or {}), **sections}, "argument")
    for source, section, name, given in chain(_from_file(file, env), _from_env(env), arguments):
        fields = _fields(_sections()[section])
        if name not in fields:
            raise _unknown(f"{source}: [{section}] has no setting {name!r}", name, fields)
        found[section, name] = fields[name].clean(given, f"{section}.{name}", source), source
    settings = []
    for section, struct in _sections().items():
        for name, known in _fields(struct).items():
            value, source = found.get((section, name), (known.default, "default"))
            text = known.unit.format(value) or '""'
            settings.append(Setting(f"{section}.{name}", value, text, source, known.help, known.accepts()))
    return settings


def _from_file(file: str | Path | None, env: Mapping[str, str]) -> Iterator[_Given]:
    chosen = file or env.get("KVTIDE_CONFIG")
    path = Path(chosen or _HERE)
    try:
        path = path.expanduser()
        text = path.read_text("utf-8") if chosen else _implicit()
        tree = tomllib.loads(text or "")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} cannot be read as TOML: it is not text in UTF-8") from error
    except (OSError, ValueError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{path} cannot be read as TOML: {reason}") from error
    for source, section, name, given in _from_tree(tree, str(path)):
        if not chosen and f"{section}.{name}" in SECRETS and given:
            raise ConfigError(
                f"{path}: {section}.{name} leads to a secret, and this file was read only because it lies in the "
                f"working directory, where others may have put it: name it with --config {path} or "
                f"KVTIDE_CONFIG={path}, or give the setting in the environment"
            )
        yield source, section, name, given


_HERE = "kvtide.toml"
SECRETS = frozenset(
    {
        "node.certificate",
        "node.tokens",
        "peers.certificate",
        "peers.directory_identity",
        "peers.directory_password_file",
        "peers.token_file",
        "security.key_file",
        "security.key_source",
        "valkey.identity",
        "valkey.password_file",
    }
)
"""Settings that lead to secrets. A file that was not named may not have them: its author could make this process use a
key or a password at a place of the author's choice, or wrap keys with a key known to the author. Ownership is no
protection: the files of a cloned repository belong to the user."""
_warned: set[tuple[int, int]] = set()
"""Files that were ignored, by device and inode: each is reported once."""


def _implicit() -> str | None:
    """The text of ``kvtide.toml`` in the working directory; None if there is none, or if it cannot be trusted.

    A file of another user is ignored, with a warning: in a folder that all users may write to, such as /tmp, any user
    can create one, and an error would let that user stop others who work there. A file of root or of this user that
    others may write to is an error: its owner can fix that, and ignoring it would silently change the settings.
    """
    trusted = {0, os.geteuid()}
    try:
        about = os.lstat(_HERE)
        if about.st_uid not in trusted:
            _ignored(about)  # whatever it is: a link may lead to a file of ours that is meant for another place
            return None
        # O_NONBLOCK: a FIFO that replaces the file now, or one without a writer, must not block us.
        with open(os.open(_HERE, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), encoding="utf-8") as f:
            about = os.fstat(f.fileno())
            if not stat.S_ISREG(about.st_mode):
                return None
            if about.st_uid not in trusted:
                _ignored(about)
                return None
            mode = stat.S_IMODE(about.st_mode)
            if mode & stat.S_IWOTH or (mode & stat.S_IWGRP and not _alone(about.st_uid, about.st_gid)):
                raise ConfigError(
                    f"{Path(_HERE).absolute()} belongs to {_user(about.st_uid)}, but others may write to it (mode "
                    f"{mode:04o}): chmod go-w {_HERE}, or name the file with --config or KVTIDE_CONFIG"
                )
            return f.read()
    except (FileNotFoundError, IsADirectoryError):
        return None


def _ignored(about: os.stat_result) -> None:
    if (about.st_dev, about.st_ino) not in _warned:
        _warned.add((about.st_dev, about.st_ino))
        log.warning(
            "%s is ignored: it belongs to %s (mode %04o), not to root or to %s. If you trust it, name it with --config "
            "or KVTIDE_CONFIG",
            Path(_HERE).absolute(),
            _user(about.st_uid),
            stat.S_IMODE(about.st_mode),
            _user(os.geteuid()),
        )


def _alone(uid: int, gid: int) -> bool:
    """Whether a group is a user's private group, as most systems create it: files written with umask 002 are then
    writable by that user alone."""
    try:
        user, group = pwd.getpwuid(uid), grp.getgrgid(gid)
    except KeyError:
        return False
    return user.pw_gid == gid and user.pw_name == group.gr_name and set(group.gr_mem) <= {user.pw_name}


def _user(uid: int) -> str:
    try:
        return f"user {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"user {uid}"


def _from_env(env: Mapping[str, str]) -> Iterator[_Given]:
    for variable, text in env.items():
        for section in _sections():
            if f"{variable}_".startswith(prefix := f"KVTIDE_{section.upper()}_"):
                yield variable, section, variable[len(prefix) :].lower(), text


def _from_tree(tree: Mapping[str, object], source: str) -> Iterator[_Given]:
    for key, given in tree.items():
        section, _, name = key.partition(".")
        if section not in _sections():
            raise _unknown(f"{source}: there is no section [{section}]", section, _sections())
        whole = structs.asdict(given) if isinstance(given, _Section) else given
        part = {name: given} if name else whole
        if not isinstance(part, Mapping):
            raise ConfigError(f"{source}: [{section}] is {given!r}; it must be a table of settings")
        yield from ((source, section, str(inner), value) for inner, value in part.items())


def _unknown(what: str, name: str, known: Mapping[str, object]) -> ConfigError:
    near = get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"there is {', '.join(known)}"
    return ConfigError(f"{what}; {hint}")
