"""What `scripts/benchmark.py` is told: the options of `scripts/generate.py` that say what is decoded, and its own."""

import argparse
import dataclasses
import itertools
import operator
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from specjax.benchmark.questions import OWN_QUESTIONS
from specjax.jobs.options import OPTIONS, option_help, parse_options
from specjax.jobs.settings import DRAFTERS, NoDraft, Settings, record

AXES = ("--drafter", "--num-speculative-tokens", "--verifier", "--temperature", "--batch-size")
"""Options that take several values, and the order in which their combinations are measured."""
COMMANDS = {
    "run": ((), {}),
    "sweep": (AXES, {"--num-speculative-tokens": "1,2,4,8", "--pace": "always"}),
    "tune": (AXES[:2], {"--num-speculative-tokens": "1,2,4,6,8", "--pace": "always"}),
}
"""Which of the axes each command takes lists for, and what it does if nobody says otherwise."""
FILTERS_OFF = {"--top-k": "0", "--top-p": "1", "--min-p": "0"}
"""What a sweep over temperatures puts at its greedy points, whatever filters the sampled ones have."""
REFUSED = {
    "--prompt": (),
    "--stop": (),
    "--compare": False,
    "--logprobs": False,
    "--output": None,
    "--per-position": False,
    "--stream": None,
    "--parallel": "auto",
    "--mesh": None,
    "--coordinator-address": None,
    "--num-processes": None,
    "--process-id": None,
}
"""Options of `generate.py` that would change nothing here, where one device is measured, or what is measured, and what
they are without a flag."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What is to be measured."""

    command: str
    """One of `COMMANDS`."""
    points: tuple[Settings, ...]
    """Each combination of values; `Settings.prompts` names the questions."""
    values: tuple[dict[str, str], ...]
    """The values of each point, by option."""
    output_dir: str
    per_category: int | None = None
    synthetic_acceptance: float | None = None
    """Chance that a drafted token is kept; None: the verifier decides, and the output is the target's."""

    def __post_init__(self) -> None:
        if self.per_category is not None and self.per_category < 1:
            raise ValueError(f"expected --per-category of at least 1, got {self.per_category}")
        if self.synthetic_acceptance is not None and not 0 <= self.synthetic_acceptance <= 1:
            raise ValueError(f"expected --synthetic-acceptance in 0..1, got {self.synthetic_acceptance}")
        if self.command == "tune" and self.synthetic_acceptance is not None:
            raise ValueError("expected tune without --synthetic-acceptance, got both: it measures what is accepted")
        if self.synthetic_acceptance is not None and any("--verifier" in point for point in self.values):
            raise ValueError(
                "expected --verifier or --synthetic-acceptance, got both: one of them decides what is kept"
            )


def parse_plan(arguments: Sequence[str], *, description: str | None = None) -> Plan:
    """Reads a command line. `--help` prints and exits.

    Args:
      arguments: without the program's name.
      description: for `--help`.

    Raises:
      ValueError: unknown or malformed options, values out of range, or settings that do not go together.
    """
    try:
        own, rest = _parser(description).parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise ValueError(str(error)) from error
    for flag in {"--prompts", "--input"} & {word.split("=")[0] for word in rest}:
        raise ValueError(f"expected --questions, got {flag}: what is measured has categories and turns")
    given = {flag: value for flag, value in vars(own).items() if flag.startswith("--") and value is not None}
    lists, defaults = COMMANDS[own.command]
    steady = {} if own.synthetic_acceptance is None else {"--pace": "always"}
    given = defaults | steady | given
    axes = {flag: _values(flag, given.pop(flag), flag in lists, own.command) for flag in AXES if flag in given}
    values = tuple(
        _unfiltered(dict(zip(axes, point, strict=True)), axes) for point in itertools.product(*axes.values())
    )
    shared = [*rest, "--prompts", own.questions]
    return Plan(
        command=own.command,
        points=tuple(_settings(shared, given, point, axes.get("--drafter", [])) for point in values),
        values=values,
        output_dir=own.output_dir,
        per_category=own.per_category,
        synthetic_acceptance=own.synthetic_acceptance,
    )


def recorded(plan: Plan) -> dict[str, Any]:
    """The settings of the first point as they take effect, for JSON, and the values of every point."""
    settings = record(plan.points[0])
    if plan.synthetic_acceptance is not None:
        settings |= {"verifier": "synthetic", "synthetic_acceptance": plan.synthetic_acceptance}
    return settings | {"points": list(plan.values), "per_category": plan.per_category}


def drafter_options(settings: Settings) -> str:
    """What `generate.py` has to be given to draft as these settings do, quoted for a shell."""
    drafter, name = settings.drafter, record(settings)["drafter"]["kind"]
    words = ["--drafter", name]
    for flag, (path, _) in OPTIONS.items():
        value = getattr(drafter, path.removeprefix("drafter."), None) if path.startswith("drafter.") else None
        if value is not None and value is not False:
            words += [flag] if value is True else [flag, str(value)]
    return shlex.join(words)


def _parser(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=description,
        epilog=_epilog(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        exit_on_error=False,
    )
    parser.add_argument("command", choices=COMMANDS, help="what to do")
    parser.add_argument(
        "--output-dir", required=True, metavar="DIR", help="gets summary.json, report.html and pictures"
    )
    parser.add_argument(
        "--questions",
        default=str(OWN_QUESTIONS),
        metavar="FILE",
        help="JSONL with question_id, category and turns, as Spec-Bench's (default: 26 short ones of our own)",
    )
    parser.add_argument("--per-category", type=int, metavar="N", help="questions of each category (default: all)")
    parser.add_argument(
        "--synthetic-acceptance",
        type=float,
        metavar="RATE",
        help="keep drafted tokens with this chance, whatever they are: times the system, the text means nothing",
    )
    for flag in (*AXES, "--pace", *_drafter_flags()):
        parser.add_argument(flag, dest=flag, metavar="VALUE", help=argparse.SUPPRESS)
    return parser


def _epilog() -> str:
    taken = [flag for flag, (path, _) in OPTIONS.items() if not path.startswith("job.")]
    lines = [f"  {flag:28}{option_help(flag)}" for flag in taken if flag not in (*REFUSED, "--prompts")]
    lists = [f"  {command:7}{', '.join(flags) or 'none'}" for command, (flags, _) in COMMANDS.items()]
    head = ["lists (a,b,c) are taken by", *lists, "as in generate.py, but --pace always in sweep and tune:"]
    return "\n".join([*head, *lines, "  --config, --set"])


def _drafter_flags() -> list[str]:
    """Options of single drafters that take a value."""
    own = [flag for flag, (path, _) in OPTIONS.items() if path.startswith("drafter.") and flag not in AXES]
    return [flag for flag in own if flag != "--allow-vocabulary-mismatch"]


def _values(flag: str, text: str, several: bool, command: str) -> list[str]:
    values = text.split(",")
    if len(values) > 1 and not several:
        raise ValueError(f"expected one value of {flag} with {command}, got {text}")
    if not all(values) or len(set(values)) < len(values):
        raise ValueError(f"expected different values of {flag}, got {text}")
    return values


def _unfiltered(point: dict[str, str], axes: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """A greedy point beside sampled ones: without the filters of the others, which are refused at temperature 0."""
    greedy = len(axes.get("--temperature", ())) > 1 and point["--temperature"] in ("0", "0.0")
    return point | FILTERS_OFF if greedy else point


def _settings(
    shared: Sequence[str], given: Mapping[str, str], point: Mapping[str, str], drafters: Sequence[str]
) -> Settings:
    """The settings of one point; options that only another one of the drafters has are left out."""
    pairs = [(flag, value) for flag, value in given.items() if not _of_another(flag, point, drafters)]
    flags = [f"{flag}={value}" for flag, value in (*pairs, *point.items())]
    settings = parse_options([*shared, *flags])
    _check(settings)
    return settings


def _of_another(flag: str, point: Mapping[str, str], drafters: Sequence[str]) -> bool:
    field = OPTIONS[flag][0].removeprefix("drafter.")
    owners = [name for name, kind in DRAFTERS.items() if field in {one.name for one in dataclasses.fields(kind)}]
    return flag in _drafter_flags() and point.get("--drafter") not in owners and bool({*owners} & {*drafters})


def _check(settings: Settings) -> None:
    for flag, default in REFUSED.items():
        if operator.attrgetter(OPTIONS[flag][0])(settings) != default:
            raise ValueError(f"expected no {flag}, got one: it is for generate.py and does not go with measuring")
    if isinstance(settings.drafter, NoDraft):
        raise ValueError("expected a drafter to measure beside plain decoding, got --drafter none")
