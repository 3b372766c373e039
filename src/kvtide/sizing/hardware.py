"""GPUs, and what carries bytes to them: presets from data sheets, each with its source, and speeds of one's own.

``bandwidth`` is what a data sheet or a standard says, in one direction. ``share`` is the part of it that large copies
reach: an assumption, unless a measurement of ours is named beside it. ``docs/planning.md`` says which presets were
never compared with their data sheets again.
"""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path

import msgspec

from kvtide.errors import ConfigError
from kvtide.formatting import size
from kvtide.units import parse_size

__all__ = ["GPUS", "LINKS", "Gpu", "TransferLink", "gpu_of", "link_of", "measured"]

_TB = 10**12
_GB = 10**9


class Gpu(msgspec.Struct, frozen=True):
    name: str
    memory: float
    """Bytes."""
    bandwidth: float
    """Bytes per second of its memory."""
    flops: float
    """Operations per second of its matrix units in bfloat16, without sparsity."""
    link: str
    """The link to the host that it usually has: a name in ``LINKS``."""
    source: str


class TransferLink(msgspec.Struct, frozen=True):
    """Something that bytes go through: a bus, memory, a disk, a network."""

    name: str
    kind: str
    """``bus``, ``dram``, ``nvme`` or ``network``."""
    bandwidth: float
    """Bytes per second in one direction, by data sheet or standard; measured, if ``share`` is 1."""
    share: float
    """The part of it that large copies reach."""
    source: str

    @property
    def speed(self) -> float:
        """Bytes per second that are reached."""
        return self.bandwidth * self.share


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("l4", 24 * _GB, 300 * _GB, 121e12, "pcie4", "NVIDIA L4 data sheet; 242 TFLOPS with sparsity"),
        Gpu("a100", 80 * _GB, 2039 * _GB, 312e12, "pcie4", "NVIDIA A100 80GB SXM data sheet"),
        Gpu("h100", 80 * _GB, 3.35 * _TB, 989e12, "pcie5", "NVIDIA H100 SXM data sheet; 1,979 TFLOPS with sparsity"),
        Gpu("h200", 141 * _GB, 4.8 * _TB, 989e12, "pcie5", "NVIDIA H200 SXM data sheet; 1,979 TFLOPS with sparsity"),
        Gpu("gh200", 96 * _GB, 4 * _TB, 989e12, "nvlink-c2c", "NVIDIA GH200 data sheet, 96 GB of HBM3"),
        Gpu("b200", 180 * _GB, 7.7 * _TB, 2250e12, "pcie5", "NVIDIA HGX B200 data sheet; 4.5 PFLOPS with sparsity"),
    )
}

LINKS = {
    link.name: link
    for link in (
        TransferLink("pcie4", "bus", 31.5 * _GB, 0.85, "PCIe 4.0: 16 lanes of 16 GT/s, 128b/130b; share as of pcie5"),
        TransferLink(
            "pcie5",
            "bus",
            63.0 * _GB,
            0.85,
            "PCIe 5.0: 16 lanes of 32 GT/s, 128b/130b; share: 53.3 GB/s on an H200 (gpu-in-llama-3-8b in h200.json)",
        ),
        TransferLink("nvlink-c2c", "bus", 450 * _GB, 0.85, "NVIDIA Grace Hopper data sheet: 900 GB/s both ways"),
        TransferLink("cxl2-x8", "dram", 31.5 * _GB, 0.85, "CXL 2.0: 8 lanes of PCIe 5.0; share as of pcie5"),
        TransferLink("ddr5-8", "dram", 307.2 * _GB, 0.8, "8 channels of DDR5-4800 at 38.4 GB/s; one socket"),
        TransferLink("ddr5-12", "dram", 460.8 * _GB, 0.8, "12 channels of DDR5-4800 at 38.4 GB/s; one socket"),
        TransferLink("lpddr5x", "dram", 500 * _GB, 0.8, "NVIDIA Grace data sheet: up to 500 GB/s"),
        TransferLink("nvme-gen4", "nvme", 6.9 * _GB, 0.9, "Samsung PM9A3 data sheet: sequential reads of one drive"),
        TransferLink("nvme-gen5", "nvme", 14.0 * _GB, 0.9, "Samsung PM1743 data sheet: sequential reads of one drive"),
        *(
            TransferLink(f"{rate}gbe", "network", rate / 8 * _GB, 0.9, f"line rate of {rate} Gb/s")
            for rate in (25, 100, 200, 400)
        ),
    )
}


def gpu_of(name: str) -> Gpu:
    """The GPU of that name. Raises ConfigError with the nearest name."""
    found = GPUS.get(name.lower())
    if found is None:
        raise ConfigError(f"there is no GPU {name!r} in the table; {_near(name, list(GPUS))}")
    return found


def link_of(given: str, kind: str) -> TransferLink:
    """The link of that name, or one with the given speed, 6.5GB say. Raises ConfigError."""
    names = [name for name, link in LINKS.items() if link.kind == kind]
    if given.lower() in names:
        return LINKS[given.lower()]
    try:
        speed = parse_size(given)
    except ConfigError:
        speed = 0
    if speed <= 0:
        raise ConfigError(f"{given!r} is neither a speed such as 6.5GB (a second) nor known; {_near(given, names)}")
    return TransferLink(f"{size(speed)}/s", kind, float(speed), 1.0, "given")


def _near(given: str, names: list[str]) -> str:
    near = get_close_matches(given.lower(), names, n=1)
    return f"did you mean {near[0]}?" if near else f"choose one of {', '.join(names)}"


def measured(folder: Path | None = None) -> dict[str, TransferLink]:
    """This host's memory and disk, by kind: a copy of 64 MiB, and direct reads of 64 MiB in ``folder``, one thread."""
    from kvtide.replay.speeds import measure

    speeds = measure(folder)
    found = (
        ("dram", speeds.memory, "one thread"),
        ("nvme", speeds.disk_read, f"in {folder or 'the temporary folder'}"),
    )
    return {kind: TransferLink("this host", kind, speed, 1.0, f"measured here: {how}") for kind, speed, how in found}
