"""``kvtide explain``: why a prompt was a hit or a miss at a node."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvtide.cli._options import number, socket_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtide import Client, Explanation, Model, Tenant

__all__ = ["app"]

app = typer.Typer(add_completion=False, rich_markup_mode="rich")


@app.command()
def explain(
    tokens: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The prompt: token ids as a JSON list, or separated by spaces.")
    ] = None,
    text: Annotated[Path | None, typer.Option(metavar="FILE", help="The prompt as text, with --tokenizer.")] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="The model's folder on this machine, for its tokenizer.")
    ] = None,
    request: Annotated[
        str | None, typer.Option(metavar="ID", help="A past request, as the engine named it; last: the last one.")
    ] = None,
    node: Annotated[str, typer.Option(metavar="SOCKET", help="Where the node listens.")] = "kvtide.sock",
    model: Annotated[
        str, typer.Option(metavar="WORDS", help="Words of the model's identity, if the node knows several.")
    ] = "",
    prefill: Annotated[
        float | None,
        typer.Option(
            "--prefill-tokens-per-second",
            metavar="N",
            parser=number(1),
            help="How fast the engine computes prompts, for the estimates.",
        ),
    ] = None,
    secret: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="File with the tenant's naming secret; without it, the default tenant."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Say why each block of a prompt is a hit or a miss at a node, and what to do about the first miss.

    Of a prompt, as it is now; nothing is counted or changed:

        [bold]kvtide explain --node /run/kvtide.sock --tokens prompt.json[/bold]

    Of a request some minutes ago:

        [bold]kvtide explain --node /run/kvtide.sock --request chatcmpl-1234[/bold]
    """
    import msgspec

    from kvtide.errors import ConfigError
    from kvtide.node.client.client import Client

    given = [name for name, value in (("tokens", tokens), ("text", text), ("request", request)) if value is not None]
    if len(given) != 1 or (text is not None) != (tokenizer is not None):
        raise ConfigError("give one of --tokens FILE, --text FILE with --tokenizer FOLDER, and --request ID")
    path = socket_of(node, "run kvtide explain on the node's own host")
    tenant = _tenant(secret)
    with Client(path) as client:
        models = _models(client, tenant, model)
        if request is not None:
            found = _past(client, models, tenant, "" if request == "last" else request)
        else:
            ids = _read(tokens) if tokens is not None else _tokenised(text, tokenizer)
            if len(models) > 1:
                raise ConfigError(_several(models))
            with client.session(models[0], tenant) as session:
                found = session.explain(ids, prefill=prefill)
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
    else:
        typer.echo(str(found))


def _tenant(secret: Path | None) -> Tenant:
    from kvtide.index.keys import DEFAULT_TENANT, Tenant

    return DEFAULT_TENANT if secret is None else Tenant(secret.stem, secret.read_bytes())


def _models(client: Client, tenant: Tenant, words: str) -> list[Model]:
    """The models that the node knows of the tenant, and that have all of these words in their identity."""
    from kvtide.errors import ConfigError, TierError
    from kvtide.node.client.link import NodeUnavailable
    from kvtide.store.known_models import read

    try:
        known = [found for about in client.models(tenant.tag) if (found := read(about, tenant)) is not None]
    except NodeUnavailable:
        raise TierError(f"the node at {client.path} is gone") from None
    if not known:
        raise ConfigError(
            "the node knows no model of this tenant: no engine has used it since it was started, or it is older than "
            "kvtide explain. If the engine names a tenant, give its --secret"
        )
    fit = [found for found in known if all(word.lower() in _name(found).lower() for word in words.split())]
    if not fit:
        raise ConfigError(f"--model is {words!r}; {_several(known)}")
    return fit


def _several(models: Sequence[Model]) -> str:
    names = "".join(f"\n  {_name(found)}" for found in models)
    return f"name one of these by some words of it, with --model:{names}"


def _name(model: Model) -> str:
    layout = model.layout
    kinds = ", ".join(f"{g.name} {g.layers} x {g.heads} x {g.head_dim} {g.dtype} {g.packing}" for g in layout.groups)
    more = [f"adapter {model.adapter}" if model.adapter else "", model.fidelity]
    return ", ".join(filter(None, [model.weights, f"blocks of {layout.block_tokens} tokens", kinds, *more]))


def _past(client: Client, models: Sequence[Model], tenant: Tenant, request: str) -> Explanation:
    from kvtide.errors import ConfigError

    found = []
    for model in models:
        with client.session(model, tenant) as session:
            if (past := session.explain_request(request)) is not None:
                found.append(past)
    if not found:
        raise ConfigError(
            f"the node does not remember {f'request {request!r}' if request else 'any request'}: it remembers the last "
            "ones as far as explain.memory allows, since it was started"
        )
    return max(found, key=lambda past: past.now)


def _read(file: Path) -> list[int]:
    import json

    from kvtide.errors import ConfigError

    try:
        written = file.read_text()
        ids = json.loads(written) if written.lstrip().startswith("[") else [int(word) for word in written.split()]
    except ValueError:
        ids = None
    if not isinstance(ids, list) or not all(type(one) is int for one in ids):
        raise ConfigError(f"{file} has no token ids: give a JSON list of numbers, or numbers separated by spaces")
    return ids


def _tokenised(text: Path | None, folder: Path | None) -> list[int]:
    from kvtide.errors import ConfigError

    assert text is not None
    assert folder is not None
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise ConfigError("--tokenizer needs transformers: pip install transformers, or give --tokens") from None
    if not folder.is_dir():
        raise ConfigError(f"--tokenizer is {folder}, which is no folder")
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return list(tokenizer(text.read_text())["input_ids"])
