"""Measures a local disk when its store opens, and remembers the result, so that its speed is known before the first
read.

Without that, a disk that was never read would be rated by a guess, and nothing would be loaded from it if computing is
faster than that guess. The measurement runs on its own thread for half a second at most: neither callers nor opening
wait for it. The result is kept in the tier's folder (tiers/nvme/speeds.py), updated by what real work has shown since,
and not measured again for a day.

A tier of less than ``LEAST`` bytes is not measured, because there is little to load from it. Neither is shared storage:
others use it, and requests to it may cost money. Wrong or missing values are corrected by real reads, and by trials
(plan/planner.py).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from kvtide.clock import Clock
from kvtide.tiers.nvme.measure import FILE, Measured
from kvtide.tiers.nvme.speeds import DiskSpeeds, recall, remember
from kvtide.tiers.nvme.tier import Nvme
from kvtide.transfer.lane import Lane

__all__ = ["LEAST", "Measuring"]

log = logging.getLogger("kvtide.nvme")

LEAST = 1 << 30
_DAY = 86400.0
_PATIENCE = 2.0
"""Seconds that closing waits for a disk that hangs."""


class Measuring:
    """The measurement of one NVMe tier. ``lanes`` are all lanes to its disk, its own first."""

    def __init__(
        self,
        tier: Nvme,
        lanes: Sequence[Lane],
        folder: Path,
        budget: int,
        clock: Clock,
        may_write: Callable[[int], bool],
    ) -> None:
        """``may_write`` returns whether so many bytes may be written. If not, existing data may still be read."""
        self._tier = tier
        self._lanes = lanes
        self._folder = folder
        self._clock = clock
        self._may_write = may_write
        self._stopped = False
        """Not an Event, because no thread waits for it, and an interrupt while one is set leaves it unusable."""
        self._thread: threading.Thread | None = None
        self._old = found = recall(folder)
        age = None if found is None or found.read is None else clock.time() - found.time
        self._wanted = budget >= LEAST and not (age is not None and 0 <= age < _DAY)
        for lane in lanes if found is not None else ():
            assert found is not None
            if found.read is not None:
                lane.read_speed.remember(found.read)
            if found.write is not None:
                lane.write_speed.remember(found.write)

    def start(self) -> None:
        """Measure in the background, if necessary."""
        if self._wanted:
            thread = threading.Thread(target=self._run, name="kvtide-measure", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # no more threads; the guess stays in use
                return
            self._thread = thread

    def _run(self) -> None:
        try:
            found = self._tier.measure(lambda: self._may_write(FILE), lambda: self._stopped)
        except Exception as e:  # noqa: BLE001 - whatever the disk does, the guess stands
            log.info("the disk of %s was not measured: %s", self._folder, e)
            return
        if self._stopped:
            return  # an aborted measurement says little
        self._tell(found)
        self._save()

    def _tell(self, found: Measured) -> None:
        for lane in self._lanes:
            if found.read is not None:
                lane.read_speed.measured(*found.read)
            if found.written is not None:
                lane.write_speed.measured(*found.written)

    def _save(self) -> None:
        lane, old = self._lanes[0], self._old
        read, write = lane.read_speed.statistics(), lane.write_speed.statistics()
        if not (read.measured or write.measured):
            return
        remember(
            self._folder,
            DiskSpeeds(
                read.bytes_per_second if read.measured or read.remembered else None,
                write.bytes_per_second if write.measured or write.remembered else None,
                self._clock.time() if read.measured or old is None else old.time,
            ),
        )

    def close(self) -> None:
        """Stop the measurement, and save what is known by now. Call before the tier is closed. May be repeated."""
        self._stopped = True
        if self._thread is not None:
            self._thread.join(_PATIENCE)
        self._save()
