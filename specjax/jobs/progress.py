"""How far a job is: a bar on a terminal, plain lines elsewhere."""

import time
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from specjax.report.metrics import ratio
from specjax.report.table import show

INTERVAL = 10.0
"""Seconds between plain lines."""


class JobProgress:
    """Rows done of all rows, tokens per second, mean acceptance length and the time left. A context manager."""

    def __init__(
        self, console: Console, done: int, total: int, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """`done` of `total` rows were completed before; rates are those of what comes now."""
        self._console, self._clock, self._before, self._done, self._total = console, clock, done, done, total
        self._tokens = self._steps = 0
        self._shown = clock()
        columns = TextColumn("completing"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rates]}")
        self._bar = Progress(*columns, console=console, disable=not console.is_terminal)
        self._task = self._bar.add_task("", completed=done, total=total, rates="")

    def __enter__(self) -> "JobProgress":
        self._bar.start()
        if not self._console.is_terminal:
            self._console.print(f"{self._done}/{self._total} rows are complete", soft_wrap=True)
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def update(self, rows: int, tokens: int, steps: int, seconds: float) -> None:
        """Adds rows that are done, their tokens, and the verify steps these took.

        Args:
          rows: how many.
          tokens: theirs.
          steps: theirs.
          seconds: of decoding so far, all rows of this start together; loading and compiling left out.
        """
        self._done, self._tokens, self._steps = self._done + rows, self._tokens + tokens, self._steps + steps
        now, rates = self._clock(), self._rates(seconds)
        self._bar.update(self._task, completed=self._done, rates=rates)
        if not self._console.is_terminal and now - self._shown >= INTERVAL:
            self._shown = now
            self._console.print(f"{self._done}/{self._total} rows, {rates}", soft_wrap=True)

    def leave_out(self) -> None:
        """Takes a row that cannot be completed out of the total."""
        self._total -= 1
        self._bar.update(self._task, total=self._total)

    def _rates(self, seconds: float) -> str:
        speed, length = ratio(self._tokens, seconds), ratio(self._tokens, self._steps)
        left = ratio(seconds * (self._total - self._done), self._done - self._before)
        return f"{show(speed)} tokens/s, acceptance length {show(length)}, ETA {_clock_time(left)}"


def _clock_time(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"
