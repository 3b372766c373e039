"""Settings: one frozen tree, read from defaults < file < environment < arguments.

::

    kvtide.toml            environment                    arguments
    [nvme]
    path = "/mnt/kvtide"   KVTIDE_NVME_PATH=/mnt/kvtide   read(nvme={"path": "/mnt/kvtide"})
    budget = "9GiB"        KVTIDE_NVME_BUDGET=9GiB        read(overrides={"nvme.budget": "9GiB"})

The structs below are the whole description. A field's annotation carries its help, its limits and
how it is written; everything else follows from it, so that a new setting is one new field. Nothing
is ignored: an unknown key is a ``ConfigError`` that names the nearest known one, and a bad value is
an error even where a later layer would have replaced it.

A ``kvtide.toml`` that nobody named, because it lies in the working directory, may have been put there by somebody else.
It is used only if it belongs to root or to this user, and may not name secrets: see ``_implicit``.
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

# --- the tree (annotations are evaluated at first use, so what they call can stand below) --------


_Policies = Literal["auto", "lru", "reuse"]
_POLICY = "What is evicted first: least recently used, least worth keeping by experience, or whichever does better."
_Stores = Literal["through", "second-touch", "ghost", "eviction"]
_STORE = (
    "When a block is written: at once, at its second use, if its kind is known to come back, or when DRAM evicts it."
)

_QUOTAS = "What tenants may have at most; beyond it they lose blocks of their own. All others: no limit."
_RESERVED = "What is set aside for tenants who live in that alone; nobody else's pressure reaches it."


class _Section(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    def __post_init__(self) -> None:
        for name, known in _fields(type(self)).items():
            value = known.clean(getattr(self, name), f"{type(self).__name__}.{name}", "argument")
            structs.force_setattr(self, name, value)


class Dram(_Section, frozen=True):
    """Host memory."""

    budget: Annotated[int, _size("Host memory that blocks may take.", ge=MiB)] = 4 * GiB
    segment: Annotated[int, _size("Memory taken at a time.", ge=MiB, multiple_of=4096)] = 256 * MiB
    huge_pages: Annotated[
        Literal["no", "transparent", "2MiB"],
        _plain("Pages of memory: the system's choice, huge where it can, or those set aside with vm.nr_hugepages."),
    ] = "transparent"
    prefault: Annotated[bool, _plain("Take the whole budget at opening, in the background.")] = False
    checksum: Annotated[bool, _plain("Make checksums at seal too, for debugging.")] = False
    policy: Annotated[_Policies, _plain(_POLICY)] = "auto"
    quotas: Annotated[str, _shares(_QUOTAS)] = ""
    reserved: Annotated[str, _shares(_RESERVED)] = ""


class Nvme(_Section, frozen=True):
    """A local disk."""

    path: Annotated[str, _path("Folder of this tier; empty turns the tier off.")] = ""
    budget: Annotated[int, _size("Disk space that blocks may take.", ge=16 * MiB)] = 64 * GiB
    segment: Annotated[
        int, _size("Space taken at a time; less if blocks have many sizes.", ge=MiB, multiple_of=4096)
    ] = 256 * MiB
    threads: Annotated[int, _plain("Blocks written to the disk at a time; twice as many are read.", ge=1, le=64)] = 8
    direct: Annotated[bool, _plain("Use O_DIRECT where the filesystem has it.")] = True
    durable: Annotated[bool, _plain("Flush the device before a store is acknowledged.")] = False
    codec: Annotated[Literal["raw", "zstd"], _plain("How blocks are packed on disk.")] = "raw"
    store: Annotated[_Stores, _plain(_STORE)] = "ghost"
    write_limit: Annotated[int, _size("Bytes a second written on average; 0: no limit.", ge=0)] = 0
    drive_writes_per_day: Annotated[
        float, _plain("How often a day the budget may be written over, on average; 0: no limit.", ge=0)
    ] = 0.0
    queue: Annotated[int, _size("Bytes that may wait to be written; more is dropped.", ge=1)] = GiB
    token_ids: Annotated[bool, _plain("Keep token ids in the headers on disk.")] = False
    policy: Annotated[_Policies, _plain(_POLICY)] = "lru"
    quotas: Annotated[str, _shares(_QUOTAS)] = ""
    reserved: Annotated[str, _shares(_RESERVED)] = ""


class Storage(_Section, frozen=True):
    """What all storage has that other hosts use too."""

    threads: Annotated[int, _plain("Blocks written at a time; twice as many are read.", ge=1, le=256)] = 8
    timeout: Annotated[float, _time("How long storage may take for a block before it counts as hung.", ge=0.01)] = 10.0
    codec: Annotated[Literal["raw", "zstd"], _plain("How blocks are packed there.")] = "raw"
    store: Annotated[_Stores, _plain(_STORE)] = "through"
    budget: Annotated[
        int, _size("Bytes that all who use it may take together, the same for each of them; 0: nobody counts.", ge=0)
    ] = 0
    quotas: Annotated[
        str, _shares("What tenants may have there at most, of what each node has written since it was started.")
    ] = ""
    lease: Annotated[
        float, _time("How long the one who keeps the budget may be silent before another does.", ge=0.1)
    ] = 6.0
    queue: Annotated[int, _size("Bytes that may wait to be written; more is dropped.", ge=1)] = GiB


class Files(Storage, frozen=True):
    """A filesystem that other hosts, or other processes, use too."""

    path: Annotated[str, _path("Folder of this tier; empty turns the tier off.")] = ""
    direct: Annotated[bool, _plain("Use O_DIRECT where the filesystem has it.")] = True


class Objects(Storage, frozen=True):
    """An object store: S3, Google Cloud Storage, Azure. Credentials come from where its own tools look for them."""

    url: Annotated[
        str, _plain("s3://BUCKET/FOLDER, gs://... or az://ACCOUNT/CONTAINER/...; empty turns the tier off.")
    ] = ""
    endpoint: Annotated[str, _plain("Another server than that of the url's kind: https://minio:9000, say.")] = ""
    region: Annotated[str, _plain("Region of the bucket; empty: from the environment, else us-east-1.")] = ""
    certificate: Annotated[str, _path("File with the authority of its certificate; empty: the usual ones.")] = ""
    requests: Annotated[int, _plain("Requests under way at a time.", ge=1, le=1024)] = 32


class Valkey(Storage, frozen=True):
    """Valkey, Redis or a cluster of them. It must have a maxmemory, and evict by use."""

    threads: Annotated[
        int, _plain("Writing calls at a time, each of several blocks; twice as many read.", ge=1, le=256)
    ] = 2
    url: Annotated[str, _plain("valkey://HOST:6379/0, or valkeys:// for TLS; empty turns the tier off.")] = ""
    user: Annotated[str, _plain("Whose password it is; empty: the default user's.")] = ""
    password_file: Annotated[str, _path("File with the password; empty: there is none.")] = ""
    certificate: Annotated[str, _path("File with the authority of its certificate; empty: the usual ones.")] = ""
    identity: Annotated[str, _path("File with our own certificate and key, where it wants one.")] = ""
    ttl: Annotated[float, _time("How long a block stays after it was written; 0: until it is evicted.", ge=0)] = 0.0


class Plan(_Section, frozen=True):
    """What moves, and when."""

    prefill_tokens_per_second: Annotated[
        float, _plain("Speed of recomputing, which loads must beat; 0: unknown, load.", ge=0)
    ] = 0.0
    deadline_seconds: Annotated[float, _time("When a load is given up; 0: never.", ge=0)] = 0.0


class Naming(_Section, frozen=True):
    """How blocks get their keys."""

    weights_cache: Annotated[str, _path("File of weights digests; empty: in ~/.cache.")] = ""


class Security(_Section, frozen=True):
    """Encryption at rest, keys, and the log of who did what."""

    encrypt: Annotated[bool, _plain("Seal what is written outside DRAM, with a key for each tenant.")] = False
    accept_open: Annotated[
        bool, _plain("Use records of NVMe from before encrypt was turned on, which somebody without a key could make.")
    ] = False
    key_source: Annotated[
        str, _plain("What wraps the keys: file:PATH, env:NAME or vault:https://HOST:8200/transit/NAME.")
    ] = ""
    key_file: Annotated[str, _path("File of wrapped keys and legal holds. Not on the disk that it protects.")] = ""
    lease: Annotated[
        float, _time("How long a key is used after it was last found in the key file.", ge=1, le=86400)
    ] = 60.0
    audit: Annotated[str, _path("File of the audit log; empty: audit.jsonl beside the key file.")] = ""


class Record(_Section, frozen=True):
    """Which prompts are asked for, written down without their content, for kvtide replay."""

    path: Annotated[
        str,
        _path(
            "New file for a recording, gzip if its name ends in .gz; or a folder, in which each start gets a file of "
            "its own; empty: nothing is recorded."
        ),
    ] = ""
    limit: Annotated[int, _size("Bytes of the file at which recording ends.", ge=4096)] = GiB


class Node(_Section, frozen=True):
    """A store in a process of its own."""

    client_share: Annotated[
        float, _plain("The part of DRAM that one client may hold; more is a miss for it.", ge=0.01, le=1)
    ] = 0.9
    users: Annotated[
        str,
        _plain(
            'Users and @groups that may connect, with trust domain and role: "1001:blue 1002:blue:read @ops::admin".'
        ),
    ] = ""
    http: Annotated[
        str, _plain("Where it answers /healthz, /metrics and /status: 127.0.0.1:9410, say; empty: nowhere.")
    ] = ""
    hosts: Annotated[
        str,
        _plain(
            "Names, beside localhost, its address and this host's name, by which /metrics and /status are asked for "
            "where nobody needs a certificate or token."
        ),
    ] = ""
    certificate: Annotated[str, _path("File with our own certificate and its key, for HTTPS; empty: HTTP.")] = ""
    authority: Annotated[
        str, _path("File with the authority of certificates of those who ask over HTTPS, and who must have one.")
    ] = ""
    names: Annotated[str, _plain('Roles by the names in those: "prometheus:read ops.example.com:admin".')] = ""
    tokens: Annotated[
        str, _plain("Instead of them, file:PATH or env:NAME of lines of a name, a role and a bearer token.")
    ] = ""
    cpus: Annotated[
        str,
        _cpus(
            "CPUs that it works on; empty: all that its control group allows if an engine started it, those of whoever "
            "started it by hand; inherit: those of whoever started it, an engine too."
        ),
    ] = ""


class Engine(_Section, frozen=True):
    """The connector of an engine, vLLM say."""

    address: Annotated[
        str, _plain("The node of this host: unix:/run/kvtide.sock, say; empty: one of its own, started if need be.")
    ] = ""
    weights_id: Annotated[
        str, _plain("The identity of the model's weights; empty: by the hub's commit, or a digest of the files.")
    ] = ""
    store: Annotated[
        Literal["auto", "through", "second-touch"],
        _plain(
            "What is stored: every block as it is computed, those that are used again, or the first where DRAM is "
            "larger than the engine's own pool. Through also means at once to the disk."
        ),
    ] = "auto"
    trust_tenants: Annotated[
        bool, _plain("Whether a request may name its tenant, beside a cache salt that the front door has set.")
    ] = False


class Config(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every setting. ``Config()`` is the defaults; ``read()`` asks file and environment too."""

    dram: Dram = field(default_factory=Dram)
    nvme: Nvme = field(default_factory=Nvme)
    valkey: Valkey = field(default_factory=Valkey)
    files: Files = field(default_factory=Files)
    objects: Objects = field(default_factory=Objects)
    plan: Plan = field(default_factory=Plan)
    naming: Naming = field(default_factory=Naming)
    security: Security = field(default_factory=Security)
    record: Record = field(default_factory=Record)
    node: Node = field(default_factory=Node)
    engine: Engine = field(default_factory=Engine)


class Setting(Struct, frozen=True):
    """One value and its source: ``default``, a file, an environment variable or ``argument``."""

    name: str
    value: Value
    text: str
    source: str
    help: str


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

    ``file`` defaults to ``$KVTIDE_CONFIG``, else ``./kvtide.toml`` where there is one that is root's
    or this user's; ``env`` defaults to the process's environment. Arguments are sections
    (``dram={"budget": "1GiB"}``) or dotted names in a mapping (``{"dram.budget": "1GiB"}``). Raises ``ConfigError``.
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
    """Every setting in the order of the tree, with its source. Takes what ``read`` takes."""
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
            settings.append(Setting(f"{section}.{name}", value, text, source, known.help))
    return settings


def _from_file(file: str | Path | None, env: Mapping[str, str]) -> Iterator[_Given]:
    chosen = file or env.get("KVTIDE_CONFIG")
    path = Path(chosen or _HERE)
    try:
        path = path.expanduser()
        text = path.read_text("utf-8") if chosen else _implicit()
        tree = tomllib.loads(text or "")
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{path} cannot be read as TOML: {error}") from error
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
        "security.key_file",
        "security.key_source",
        "valkey.identity",
        "valkey.password_file",
    }
)
"""Settings that lead to secrets. A file that nobody named may not have them: it could make us use a key or a password
where its author wants it, or wrap keys with one that he knows. A repository that was cloned is the user's own."""
_warned: set[tuple[int, int]] = set()
"""Files that were ignored, by device and inode: of each is told once."""


def _implicit() -> str | None:
    """The text of ``kvtide.toml`` in the working directory; None if there is none, or if it is not to be trusted.

    What belongs to another user is ignored, with a warning: in a folder that all may write to, such as /tmp, anybody
    can put one there, and an error would let him stop whoever works there. What belongs to root or to this user but
    others may write to is an error: its owner can mend that, and to ignore it would silently change what is done.
    """
    trusted = {0, os.geteuid()}
    try:
        about = os.lstat(_HERE)
        if about.st_uid not in trusted:
            _ignored(about)  # whatever it is: a link may lead to a file of ours that is meant for another place
            return None
        # Neither a file that takes its place now nor one that waits for a writer may hold us up.
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
    """Whether a group is a user's private one, as most systems make it: then files of umask 002 are his alone."""
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
