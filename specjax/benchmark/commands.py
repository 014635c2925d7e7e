"""The measurements of `scripts/benchmark.py`: each turns a plan into summaries, from which reports are drawn."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from specjax.benchmark.measure import Pair, measure, num_batches
from specjax.benchmark.options import Plan, drafter_options, recorded
from specjax.benchmark.questions import Question, read_questions
from specjax.benchmark.summary import batch_records, by_category, environment, summarize_pairs
from specjax.benchmark.synthetic import with_synthetic_acceptance
from specjax.benchmark.tune import check_enough, predict, recommend, step_costs, worth_trying
from specjax.jobs.decoder import Decoder, build_decoder
from specjax.jobs.model import LoadedModel, load_model
from specjax.jobs.runtime import peak_memory
from specjax.jobs.settings import Settings, record
from specjax.report.metrics import pool
from specjax.types import DecodeStats

FAILURES = (RuntimeError, ValueError, OSError, MemoryError)
"""What a single point can fail with while others do not. XLA's error for a full memory is a RuntimeError."""
Progress = Callable[[Iterable[Pair], str, int], Iterable[Pair]]
"""Passes the pairs of a measurement on and shows how far they have come: the pairs, a name, and how many there are."""
Found = Iterator[tuple[bool, dict[str, Any]]]
"""Whether this is all, and what has been found so far."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Bench:
    """What all measurements of a plan share."""

    plan: Plan
    target: LoadedModel
    questions: list[Question]
    progress: Progress

    def decoder(self, settings: Settings) -> Decoder:
        """The speculative decoder of a point."""
        decoder, rate = build_decoder(settings, target=self.target), self.plan.synthetic_acceptance
        return decoder if rate is None else with_synthetic_acceptance(decoder, rate)

    def measure(self, settings: Settings, name: str) -> Iterable[Pair]:
        """Decodes all questions both ways."""
        size = settings.batch_size
        pairs = measure(self.decoder(settings), self.questions, batch_size=size, raw_prompt=settings.raw_prompt)
        return self.progress(pairs, name, num_batches(self.questions, size))

    def values(self, settings: Settings) -> dict[str, Any]:
        """What tells one point of the plan from another."""
        known = record(settings)
        return {
            "drafter": known["drafter"]["kind"],
            "num_speculative_tokens": known["drafter"]["num_speculative_tokens"],
            "verifier": known["verifier"] if self.plan.synthetic_acceptance is None else "synthetic",
            "temperature": settings.sampling.temperature,
            "batch_size": settings.batch_size,
        }

    def point(self, settings: Settings, name: str) -> dict[str, Any]:
        """The values of a point, and what was measured there or how it failed."""
        found = _attempt(lambda: summarize_pairs(list(self.measure(settings, name))))
        return {"values": self.values(settings), **found}

    def prediction(self, settings: Settings, stats: DecodeStats) -> dict[str, Any]:
        """What a window would bring, from the counters of a run with at least as wide a one."""
        size, window = settings.batch_size, self.values(settings)["num_speculative_tokens"]
        decoder = self.decoder(settings)
        plain, wide = step_costs(decoder, self.questions[0], batch_size=size, raw_prompt=settings.raw_prompt)
        return predict(stats, window, plain_step_s=plain, spec_step_s=wide, batch_size=size)


def execute(plan: Plan, progress: Progress) -> Iterator[dict[str, Any]]:
    """Measures what a plan says.

    Yields:
      What `summary.json` holds: what has been found so far, after each part of the plan, and in the end all of it. A
      run that is interrupted, or fails, ends with the batches that it has done.

    Raises:
      ValueError: a model that cannot be loaded, a drafter that does not fit it, or questions that do not.
      OSError: a file that cannot be read.
      RuntimeError: the device has failed, at every point of a sweep.
    """
    first = plan.points[0]
    questions = read_questions(str(first.prompts), plan.per_category)
    largest = max(settings.batch_size for settings in plan.points)
    if largest > len(questions):
        raise ValueError(
            f"expected --batch-size of at most {len(questions)}, the number of questions, got {largest}: rows without "
            "one would cost time and bring nothing"
        )
    if plan.command == "tune":
        check_enough(questions, first.batch_size)
    bench = _Bench(plan=plan, target=load_model(first.model, dtype=first.dtype), questions=questions, progress=progress)
    for complete, found in {"run": _run, "sweep": _sweep, "tune": _tune}[plan.command](bench):
        yield {
            "command": plan.command,
            "complete": complete,
            "lossless": plan.synthetic_acceptance is None,
            "synthetic_acceptance": plan.synthetic_acceptance,
            "settings": recorded(plan),
            "num_questions": len(questions),
            "environment": environment(),
            **found,
            **peak_memory(),
        }


def _attempt(measurement: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Its figures, or the error that it ended with."""
    try:
        return measurement()
    except FAILURES as error:
        return {"error": " ".join(f"{type(error).__name__}: {error}".split())}


def _refuse_nothing(found: Sequence[dict[str, Any]]) -> None:
    if all("error" in one for one in found):
        raise RuntimeError(f"expected some point that can be measured, got none of {len(found)}: {found[0]['error']}")


def _run(bench: _Bench) -> Found:
    pairs: list[Pair] = []
    try:
        for pair in bench.measure(bench.plan.points[0], "run"):
            pairs.append(pair)
    except (KeyboardInterrupt, *FAILURES):
        if pairs:
            yield False, _run_figures(pairs)
        raise
    yield True, _run_figures(pairs)


def _run_figures(pairs: Sequence[Pair]) -> dict[str, Any]:
    return {"overall": summarize_pairs(pairs), "categories": by_category(pairs), "batches": batch_records(pairs)}


def _sweep(bench: _Bench) -> Found:
    points: list[dict[str, Any]] = []
    for settings in bench.plan.points:
        points.append(bench.point(settings, ", ".join(map(str, bench.values(settings).values()))))
        if any("error" not in point for point in points):
            yield len(points) == len(bench.plan.points), {"points": points}
    _refuse_nothing(points)


def _tune(bench: _Bench) -> Found:
    plan = bench.plan
    kinds = dict.fromkeys(type(settings.drafter) for settings in plan.points)
    groups = [[settings for settings in plan.points if type(settings.drafter) is kind] for kind in kinds]
    candidates = [candidate for group in groups for candidate in _foretell(bench, group)]
    found = [{"values": bench.values(settings), **predicted} for settings, predicted in candidates]
    _refuse_nothing(found)
    tried: list[dict[str, Any]] = []
    yield False, {"candidates": found, "tried": tried, "recommendation": None}
    order = worth_trying(found)
    for index in order:
        chosen = dataclasses.replace(candidates[index][0], pace=None)  # as it would run by default
        tried.append(bench.point(chosen, f"prediction {len(tried) + 1}"))
        advice = recommend(drafter_options(chosen), tried[-1])
        last = advice["speculate"] or index == order[-1]
        yield last, {"candidates": found, "tried": tried, "recommendation": advice if last else None}
        if last:
            return


def _foretell(bench: _Bench, group: Sequence[Settings]) -> list[tuple[Settings, dict[str, Any]]]:
    """What each window of one drafter would bring, from the acceptance in the widest of them."""
    group = sorted(group, key=lambda settings: bench.values(settings)["num_speculative_tokens"])
    name = f"acceptance of {bench.values(group[-1])['drafter']}"

    def accept() -> dict[str, Any]:
        pairs = list(bench.measure(group[-1], name))
        return {"stats": pool([row.stats for pair in pairs for row in pair.speculative.completions])}

    found = _attempt(accept)
    if "error" in found:
        return [(settings, found) for settings in group]
    return [(settings, _attempt(partial(bench.prediction, settings, found["stats"]))) for settings in group]
