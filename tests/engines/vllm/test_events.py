"""What a follower of vLLM's events knows of our blocks: where each is, and nothing that is not so."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash, maybe_convert_block_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec
from vllm.v1.request import Request

from kvtide import Model, events
from kvtide.block import BlockKey
from kvtide.engines.vllm.events import EventPublisher
from kvtide.engines.vllm.layout import layouts
from kvtide.index.keys import DEFAULT_TENANT, Chain
from tests.engines.vllm.test_layout import HEADS, _config, caches, layers

PAGE = 32
"""Tokens of a page with full attention, and between two hashes; one with a window has twice as many."""
FULL = FullAttentionSpec(block_size=PAGE, **HEADS)
WINDOW = SlidingWindowSpec(block_size=2 * PAGE, sliding_window=512, **HEADS)


class Follower:
    """A publisher, and the places that a follower derives from its events."""

    def __init__(self, most: int = 100) -> None:
        groups = caches((layers(0, 1), FULL), (layers(2, 3), WINDOW))
        config = _config()
        found = layouts(config, groups)
        self.model = Model(found.own, "given:weights")
        self.publisher = EventPublisher(config, groups, found, most)
        self.believed: set[tuple[int | bytes, int | None, str | None]] = set()

    def request(self, prompt: int, blocks: int, **about: Any) -> tuple[Request, Chain]:
        """A request whose blocks have got their names."""
        init_none_hash(sha256)
        tokens = random.Random(prompt).choices(range(1000), k=256 * blocks)
        hasher = get_request_block_hasher(PAGE, sha256)
        made = Request(str(prompt), tokens, SamplingParams(max_tokens=1), None, block_hasher=hasher, **about)
        chain = self.model.namer(DEFAULT_TENANT).chain(tokens)
        self.publisher.named(made, chain, 0)
        return made, chain

    def stored(self, tier: str, *keys: bytes) -> None:
        self.publisher.happened(events.BlockStored(tier, tuple(BlockKey(key) for key in keys)))

    def removed(self, tier: str, *keys: bytes) -> None:
        self.publisher.happened(events.BlockRemoved(tier, tuple(BlockKey(key) for key in keys), "evicted"))

    def take(self) -> list[Any]:
        found = list(self.publisher.take())
        for event in found:
            places = {(hashed, event.group_idx, event.medium) for hashed in event.block_hashes}
            if isinstance(event, BlockStored):
                assert not places & self.believed, "published twice"
                self.believed |= places
            else:
                assert isinstance(event, BlockRemoved)
                assert places <= self.believed, "it was not published as stored"
                self.believed -= places
        return found


def public(request: Request) -> list[int | bytes]:
    """Its hashes as vLLM tells them."""
    return [maybe_convert_block_hash(hashed) for hashed in request.block_hashes]


def test_a_block_is_told_in_pages_with_their_hashes_and_tokens() -> None:
    follower = Follower()
    request, chain = follower.request(1, 3)
    follower.stored("dram", chain.digests[1] + b"full")
    (event,) = follower.take()
    assert event.block_hashes == public(request)[8:16]
    assert event.parent_block_hash == public(request)[7]
    assert (event.token_ids, event.block_size) == (request.all_token_ids[256:512], PAGE)
    assert (event.medium, event.group_idx, event.kv_cache_spec_kind) == ("CPU", 0, "full_attention")
    follower.stored("nvme", chain.digests[0] + b"window")
    (event,) = follower.take()
    assert event.block_hashes == public(request)[1:8:2], "its pages are twice as long"
    assert (event.parent_block_hash, event.block_size) == (None, 2 * PAGE)
    assert (event.medium, event.group_idx, event.kv_cache_spec_sliding_window) == ("STORAGE", 1, 512)
    follower.removed("dram", chain.digests[1] + b"full")
    (event,) = follower.take()
    assert (event.block_hashes, event.medium) == (public(request)[8:16], "CPU")
    assert follower.take() == []


def test_what_else_is_in_a_hash_is_told_with_it() -> None:
    """A router that makes its own hashes would take the blocks of one salt for those of all."""
    follower = Follower()
    adapter = LoRARequest("adapter", 7, "/adapter")
    _, chain = follower.request(1, 2, cache_salt="secret", lora_request=adapter)
    follower.stored("dram", *(name + b"full" for name in chain.digests))
    first, second = follower.take()
    assert (first.lora_id, first.lora_name) == (7, "adapter")
    assert first.extra_keys[0] == ("adapter", "secret")
    assert second.extra_keys[0] == ("adapter",)


def test_blocks_of_others_are_not_told_of() -> None:
    follower = Follower()
    _, chain = follower.request(1, 1)
    follower.stored("dram", bytes(32) + b"full", chain.digests[0] + b"draft")
    assert follower.take() == []


def test_what_is_loaded_is_told_of_though_another_has_stored_it() -> None:
    follower = Follower()
    _, chain = follower.request(1, 2)
    follower.publisher.held(chain.digests)
    assert [event.group_idx for event in follower.take()] == [0, 0], "of a window only the end is there"
    follower.stored("dram", chain.digests[0] + b"full")
    assert follower.take() == []


@pytest.mark.parametrize("how", ["events were lost", "weights may have changed"])
def test_what_nobody_can_know_is_taken_back(how: str) -> None:
    follower = Follower()
    _, chain = follower.request(1, 2)
    follower.stored("dram", chain.digests[0] + b"full")
    follower.stored("nvme", chain.digests[1] + b"full")
    assert len(follower.take()) == 2
    if how == "events were lost":
        follower.publisher.happened(events.EventsLost(0))
    else:
        follower.publisher.forget()
    follower.take()
    assert not follower.believed
    follower.request(1, 2)
    follower.publisher.held(chain.digests[:1])
    assert len(follower.take()) == 1, "and follower anew"


@given(st.data())
def test_a_follower_believes_what_the_node_has(data: st.DataObject) -> None:
    """Whatever comes and goes: of blocks that are remembered exactly that, and of others nothing."""
    follower, here = Follower(most=3), set[tuple[bytes, str]]()
    chains = [follower.request(prompt, 1)[1] for prompt in range(5)]
    hashes = {chain.digests[0]: public(follower.request(i, 1)[0])[7] for i, chain in enumerate(chains)}
    for _ in range(data.draw(st.integers(1, 20))):
        prompt, tier = data.draw(st.integers(0, 4)), data.draw(st.sampled_from(["dram", "nvme"]))
        name, act = chains[prompt].digests[0], data.draw(st.sampled_from(["name", "store", "remove", "take"]))
        if act == "name":
            follower.request(prompt, 1)
        elif act == "store":
            follower.stored(tier, name + b"full")
            here.add((name, tier))
        elif act == "remove":
            follower.removed(tier, name + b"full")
            here.discard((name, tier))
        else:
            follower.take()
            media = {"dram": "CPU", "nvme": "STORAGE"}
            true = {(hashes[name], 0, media[tier]) for name, tier in here}
            assert {place for place in follower.believed if place[0] in hashes.values()} <= true
    follower.take()
    known = [chain for chain in chains if chain.digests[0] in follower.publisher._known]
    for chain in known:  # what is stored from now on is believed
        follower.stored("dram", chain.digests[0] + b"full")
    follower.take()
    assert {(hashes[chain.digests[0]], 0, "CPU") for chain in known} <= follower.believed
