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
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from difflib import get_close_matches
from fractions import Fraction
from functools import cache
from itertools import chain
from math import isfinite
from pathlib import Path
from re import compile as pattern
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, ValidationError, convert, field, inspect, structs

from kvtide.errors import ConfigError

Value = bool | int | float | str
_Given = tuple[str, str, str, object]  # source, section, name, value
MiB, GiB = 1 << 20, 1 << 30

# --- the tree (annotations are evaluated at first use, so what they call can stand below) --------


_Policies = Literal["auto", "lru", "reuse"]
_POLICY = "What is evicted first: least recently used, least worth keeping by experience, or whichever does better."


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


class Nvme(_Section, frozen=True):
    """A local disk."""

    path: Annotated[str, _path("Folder of this tier; empty turns the tier off.")] = ""
    budget: Annotated[int, _size("Disk space that blocks may take.", ge=16 * MiB)] = 64 * GiB
    segment: Annotated[int, _size("Space taken at a time.", ge=MiB, multiple_of=4096)] = 256 * MiB
    threads: Annotated[int, _plain("Blocks written to the disk at a time; twice as many are read.", ge=1, le=64)] = 4
    direct: Annotated[bool, _plain("Use O_DIRECT where the filesystem has it.")] = True
    durable: Annotated[bool, _plain("Flush the device before a store is acknowledged.")] = False
    codec: Annotated[Literal["raw", "zstd"], _plain("How blocks are packed on disk.")] = "raw"
    store: Annotated[
        Literal["through", "second-touch", "ghost", "eviction"],
        _plain(
            "When a block is written: at once, at its second use, if its kind is known to come back, or when DRAM "
            "evicts it."
        ),
    ] = "ghost"
    write_limit: Annotated[int, _size("Bytes a second written on average; 0: no limit.", ge=0)] = 0
    drive_writes_per_day: Annotated[
        float, _plain("How often a day the budget may be written over, on average; 0: no limit.", ge=0)
    ] = 0.0
    queue: Annotated[int, _size("Bytes that may wait to be written; more is dropped.", ge=1)] = GiB
    token_ids: Annotated[bool, _plain("Keep token ids in the headers on disk.")] = False
    policy: Annotated[_Policies, _plain(_POLICY)] = "lru"


class Plan(_Section, frozen=True):
    """What moves, and when."""

    prefill_tokens_per_second: Annotated[
        float, _plain("Speed of recomputing, which loads must beat; 0: unknown, load.", ge=0)
    ] = 0.0
    deadline_seconds: Annotated[float, _time("When a load is given up; 0: never.", ge=0)] = 0.0


class Naming(_Section, frozen=True):
    """How blocks get their keys."""

    weights_cache: Annotated[str, _path("File of weights digests; empty: in ~/.cache.")] = ""


class Node(_Section, frozen=True):
    """A store in a process of its own."""

    client_share: Annotated[
        float, _plain("The part of DRAM that one client may hold; more is a miss for it.", ge=0.01, le=1)
    ] = 0.9
    users: Annotated[
        str, _plain('Other users that may connect, with their trust domains: "1001:blue 1002:blue:read".')
    ] = ""
    http: Annotated[str, _plain("Where it answers /healthz and /metrics: 127.0.0.1:9410, say; empty: nowhere.")] = ""


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
    plan: Plan = field(default_factory=Plan)
    naming: Naming = field(default_factory=Naming)
    node: Node = field(default_factory=Node)
    engine: Engine = field(default_factory=Engine)


class Setting(Struct, frozen=True):
    """One value and its source: ``default``, a file, an environment variable or ``argument``."""

    name: str
    value: Value
    text: str
    source: str
    help: str


# --- how values are written ----------------------------------------------------------------------

_NUMBER = pattern(r"([0-9]{1,30}(?:\.[0-9]{1,30})?(?:[eE][+-]?[0-9]{1,2})?)\s*([a-zA-Z]*)")
_BYTES = {"B": Fraction(1)} | {f"{p}iB": Fraction(1024**n) for n, p in enumerate("KMGTPE", 1)}
_BYTES |= {f"{p}B": Fraction(1000**n) for n, p in enumerate("kMGTPE", 1)}
_TIMES = {"min": Fraction(60), "s": Fraction(1), "ms": Fraction("1e-3"), "us": Fraction("1e-6")}


def _measure(text: str, units: Mapping[str, Fraction], bare: str, wanted: str) -> Fraction:
    known = {name.lower(): factor for name, factor in units.items()}
    match = _NUMBER.fullmatch(text.strip())
    if match is None or (unit := (match[2] or bare).lower()) not in known:
        raise ConfigError(f"{text!r} is not {wanted}")
    return Fraction(match[1]) * known[unit]


def parse_size(size: int | str) -> int:
    """Whole bytes from ``4096``, ``"4096"``, ``"512 MiB"`` (1024s) or ``"1.5GB"`` (1000s)."""
    return int(_measure(str(size), _BYTES, "B", _size.wanted))


def format_size(size: int) -> str:
    """The shortest exact text: ``parse_size(format_size(n)) == n`` for any size in use."""
    thousandths = {name: size * 1000 / factor for name, factor in _BYTES.items()}
    exact = {name: int(t) for name, t in thousandths.items() if t >= 1000 and t.denominator == 1}
    texts = (f"{Decimal(t).scaleb(-3).normalize():f} {name}" for name, t in exact.items())
    return min(texts, key=len, default="0 B")


def parse_duration(duration: float | str) -> float:
    """Seconds from ``2``, ``"0.25"``, ``"250ms"``, ``"2 s"`` or ``"5min"``."""
    return float(_measure(str(duration), _TIMES, "s", _time.wanted))


def format_duration(seconds: float) -> str:
    """Readable and exact: ``parse_duration(format_duration(s)) == s`` from nanoseconds to years."""
    for name, factor in _TIMES.items():
        text = f"{seconds / float(factor):.6g} {name}"
        if seconds >= factor and parse_duration(text) == seconds:
            return text
    return f"{_bare(float(seconds))} s"


def _bare(value: object) -> str:
    text = repr(value).removesuffix(".0") if isinstance(value, float) else str(value)
    return text.lower() if isinstance(value, bool) else text


class _Unit(Struct, frozen=True):
    """How a kind of value is written. Called, it makes the metadata of a field of that kind."""

    parse: Callable[[str], object]
    format: Callable[[Any], str]
    wanted: str = ""

    def __call__(self, text: str, **limits: Any) -> Meta:
        return Meta(description=text, extra={"unit": self}, **limits)


_plain = _Unit(str, _bare)
_path = _Unit(lambda path: str(Path(path).expanduser()) if path else "", str, "a path")
_size = _Unit(parse_size, format_size, "a size such as 4096, 512MiB or 1.5GB")
_time = _Unit(parse_duration, format_duration, "a time such as 2, 250ms, 2s or 5min")
_WANTED = {inspect.BoolType: "true or false", inspect.IntType: "a whole number"}
_LIMITS = {"ge": "at least", "le": "at most", "multiple_of": "a multiple of"}


class _Field(Struct, frozen=True):
    type: Any  # as annotated
    kind: inspect.Type
    unit: _Unit
    help: str
    default: Value

    def clean(self, given: object, name: str, source: str) -> Value:
        plain = os.fspath(given) if isinstance(given, os.PathLike) else given
        try:
            parsed = self.unit.parse(plain) if isinstance(plain, str) else plain
            value: Value = convert(parsed, self.type, strict=False)
            if isinstance(value, str) or isfinite(value):
                return value
        except (ConfigError, ValidationError, RuntimeError):  # RuntimeError: "~nobody" has no home
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

    ``file`` defaults to ``$KVTIDE_CONFIG``, else ``./kvtide.toml`` where there is one; ``env``
    defaults to the process's environment. Arguments are sections (``dram={"budget": "1GiB"}``) or
    dotted names in a mapping (``{"dram.budget": "1GiB"}``). Raises ``ConfigError``.
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
    here = "kvtide.toml" if Path("kvtide.toml").is_file() else ""
    if not (chosen := file or env.get("KVTIDE_CONFIG") or here):
        return
    path = Path(chosen).expanduser()
    try:
        tree = tomllib.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as TOML: {error}") from error
    yield from _from_tree(tree, str(path))


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
