"""What is shown of a job: a bar on a terminal, plain lines elsewhere."""

import io

import pytest
from rich.console import Console

from specjax.jobs.progress import JobProgress


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def show(*, terminal):
    clock, file = Clock(), io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=120)
    with JobProgress(console, 40, 100, clock=clock) as progress:
        for seconds, rows in ((4, 5), (8, 5), (16, 10)):
            clock.now = 130.0 + seconds
            progress.update(rows, 20 * rows, 8 * rows, seconds)
    return file.getvalue()


def test_plain_lines_every_ten_seconds():
    """20 rows in 16 seconds, of the 60 that were left; an earlier start and 30 seconds of loading are in no rate."""
    assert show(terminal=False).splitlines() == [
        "40/100 rows are complete",
        "45/100 rows, 25 tokens/s, acceptance length 2.5, ETA 0:00:44",
        "60/100 rows, 25 tokens/s, acceptance length 2.5, ETA 0:00:32",
    ]


@pytest.mark.parametrize("terminal", [True, False])
def test_rows_that_cannot_be_completed_leave_the_total(terminal):
    """So it ends with all of all rows, and no time is left."""
    clock, file = Clock(), io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=120)
    with JobProgress(console, 0, 5, clock=clock) as progress:
        progress.leave_out()
        clock.now += 20
        progress.update(4, 80, 40, 20.0)
    assert "4/4" in file.getvalue()
    assert "ETA 0:00:00" in file.getvalue()


def test_a_bar_on_a_terminal():
    shown = show(terminal=True)
    assert "60/100" in shown
    assert "25 tokens/s, acceptance length 2.5, ETA 0:00:32" in shown


def test_before_anything_is_done():
    clock, file = Clock(), io.StringIO()
    with JobProgress(Console(file=file, width=120), 0, 5000, clock=clock) as progress:
        clock.now += 20
        progress.update(0, 0, 0, 20.0)
    assert file.getvalue().splitlines()[1:] == ["0/5000 rows, 0 tokens/s, acceptance length -, ETA -"]
