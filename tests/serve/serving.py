"""A server over the real model, in a thread: what a client can see of it, and what its model was asked."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import httpx
import openai
import uvicorn

import kvtide
from kvtide.engines.transformers import attach
from kvtide.engines.transformers.loading import LoadedModel, load
from kvtide.serve.app import Service
from kvtide.serve.connections import Limits, configuration
from kvtide.serve.generation import Answered, Ask, GenerationEngine
from kvtide.serve.run import listen
from tests.node.serving import eventually

NAME = "smollm2"
LONG = " ".join(f"Lighthouse {n} was lit in {1700 + 3 * n}." for n in range(1, 22))
LONG_TALK = f"{LONG} When was lighthouse 7 lit?"
CATS = "Say an emoji for a cat 🐱 please."
FOREVER = {"max_tokens": 4000, "stream": True}
"""An answer that nobody waits for."""


LIMITS = Limits()


@functools.cache
def smollm2() -> LoadedModel:
    return load(NAME, "float32")


class Recorded(GenerationEngine):
    """Remembers what it answered, and fails when it is told to."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.answers: list[Answered] = []
        self.failing = False

    def answer(self, ask: Ask, say: Callable[[str], None], left: Callable[[], bool]) -> Answered:
        if self.failing:
            raise ArithmeticError("secret details")
        self.answers.append(super().answer(ask, say, left))
        return self.answers[-1]


class Served:
    """A server in a thread, with a store of its own and clients for it."""

    def __init__(self, options: dict[str, Any] | None = None, limits: Limits = LIMITS, **settings: Any) -> None:
        """``options`` are those of a service, ``limits`` those of its connections, ``settings`` those of the store."""
        self.store = kvtide.open(**({"dram": {"budget": "256MiB", "segment": "16MiB"}} | settings))
        self.attached = attach(smollm2().model, self.store)
        self.engine = Recorded(smollm2(), self.attached)
        self.service = Service(self.engine, self.store, **({"body_seconds": limits.body_seconds} | (options or {})))
        at = listen("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{at.getsockname()[1]}"
        self._server = uvicorn.Server(configuration(self.service.app, limits, 30))
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [at]}, name="uvicorn")
        self._thread.start()
        eventually(lambda: self._server.started)
        self.http = httpx.Client(base_url=self.url, timeout=300)
        self.client = self.openai("none")

    @property
    def connections(self) -> int:
        """How many the server has now."""
        return len(self._server.server_state.connections)

    def openai(self, key: str) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=300)

    def chat(self, text: str, **more: Any) -> Any:
        """Greedy, unless told otherwise."""
        talk = [{"role": "user", "content": text}]
        usual: dict[str, Any] = {"model": NAME, "messages": talk, "temperature": 0, "max_tokens": 12}
        return self.client.chat.completions.create(**(usual | more))

    def complete(self, prompt: Any, **more: Any) -> Any:
        usual: dict[str, Any] = {"model": NAME, "prompt": prompt, "temperature": 0, "max_tokens": 12}
        return self.client.completions.create(**(usual | more))

    def close(self) -> None:
        self.client.close()
        self.http.close()
        self._server.should_exit = True
        self._thread.join()
        self.service.close()
        self.attached.detach()
        self.store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def text_of(tokens: list[int]) -> str:
    return str(smollm2().tokenizer.decode(tokens, skip_special_tokens=True))


def tokens_of(text: str) -> list[int]:
    return list(smollm2().tokenizer(text)["input_ids"])


def talk_of(text: str) -> list[int]:
    talk = [{"role": "user", "content": text}]
    return list(
        smollm2().tokenizer.apply_chat_template(talk, add_generation_prompt=True, return_dict=True)["input_ids"]
    )


def cached(answer: Any) -> int:
    return int(answer.usage.prompt_tokens_details.cached_tokens)
