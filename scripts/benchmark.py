"""Measures speculative beside plain decoding on your model, prompts and machine: run, sweep, tune."""

import json
import sys
from collections.abc import Iterable

from rich.console import Console
from rich.progress import track

from specjax.benchmark.commands import execute
from specjax.benchmark.files import check_pictures, make_directory, write_report
from specjax.benchmark.measure import Pair
from specjax.benchmark.options import Plan, parse_plan, recorded
from specjax.jobs.runtime import configure, fail
from specjax.report.benchmark import conclusion, grids, terminal_table


def main(arguments: list[str] | None = None) -> int:
    try:
        plan = parse_plan(sys.argv[1:] if arguments is None else arguments, description=__doc__)
    except ValueError as error:
        return fail(error, 2)
    try:
        run(plan)
    except (ValueError, OSError) as error:
        return fail(error, 1)
    except KeyboardInterrupt:
        print("\ninterrupted: nothing was written", file=sys.stderr)
        return 130
    return 0


def run(plan: Plan) -> None:
    check_pictures()
    make_directory(plan.output_dir)
    settings, console = plan.points[0], Console(stderr=True)
    configure(settings.dtype, cache=settings.compilation_cache)
    print("settings:", json.dumps(recorded(plan)), file=sys.stderr)

    def progress(pairs: Iterable[Pair], name: str, total: int) -> Iterable[Pair]:
        return track(pairs, name, total, console=console)

    summary = execute(plan, progress)
    files = write_report(summary, plan.output_dir)
    for grid in grids(summary):
        console.print(terminal_table(grid))
    print(conclusion(summary))
    print("wrote", *files, file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
