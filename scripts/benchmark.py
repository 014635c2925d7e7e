"""Measures speculative beside plain decoding on your model, prompts and machine: run, sweep, tune."""

import json
import signal
import sys
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console
from rich.progress import track

from specjax.benchmark.commands import FAILURES, execute
from specjax.benchmark.files import check_pictures, make_directory, write_report
from specjax.benchmark.measure import Pair
from specjax.benchmark.options import Plan, parse_plan, recorded
from specjax.jobs.runtime import configure, fail
from specjax.report.benchmark import conclusion, failed, grids, terminal_table


def main(arguments: list[str] | None = None) -> int:
    try:
        plan = parse_plan(sys.argv[1:] if arguments is None else arguments, description=__doc__)
    except ValueError as error:
        return fail(error, 2)
    written: list[Path] = []
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return run(plan, written)
    except FAILURES as error:
        status = fail(error, 1)
        if written:
            print(f"what was done is in {plan.output_dir}", file=sys.stderr)
    except KeyboardInterrupt:
        rest = f"what was done is in {plan.output_dir}" if written else "nothing was written"
        print(f"\ninterrupted: {rest}", file=sys.stderr)
        status = 130
    finally:
        signal.signal(signal.SIGTERM, before)
    return status


def run(plan: Plan, written: list[Path]) -> int:
    """Leaves a report of what is done after each part of the plan, and the names of its files in `written`."""
    check_pictures()
    make_directory(plan.output_dir)
    settings, console = plan.points[0], Console(stderr=True)
    configure(settings.dtype, cache=settings.compilation_cache)
    print("settings:", json.dumps(recorded(plan)), file=sys.stderr)

    def progress(pairs: Iterable[Pair], name: str, total: int) -> Iterable[Pair]:
        return track(pairs, name, total, console=console)

    summary = {}
    for summary in execute(plan, progress):
        written[:] = write_report(summary, plan.output_dir)
    for grid in grids(summary):
        console.print(terminal_table(grid))
    print(conclusion(summary))
    print("wrote", *written, file=sys.stderr)
    return 1 if failed(summary) else 0


if __name__ == "__main__":
    sys.exit(main())
