"""Modelled, not measured: what speculation gains, from the modelled time of every window's step.

Only the windows that were asked for are compiled. For the others, and for other batch sizes, the least that a step can
move is multiplied by what the compiled one moved beyond its own least.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from specjax.planning.hardware import Chip
from specjax.planning.roofline import Pair, Work, estimated_bytes, seconds

ACCEPTANCES = (0.3, 0.5, 0.6, 0.7, 0.8, 0.9)
"""Chances that a drafted token is accepted, at which speed-ups are given."""
WINDOWS = tuple(range(17))
"""Windows among which the best is looked for; 0 is the plain step."""
BATCHES = tuple(2**power for power in range(15))
"""Rows on a device among which the break-even is looked for."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Overhead:
    """Bytes of a compiled step over the least, for the plain and for the speculative one; 1 where that is not known."""

    plain: float
    speculative: float


def model_batch(
    pair: Pair, programs: Mapping[str, Mapping[str, Any]], chip: Chip, rows: int, window: int
) -> dict[str, Any]:
    """Times, speed-ups, best windows and break-even batches.

    Args:
      pair: the models.
      programs: figures of the `plain` and the `speculative` step, where they were compiled.
      chip: what they run on.
      rows: on a device.
      window: that of the speculative program.
    """
    overhead = Overhead(
        plain=_overhead(programs.get("plain"), pair.plain(rows)),
        speculative=_overhead(programs.get("speculative"), pair.step(rows, window)),
    )
    times = step_times(pair, overhead, chip, rows)
    best = {acceptance: best_window(times, acceptance) for acceptance in ACCEPTANCES}
    ends = {one: break_even(lambda rows: step_times(pair, overhead, chip, rows), one) for one in ACCEPTANCES}
    return {
        "bytes_over_least": dataclasses.asdict(overhead),
        "plain_step_s": times[0],
        "spec_step_s": times[window],
        "step_s_by_window": times,
        "speedup": {one: speedup(times, one, window) for one in ACCEPTANCES},
        "best_window": best,
        "best_speedup": {one: speedup(times, one, best[one]) for one in ACCEPTANCES},
        "break_even_rows_per_device": ends,
    }


def step_times(pair: Pair, overhead: Overhead, chip: Chip, rows: int) -> dict[int, float]:
    """Modelled seconds of a step, by window."""
    times = {}
    for window in WINDOWS:
        work, factor = pair.step(rows, window), overhead.speculative if window else overhead.plain
        moved = dataclasses.replace(work.traffic, num_bytes=work.traffic.num_bytes * factor)
        times[window] = seconds(dataclasses.replace(work, traffic=moved), chip, pair.target.parts)
    return times


def _overhead(figures: Mapping[str, Any] | None, least: Work) -> float:
    if figures is None or not figures["fits"]:
        return 1.0
    return figures["step"]["bytes"] / least.traffic.num_bytes


def expected_tokens(acceptance: float, window: int) -> float:
    """Tokens a step yields where each drafted token is accepted with this chance (arXiv 2211.17192, equation 1)."""
    return sum(acceptance**count for count in range(window + 1))


def speedup(times: Mapping[int, float], acceptance: float, window: int) -> float:
    """Modelled speed-up of a window over the plain step, from the times of both."""
    return expected_tokens(acceptance, window) * times[0] / times[window]


def best_window(times: Mapping[int, float], acceptance: float) -> int:
    """The window that gains most; 0: do not speculate."""
    return max(times, key=lambda window: speedup(times, acceptance, window))


def break_even(times: Callable[[int], Mapping[int, float]], acceptance: float) -> int | None:
    """The smallest of `BATCHES` at which no window gains; None: speculation pays at all of them.

    Args:
      times: modelled times of each window, 0 included, by rows on a device.
      acceptance: chance that a drafted token is accepted.
    """
    return next((rows for rows in BATCHES if not best_window(times(rows), acceptance)), None)


def most_rows(pair: Pair, capacity: int, window: int, chip: Chip) -> int | None:
    """The largest of `BATCHES` that is estimated to fit; None: none does."""
    fitting = [rows for rows in BATCHES if estimated_bytes(pair, capacity, rows, window) <= chip.hbm_bytes]
    return max(fitting, default=None)
