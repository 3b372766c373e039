"""Published figures, and our own measurements, against the arithmetic of ``kvtide plan``.

Each expected value is what the source says, and beside it stands the sum by hand. Some figures are not reproduced
within 15 %: they are at the end, each with the difference and the reason, so that nobody takes the arithmetic for more
than it is.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvtide.block import Layout
from kvtide.sizing.arithmetic import ENGINES, Assumptions, Host, StorageTier
from kvtide.sizing.hardware import GPUS, LINKS, TransferLink, gpu_of
from kvtide.sizing.models import shape_of

GIB, MIB = 1 << 30, 1 << 20
RECORDS = Path(__file__).parents[2] / "bench/results/elsewhere"
DRAM = StorageTier("dram", LINKS["ddr5-12"])


def host(model: str, gpu: str, gpus: int = 1, kv_dtype: str = "auto", assume: Assumptions | None = None) -> Host:
    assume = assume or Assumptions()
    shape, card = shape_of(model, kv_dtype), gpu_of(gpu)
    return Host(shape, card, gpus, LINKS[card.link], Host.prefill(shape, card, gpus, assume), assume)


def kv(model: str, tokens: int, dtype: str = "auto") -> int:
    return host(model, "h200", kv_dtype=dtype).kv(tokens)


def test_a_70b_llama_at_128k_tokens() -> None:
    """One user needs about 40 GB: NVIDIA, "Accelerate Large-Scale LLM Inference and KV Cache Offload with CPU-GPU
    Memory Sharing". 80 layers x 2 x 8 heads x 128 x 2 bytes = 327,680 bytes a token; x 131,072 = 40 GiB; in fp8 half.
    Articles that say 16 to 20 GB without naming fp8 are wrong by a factor of 2."""
    assert kv("llama-3.1-70b", 131_072) == 80 * 2 * 8 * 128 * 2 * 131_072 == 40 * GIB
    assert kv("llama-3.1-70b", 131_072, "fp8") == 20 * GIB


@pytest.mark.parametrize(
    ("model", "tokens", "gib"),
    [
        ("llama-3.1-8b", 1024, 0.125),
        ("llama-3.1-8b", 16_000, 1.95),
        ("llama-3.1-8b", 128_000, 15.62),
        ("llama-3.1-70b", 1024, 0.313),
        ("llama-3.1-70b", 16_000, 4.88),
        ("llama-3.1-70b", 128_000, 39.06),
    ],
)
def test_the_table_of_llama_on_hugging_face(model: str, tokens: int, gib: float) -> None:
    """https://huggingface.co/blog/llama31#inference-memory-requirements: 8B: 131,072 bytes a token; 70B: 327,680. Its
    lengths are thousands, but for the first, and ours are of whole blocks."""
    assert kv(model, tokens) / GIB == pytest.approx(gib, rel=0.015)


@pytest.mark.parametrize(("model", "kilobytes"), [("deepseek-v3", 70.272), ("llama-3.1-405b", 516.096)])
def test_bytes_of_a_token_that_deepseek_compares(model: str, kilobytes: float) -> None:
    """Table 1 of "Insights into DeepSeek-V3", arXiv 2505.09343. MLA: 61 layers x (512 + 64) x 2 = 70,272. GQA of
    Llama-3.1-405B: 126 x 2 x 8 x 128 x 2 = 516,096."""
    assert shape_of(model).token_bytes == kilobytes * 1000


def test_bytes_of_a_token_of_qwen_2_5_72b() -> None:
    """The same table: 327.680 KB. 80 layers x 2 x 8 heads x 128 x 2 bytes."""
    assert Layout.attention(layers=80, heads=8, head_dim=128).geometry["full"].nbytes / 256 == 327_680


def test_bytes_of_a_token_of_opt_13b() -> None:
    """800 KB, and 1.6 GB for 2,048 tokens: Kwon et al., "Efficient Memory Management for Large Language Model Serving
    with PagedAttention", section 3. 2 x 5,120 x 40 layers x 2 bytes = 819,200."""
    layout = Layout.attention(layers=40, heads=40, head_dim=128, dtype="float16")
    assert layout.geometry["full"].nbytes / 256 == 800 * 1024
    assert 8 * layout.geometry["full"].nbytes / 1e9 == pytest.approx(1.6, rel=0.06)


def test_a_million_tokens() -> None:
    """Llama-3.1-70B: 320 GB ("The actual memory math for Llama-70B with 1M context", r/LocalLLaMA): 327,680 x 1,000,000
    = 328 GB. DeepSeek-V3: 68.625 GiB for 2^20 tokens ("The exact KV cache usage of DeepSeek V4", provide.ai)."""
    assert kv("llama-3.1-70b", 1_000_000) / 1e9 == pytest.approx(320, rel=0.03)
    assert kv("deepseek-v3", 1 << 20) == 68.625 * GIB


@pytest.mark.parametrize(
    ("model", "gpus", "megabytes"),
    [
        ("llama-3.1-8b", 1, 2),
        ("llama-3.1-70b", 4, 1.25),
        ("mistral-7b-v0.1", 1, 2),
        ("qwen3-32b", 2, 2),
    ],
)
def test_bytes_of_16_tokens_in_vllm(model: str, gpus: int, megabytes: float) -> None:
    """Of one GPU: vLLM's blog, "Inside vLLM's New KV Offloading Connector", 2026-01-08, table of block sizes. For
    Llama-3.1-70B it names no parallelism: its 1.25 MB are a quarter of 16 x 327,680 bytes."""
    assert shape_of(model).block_bytes / 16 / gpus == megabytes * MIB


def test_eight_users_with_128k_tokens_of_a_70b_llama() -> None:
    """343 GB (spheron.network, "KV Cache Optimization Guide"): 8 x 42.9 GB. That is more than an H100 (80 GB) or H200
    (141 GB) has; the weights alone take 141 GB."""
    eight = 8 * kv("llama-3.1-70b", 131_072)
    assert eight / 1e9 == pytest.approx(343, rel=0.01)
    assert eight > GPUS["h200"].memory > GPUS["h100"].memory
    assert host("llama-3.1-70b", "h100").fit_in_gpu(131_072) == 0
    assert host("llama-3.1-70b", "h200").fit_in_gpu(131_072) == 0
    assert host("llama-3.1-70b", "h200", 4).fit_in_gpu(131_072) == 8  # 507.6 GB - 141.1 GB = 366.5 GB; / 42.9 GB


def test_decoding_over_pcie_5() -> None:
    """A token of a 70B Llama at 128K reads all 42.9 GB of KV: at 64 GB/s, the rounded one-way limit of 16 lanes of PCIe
    5.0 (128 GB/s both ways in NVIDIA's data sheets), that is 0.67 s, 1.5 tokens a second at most."""
    whole = Host(
        shape_of("llama-3.1-70b"),
        GPUS["h200"],
        1,
        TransferLink("pcie5", "bus", 64e9, 1.0, ""),
        host("llama-3.1-70b", "h200").cost,
    )
    assert whole.load(131_072, DRAM) == pytest.approx(42.95e9 / 64e9, rel=0.001)
    assert 1 / whole.decode(131_072, DRAM) < 1.5
    assert LINKS["pcie5"].bandwidth == pytest.approx(64e9, rel=0.02)


def test_the_speed_of_copies_that_vllm_measured() -> None:
    """ "About 50 GB/s" in one direction on an H100: the same blog of vLLM. Ours: 63.0 GB/s x 0.85."""
    assert LINKS[GPUS["h100"].link].speed / 1e9 == pytest.approx(50, rel=0.15)


@pytest.mark.parametrize(("gpu", "gigabytes"), [("a100", 6), ("h100", 19)])
def test_the_bandwidth_from_which_mooncake_loads(gpu: str, gigabytes: float) -> None:
    """LLaMA3-70B, 8,192 tokens: 6 GB/s on 8 A800, 19 GB/s on 8 H800. "Mooncake: Trading More Storage for Less
    Computation", FAST '25, section 3. It counts operations at the GPUs' peak, and an A800 and H800 have the peak of an
    A100 and H100. 2.68 GB / ((1.12e15 + 8.8e13) / (8 x 312e12) s) = 5.5 GB/s; x 989 / 312 = 17.6."""
    peak = Assumptions(matmul=1.0, attention=1.0)
    assert host("llama-3.1-70b", gpu, 8, assume=peak).break_even_speed(8192) / 1e9 == pytest.approx(gigabytes, rel=0.15)


def test_the_gain_that_vllm_reports_lies_in_ours() -> None:
    """2 to 22 times for Llama-3.1-8B on an H100, "depending on the prompt size": the same blog. Its lengths are only in
    a picture, so all that can be said: ours is 2 at about 2K tokens and 22 at about 90K."""
    eight = host("llama-3.1-8b", "h100")

    def gain(tokens: int) -> float:
        computed = eight.first_token(tokens, eight.compute(tokens), False)
        return computed / eight.first_token(tokens, eight.load(tokens, DRAM), True)

    assert gain(1024) < 2 < gain(2304)
    assert gain(65_536) < 22 < gain(98_304)


def test_the_link_of_a_grace_hopper() -> None:
    """7 times PCIe Gen5: NVIDIA, "NVIDIA GH200 Superchip Accelerates Inference by 2x in Multiturn Interactions with
    Llama Models". 450 / 63."""
    assert LINKS["nvlink-c2c"].speed / LINKS["pcie5"].speed == pytest.approx(7, rel=0.03)


def records() -> dict[str, dict[str, Any]]:
    found = (json.loads((RECORDS / name).read_text()) for name in ("h200.json", "h200-first-token.json"))
    return {record["name"]: record for file in found for record in file}


@pytest.mark.parametrize(("name", "tokens"), [("8k", 8192), ("32k", 32_768), ("128k", 131_072)])
def test_our_own_first_tokens_on_an_h200(name: str, tokens: int) -> None:
    """In transformers, from DRAM, and computed. The utilisations and the engine's seconds were chosen with these
    records in view: this is a check that one set of numbers fits all lengths, not an independent one."""
    ours = records()[f"gpu-first-token-{name}-against-computing"]
    eight = host("llama-3.1-8b", "h200", assume=ENGINES["transformers"])
    assert eight.first_token(tokens, eight.load(tokens, DRAM), True) == pytest.approx(ours["ours"], rel=0.15)
    computed = ours["ours"] * ours["ratio"]
    assert eight.first_token(tokens, eight.compute(tokens), False) == pytest.approx(computed, rel=0.15)


def test_our_own_first_tokens_in_vllm_on_an_h200() -> None:
    """32,768 tokens in 110 ms from DRAM and 1.22 s computed, 131,072 in 386 ms and 10.4 s. The utilisations were chosen
    with these records in view too."""
    eight = host("llama-3.1-8b", "h200", assume=ENGINES["vllm"])
    for name, tokens in (("32k", 32_768), ("128k", 131_072)):
        ours = records()[f"vllm-first-token-{name}-against-computing"]
        assert eight.first_token(tokens, eight.load(tokens, DRAM), True) == pytest.approx(ours["ours"], rel=0.15)
        computed = eight.first_token(tokens, eight.compute(tokens), False)
        assert computed == pytest.approx(ours["ours"] * ours["ratio"], rel=0.15)


def test_our_own_computing_and_loading_from_a_disk_on_an_h200() -> None:
    """131,072 tokens in transformers: a disk takes 7.35 s for them, computing 11.65 s, and both at once 4.59 s, with
    76,799 tokens loaded. The share that is reached while something is loaded was chosen with the last in view."""
    found = records()
    disk = TransferLink("that disk", "nvme", 131_072 * 131_072 / found["overlap-load"]["ours"], 1.0, "")
    eight = host("llama-3.1-8b", "h200", assume=ENGINES["transformers"])
    tier = StorageTier("nvme", disk)
    assert eight.load(131_072, tier) == pytest.approx(found["overlap-load"]["ours"])
    assert eight.compute(131_072) == pytest.approx(found["overlap-compute"]["ours"], rel=0.15)
    seconds, loaded = eight.both(131_072, tier)
    assert eight.first_token(131_072, seconds, True) == pytest.approx(found["overlap-both"]["ours"], rel=0.15)
    assert loaded == pytest.approx(76_799, rel=0.15)


def test_computing_and_loading_at_once_is_never_slower_than_computing_alone() -> None:
    eight = host("llama-3.1-8b", "h200")
    slow = StorageTier("slow", TransferLink("slow", "nvme", 1e6, 1.0, ""))
    assert eight.both(8192, slow) == (eight.compute(8192), 0)


class TestNotReproduced:
    """Figures that the arithmetic misses. Each test holds the difference where it is, and says why."""

    def test_lmcache_on_an_l4(self) -> None:
        """15,376 tokens of Llama-3.1-8B in vLLM: 6.537 s computed, 0.147 s loaded, 44.5 times.

        https://docs.lmcache.ai/kv_cache/storage_backends/cpu_ram.html. Ours: 3.6 s, 0.18 s, 21 times. The part of its
        operations that an L4 reaches is lower, probably because its 72 W do not allow the clock of the data sheet; and
        that engine took less than 30 ms besides: reading weights and KV alone takes 54 + 7 ms, and loading 75 ms.
        """
        small = host("llama-3.1-8b", "l4")
        computed = small.first_token(15_376, small.compute(15_376), False)
        loaded = small.first_token(15_376, small.load(15_376, DRAM), True)
        assert computed / 6.537 - 1 == pytest.approx(-0.44, abs=0.02)
        assert loaded / 0.147 - 1 == pytest.approx(0.20, abs=0.02)

    def test_llama_3_1_405b_on_hugging_face(self) -> None:
        """123.05 GB for 128,000 tokens in the same table: twice ours. The model was first published with 16 KV heads,
        and now has 8 (https://github.com/huggingface/blog/issues/2345)."""
        assert 2 * kv("llama-3.1-405b", 128_000) / GIB == pytest.approx(123.05, rel=0.001)

    def test_a_block_of_qwen3_8b_in_vllm(self) -> None:
        """1.97 MB in vLLM's table, of 36 layers with 8 heads of 128: 2.25 MiB, which it says of Qwen3-4B, with the same
        KV."""
        assert shape_of("qwen3-8b").block_bytes / 16 == 2.25 * MIB
