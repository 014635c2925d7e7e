"""What `scripts/verify.py` is told: the options of `scripts/generate.py` that say what is decoded, and a few more."""

import argparse
import dataclasses
import operator
from collections.abc import Sequence

from specjax.jobs.options import OPTIONS, option_help, parse_options
from specjax.jobs.settings import DraftModel, EarlyExit, NGram, NoDraft, Settings

REFUSED = {"--compare", "--logprobs", "--per-position", "--stream", "--pace", "--parallel", "--mesh"}
REFUSED |= {"--coordinator-address", "--num-processes", "--process-id"}
REFUSED |= {flag for flag, (path, _) in OPTIONS.items() if path.startswith("job.")}
"""Options of `generate.py` that would change nothing here: the checks run on one device."""
_OWN_HELP = {"--output": "JSON file for the report"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checks:
    """How much is compared."""

    windows: tuple[int, ...]
    """Each K."""
    num_keys: int = 1024
    """Rows of each sample of the distribution level; 0 leaves its tests out."""
    joint_tokens: int = 3
    """First tokens whose joint law is tested."""

    def __post_init__(self) -> None:
        if not self.windows or min(self.windows) < 1 or len(set(self.windows)) < len(self.windows):
            raise ValueError(f"expected --num-speculative-tokens of different numbers >= 1, got {list(self.windows)}")
        if self.num_keys < 0:
            raise ValueError(f"expected --num-keys >= 0, got {self.num_keys}")
        if not 1 <= self.joint_tokens <= 3:
            raise ValueError(f"expected --joint-tokens in 1..3, got {self.joint_tokens}")


def parse_checks(arguments: Sequence[str], *, description: str | None = None) -> tuple[Settings, Checks]:
    """Reads a command line. `--help` prints and exits.

    Args:
      arguments: without the program's name.
      description: for `--help`.

    Returns:
      Settings that draft at every step, with the first K; and the checks, with each.

    Raises:
      ValueError: unknown or malformed options, values out of range, or settings that do not go together.
    """
    try:
        own, rest = _parser(description).parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise ValueError(str(error)) from error
    if own.windows:
        rest += ["--num-speculative-tokens", str(own.windows[0])]
    settings = parse_options(rest)
    drafting = _check(settings)
    windows = own.windows or (drafting.num_speculative_tokens,)
    checks = Checks(windows=windows, num_keys=own.num_keys, joint_tokens=own.joint_tokens)
    return dataclasses.replace(settings, pace="always"), checks


def _parser(description: str | None) -> argparse.ArgumentParser:
    shared = {flag: option_help(flag) for flag in OPTIONS if flag not in REFUSED} | _OWN_HELP
    lines = [f"  {flag:28}{text}" for flag, text in shared.items() if flag != "--num-speculative-tokens"]
    parser = argparse.ArgumentParser(
        description=description,
        epilog="\n".join(["as in generate.py:", *lines, "  --config, --set"]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        exit_on_error=False,
    )
    parser.add_argument(
        "--num-speculative-tokens",
        dest="windows",
        type=_windows,
        metavar="K[,K...]",
        help="tokens drafted per step, each K by itself",
    )
    defaults = Checks(windows=(1,))
    parser.add_argument(
        "--num-keys",
        type=_whole,
        default=defaults.num_keys,
        metavar="N",
        help="rows of the first prompt whose first tokens are tested against their law; 0: none (default: %(default)s)",
    )
    parser.add_argument(
        "--joint-tokens",
        type=_whole,
        default=defaults.joint_tokens,
        metavar="N",
        help="first tokens whose joint law is tested, 1 to 3 (default: %(default)s)",
    )
    return parser


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected a whole number, got {text!r}") from error


def _windows(text: str) -> tuple[int, ...]:
    return tuple(map(_whole, text.split(",")))


def _check(settings: Settings) -> NGram | DraftModel | EarlyExit:
    """The drafter, if there is one and nothing was asked for that would be ignored."""
    for flag in sorted(REFUSED):
        value = operator.attrgetter(OPTIONS[flag][0])
        if value(settings) != value(Settings()):
            raise ValueError(f"expected no {flag}, got one: it is for generate.py and would change nothing here")
    if isinstance(settings.drafter, NoDraft):
        raise ValueError("expected a drafter whose text is compared with plain decoding, got --drafter none")
    return settings.drafter
