"""Modelled, not measured: what speculation gains, from the modelled time of every window's step.

Only the windows that were asked for are compiled. For the others, and for other batch sizes, the least that a step can
move, and the least time of its collectives, are multiplied by what the compiled one took beyond its own least.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from specjax.planning.hardware import Chip
from specjax.planning.roofline import Pair, Work, busy_seconds, estimated_bytes, exchange_seconds
from specjax.planning.traffic import Traffic

ACCEPTANCES = (0.3, 0.5, 0.6, 0.7, 0.8, 0.9)
"""Chances that a drafted token is accepted, at which speed-ups are given."""
WINDOWS = tuple(range(17))
"""Windows among which the best is looked for; 0 is the plain step."""
BATCHES = tuple(2**power for power in range(15))
"""Rows on a device among which the break-even is looked for."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Overhead:
    """What a compiled step took over the least that is modelled."""

    num_bytes: float = 1.0
    exchange: float = 1.0
    """Modelled time of its collectives, as they were counted, over that of the least."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Overheads:
    """Of both steps. Where only one of them was compiled it speaks for both, so that neither looks cheaper for that."""

    plain: Overhead = Overhead()
    speculative: Overhead = Overhead()


def model_batch(
    pair: Pair, programs: Mapping[str, Mapping[str, Any]], chip: Chip, rows: int, window: int, *, most: int | None
) -> dict[str, Any] | None:
    """Times, speed-ups, best windows and break-even batches; None where a program was refused: nothing would run.

    Args:
      pair: the models.
      programs: figures of the `plain` and the `speculative` step, where they were compiled.
      chip: what they run on.
      rows: on a device.
      window: that of the speculative program.
      most: rows on a device that are estimated to fit, up to which the break-even is looked for; None: no more than
        these.
    """
    if not all(figures["fits"] for figures in programs.values()):
        return None
    over = overheads(pair, programs, chip, rows, window)
    times = step_times(pair, over, chip, rows)
    best = {acceptance: best_window(times, acceptance) for acceptance in ACCEPTANCES}
    searched = [count for count in BATCHES if count <= max(most or 0, rows)]
    ends = {one: break_even(lambda rows: step_times(pair, over, chip, rows), one, searched) for one in ACCEPTANCES}
    return {
        "over_least": dataclasses.asdict(over),
        "plain_step_s": times[0],
        "spec_step_s": times[window],
        "step_s_by_window": times,
        "speedup": {one: speedup(times, one, window) for one in ACCEPTANCES},
        "best_window": best,
        "best_speedup": {one: speedup(times, one, best[one]) for one in ACCEPTANCES},
        "break_even_rows_per_device": ends,
        "searched_rows_per_device": searched[-1],
    }


def overheads(pair: Pair, programs: Mapping[str, Mapping[str, Any]], chip: Chip, rows: int, window: int) -> Overheads:
    """What the compiled programs took over the least. Arguments as for `model_batch`."""
    least = {"plain": pair.plain(rows), "speculative": pair.step(rows, window)}
    parts = pair.target.parts
    found = {name: _overhead(programs[name], work, chip, parts) for name, work in least.items() if name in programs}
    return Overheads(**dict.fromkeys(least, *found.values()) if len(found) == 1 else found)


def _overhead(figures: Mapping[str, Any], least: Work, chip: Chip, parts: int) -> Overhead:
    counted = {kind: (one["count"], one["bytes"]) for kind, one in figures["step"]["collectives"].items()}
    few = exchange_seconds(least.traffic, chip, parts)
    return Overhead(
        num_bytes=figures["step"]["bytes"] / least.traffic.num_bytes,
        exchange=exchange_seconds(Traffic(collectives=counted), chip, parts) / few if few else 1.0,
    )


def step_times(pair: Pair, over: Overheads, chip: Chip, rows: int) -> dict[int, float]:
    """Modelled seconds of a step, by window."""
    times = {}
    for window in WINDOWS:
        work, factor = pair.step(rows, window), over.speculative if window else over.plain
        exchange = exchange_seconds(work.traffic, chip, pair.target.parts) * factor.exchange
        times[window] = busy_seconds(work, chip, factor.num_bytes) + exchange
    return times


def expected_tokens(acceptance: float, window: int) -> float:
    """Tokens a step yields where each drafted token is accepted with this chance (arXiv 2211.17192, equation 1)."""
    return sum(acceptance**count for count in range(window + 1))


def speedup(times: Mapping[int, float], acceptance: float, window: int) -> float:
    """Modelled speed-up of a window over the plain step, from the times of both."""
    return expected_tokens(acceptance, window) * times[0] / times[window]


def best_window(times: Mapping[int, float], acceptance: float) -> int:
    """The window that gains most; 0: do not speculate."""
    return max(times, key=lambda window: speedup(times, acceptance, window))


def break_even(
    times: Callable[[int], Mapping[int, float]], acceptance: float, batches: Sequence[int] = BATCHES
) -> int | None:
    """The smallest batch at which no window gains; None: speculation pays at all of them.

    Args:
      times: modelled times of each window, 0 included, by rows on a device.
      acceptance: chance that a drafted token is accepted.
      batches: rows on a device that are tried, in ascending order.
    """
    return next((rows for rows in batches if not best_window(times(rows), acceptance)), None)


def most_rows(pair: Pair, capacity: int, window: int, chip: Chip) -> int | None:
    """The largest of `BATCHES` that is estimated to fit; None: none does."""
    fitting = [rows for rows in BATCHES if estimated_bytes(pair, capacity, rows, window) <= chip.hbm_bytes]
    return max(fitting, default=None)
