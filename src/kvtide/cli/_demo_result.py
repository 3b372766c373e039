"""What a demonstration has found: the answers, their times, and what the table and the page show of them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from kvtide.cli._demo_ask import DemoStep, Way
from kvtide.cli._demo_text import QUESTIONS

__all__ = ["Result", "Row"]


@dataclass(frozen=True, slots=True)
class Row:
    """The result of one way: medians over all questions."""

    way: Way
    title: str
    computed: int
    cached: int
    seconds: float
    speedup: float

    @property
    def seconds_text(self) -> str:
        return f"{self.seconds:.2f} s"

    @property
    def speedup_text(self) -> str:
        return "" if self.way == "cold" else f"{self.speedup:.1f} x"


@dataclass(frozen=True, slots=True)
class Result:
    """The questions and answers, with their times."""

    engine: str
    """What answered: the model, how it ran, and in which engine."""
    titles: Mapping[Way, str]
    """The ways that the table shows."""
    steps: list[DemoStep]
    filesystem: str
    seconds: float
    cold_is_exact: bool = True
    """Whether the answer does not depend on how much of the prompt was cached. In less than 32 bits it may."""

    def of(self, way: Way) -> list[DemoStep]:
        return [step for step in self.steps if step.way == way]

    def rows(self) -> list[Row]:
        """A row for each way that the table shows."""
        cold = statistics.median(step.seconds for step in self.of("cold"))
        rows = []
        for way, title in self.titles.items():
            steps = self.of(way)
            computed = round(statistics.median(step.prompt - step.cached for step in steps))
            cached = round(statistics.median(step.cached for step in steps))
            seconds = statistics.median(step.seconds for step in steps)
            rows.append(Row(way, title, computed, cached, seconds, cold / seconds))
        return rows

    @property
    def compared(self) -> list[DemoStep]:
        return [step for step in self.steps if self.cold_is_exact or step.way != "cold"]

    @property
    def different(self) -> int:
        """Answers that differ from those of the model with the same tokens cached, without kvtide."""
        right = {step.question: step.answer for step in self.of("reference")}
        return sum(step.answer != right[step.question] for step in self.compared)

    @property
    def not_found(self) -> list[str]:
        """The ways in which the store should have had the document, and had nothing of it for some question."""
        stored = {way: title for way, title in self.titles.items() if way not in ("cold", "reference")}
        return [title for way, title in stored.items() if not all(step.cached for step in self.of(way))]

    def findings(self) -> list[str]:
        """Findings besides the table."""
        (first, *_) = self.steps
        asked = sorted({step.question for step in self.steps})
        words = [f"“{QUESTIONS[step.question]}” “{step.text}”" for step in self.of("nvme")]
        where = (
            "a filesystem in memory, so it was no disk: use --path" if self.filesystem == "tmpfs" else self.filesystem
        )
        questions = "1 question" if len(asked) == 1 else f"{len(asked)} questions"
        return [
            f"{self.engine}, {questions} about a document of {first.prompt:,} tokens with the "
            f"question; medians, each until the first token. All of it took {self.seconds:.0f} s. NVMe is {where}.",
            f"{len(self.compared) - self.different} of {len(self.compared)} answers are, token for token, those of the "
            "same model with the same tokens cached, without kvtide.",
            *words,
        ]
