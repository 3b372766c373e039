"""Advice in words: a finding for the recording, one for each change, and one for what limits how sure they are."""

from __future__ import annotations

from collections.abc import Iterator

from kvtide.doctor.advice import Advice, AdviceResult, Change
from kvtide.doctor.finding import Finding, ok, warning
from kvtide.formatting import size

__all__ = ["findings"]


def findings(advice: Advice) -> Iterator[Finding]:
    if advice.hit_rate is not None:
        yield ok("recording", _recording(advice))
    for number, change in enumerate(advice.changes, 1):
        yield warning(f"change {number}", _gain(change), f"set {_settings(change)}")
    if advice.together is not None:
        yield ok("together", f"all of them at once: {_gain(advice.together)}")
    if advice.result is AdviceResult.NOTHING:
        yield ok("changes", f"none is worth it: {advice.reason}", advice.do)
    elif advice.result is not AdviceResult.CHANGES:
        yield warning("changes", advice.reason, advice.do)
    if advice.not_tried:
        yield ok("not tried", f"for lack of time: {'; '.join(advice.not_tried)}", "--time 10min gives more")
    for note in advice.notes:
        yield ok("note", note)


def _recording(advice: Advice) -> str:
    assert advice.hit_rate is not None
    assert advice.unlimited is not None
    text = (
        f"{advice.requests:,} requests of {advice.recording}; in the last {_span(advice.seconds)} today's settings "
        f"find {advice.hit_rate:.1%} of {advice.tokens:,} tokens, and a cache without limits {advice.unlimited:.1%}"
    )
    if advice.prefill is not None:
        text += f"; 1,000 tokens take {1000 * advice.prefill.seconds(0, 1000):,.3g} ms to compute"
    return text


def _settings(change: Change) -> str:
    return ", ".join(f"{name} = {to} (now {now or 'none'})" for name, now, to in change.settings)


def _gain(change: Change) -> str:
    """What a change brings and costs. Ranges are of two standard errors."""
    parts = [f"{change.points:+.1f} points of the tokens (± {2 * change.points_error:.1f})"]
    if change.seconds_per_hour is not None and change.seconds_error is not None:
        saved, error = _number(change.seconds_per_hour), _number(2 * change.seconds_error)
        parts.insert(0, f"{saved} s of prefill saved an hour (± {error})")
    costs = [f"{size(change.memory)} of memory"] if change.memory else []
    costs += [f"{size(change.disk)} of disk"] if change.disk else []
    if abs(change.written_per_day) >= 1:
        more = "more" if change.written_per_day > 0 else "less"
        costs.append(f"{size(abs(change.written_per_day))} a day {more} written to the disk")
    text = f"{', '.join(parts)}; costs {', '.join(costs) or 'nothing'}"
    return f"{text}; {change.note}" if change.note else text


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.2g}"


def _span(seconds: float) -> str:
    for unit, length in (("days", 172_800), ("hours", 7200), ("minutes", 120)):
        if seconds >= length:
            return f"{seconds / {'days': 86_400, 'hours': 3600, 'minutes': 60}[unit]:.3g} {unit}"
    return f"{seconds:.0f} seconds"
