"""The measurements of `scripts/benchmark.py`: each turns a plan into one summary, from which reports are drawn."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

from specjax.benchmark.measure import Pair, measure, num_batches
from specjax.benchmark.options import Plan, recorded
from specjax.benchmark.questions import Question, read_questions
from specjax.benchmark.summary import batch_records, by_category, environment, summarize_pairs
from specjax.benchmark.synthetic import with_synthetic_acceptance
from specjax.benchmark.tune import predict, recommend, step_costs
from specjax.jobs.decoder import Decoder, build_decoder
from specjax.jobs.model import LoadedModel, load_model
from specjax.jobs.runtime import peak_memory
from specjax.jobs.settings import Settings, record
from specjax.report.metrics import pool

Progress = Callable[[Iterable[Pair], str, int], Iterable[Pair]]
"""Passes the pairs of a measurement on and shows how far they have come: the pairs, a name, and how many there are."""


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

    def measure(self, settings: Settings, name: str) -> list[Pair]:
        """Decodes all questions both ways."""
        size = settings.batch_size
        pairs = measure(self.decoder(settings), self.questions, batch_size=size, raw_prompt=settings.raw_prompt)
        return list(self.progress(pairs, name, num_batches(self.questions, size)))


def execute(plan: Plan, progress: Progress) -> dict[str, Any]:
    """Measures what a plan says.

    Returns:
      What `summary.json` holds.

    Raises:
      ValueError: a model that cannot be loaded, a drafter that does not fit it, or questions that do not.
      OSError: a file that cannot be read.
    """
    first = plan.points[0]
    questions = read_questions(str(first.prompts), plan.per_category)
    bench = _Bench(plan=plan, target=load_model(first.model, dtype=first.dtype), questions=questions, progress=progress)
    found = {"run": _run, "sweep": _sweep, "tune": _tune}[plan.command](bench)
    return {
        "command": plan.command,
        "lossless": plan.synthetic_acceptance is None,
        "synthetic_acceptance": plan.synthetic_acceptance,
        "settings": recorded(plan),
        "num_questions": len(questions),
        "environment": environment(),
        **found,
        **peak_memory(),
    }


def values_of(settings: Settings) -> dict[str, Any]:
    """What tells one point of a sweep from another."""
    known = record(settings)
    return {
        "drafter": known["drafter"]["kind"],
        "num_speculative_tokens": known["drafter"]["num_speculative_tokens"],
        "verifier": known["verifier"],
        "temperature": settings.sampling.temperature,
        "batch_size": settings.batch_size,
    }


def _run(bench: _Bench) -> dict[str, Any]:
    pairs = bench.measure(bench.plan.points[0], "run")
    return {"overall": summarize_pairs(pairs), "categories": by_category(pairs), "batches": batch_records(pairs)}


def _sweep(bench: _Bench) -> dict[str, Any]:
    points = []
    for settings in bench.plan.points:
        values = values_of(settings)
        name = ", ".join(str(values[axis]) for axis in values)
        points.append({"values": values, **summarize_pairs(bench.measure(settings, name))})
    return {"points": points}


def _tune(bench: _Bench) -> dict[str, Any]:
    candidates: list[tuple[Settings, dict[str, Any]]] = []
    for name in dict.fromkeys(values_of(settings)["drafter"] for settings in bench.plan.points):
        group = [settings for settings in bench.plan.points if values_of(settings)["drafter"] == name]
        group.sort(key=lambda settings: values_of(settings)["num_speculative_tokens"])
        pairs = bench.measure(group[-1], f"acceptance of {name}")
        stats = pool([row.stats for pair in pairs for row in pair.speculative.completions])
        for settings in group:
            size, window = settings.batch_size, values_of(settings)["num_speculative_tokens"]
            decoder = bench.decoder(settings)
            plain, wide = step_costs(decoder, bench.questions[0], batch_size=size, raw_prompt=settings.raw_prompt)
            predicted = predict(stats, window, plain_step_s=plain, spec_step_s=wide, batch_size=size)
            candidates.append((settings, predicted))
    best = max(candidates, key=lambda candidate: candidate[1]["predicted_speedup"])[0]
    chosen = dataclasses.replace(best, pace=None)  # as it would run by default
    measured = summarize_pairs(bench.measure(chosen, "the best prediction"))
    return {
        "candidates": [{"values": values_of(settings), **predicted} for settings, predicted in candidates],
        "measured": {"values": values_of(chosen), **measured},
        "recommendation": recommend(values_of(chosen), measured),
    }
