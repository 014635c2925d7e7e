"""What `scripts/plan.py` is told."""

import argparse
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from specjax.parallel.mesh import DATA, MODEL, parse_mesh
from specjax.planning.models import find_config, public_models
from specjax.planning.plan import PROGRAMS, Request
from specjax.planning.programs import MAPS


def parse_request(
    arguments: Sequence[str], *, description: str | None = None
) -> tuple[Request, Path | None, Path | None]:
    """Reads a command line. `--help` prints and exits.

    Returns:
      What to plan, and where to write the figures and the picture.

    Raises:
      ValueError: unknown options, or values that do not go together.
    """
    try:
        own, unknown = _parser(description).parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise ValueError(str(error)) from error
    if unknown:
        raise ValueError(f"expected options that --help names, got {' '.join(unknown)}")
    sizes = {} if own.mesh is None else parse_mesh(own.mesh)
    _check_files({"--output": own.output, "--plot": own.plot})
    request = Request(
        target_name=own.target,
        draft_name=own.draft,
        target=find_config(own.target),
        draft=find_config(own.draft),
        topology=own.topology,
        batch_sizes=_numbers(own.batch),
        context=own.context,
        max_new_tokens=own.max_new_tokens,
        num_speculative_tokens=own.num_speculative_tokens,
        parallel=own.parallel,
        data=sizes.get(DATA, 1),
        model=sizes.get(MODEL),
        dtype=own.dtype,
        shard_drafter=own.shard_drafter,
        programs=tuple(own.programs.split(",")),
    )
    return request, own.output, own.plot


def _parser(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, allow_abbrev=False, exit_on_error=False)
    names = ", ".join(public_models())
    parser.add_argument("--target", required=True, help=f"one of {names}; or a config.json")
    parser.add_argument("--draft", required=True, help="the same for the draft model")
    parser.add_argument("--topology", required=True, help="such as v5e:2x4, v6e:2x4, v5p:2x2x4, v4:2x2x2")
    parser.add_argument("--batch", default="1,8,64", metavar="B,...", help="rows on all devices (default: 1,8,64)")
    parser.add_argument("--context", type=int, default=2048, metavar="N", help="tokens of the longest text")
    parser.add_argument("--max-new-tokens", type=int, default=256, metavar="N", help="of them generated")
    parser.add_argument("--num-speculative-tokens", type=int, default=4, metavar="K", help="tokens drafted a step")
    parser.add_argument("--parallel", choices=MAPS, default="shard_map", help="the driver (default: shard_map)")
    parser.add_argument("--mesh", metavar="SIZES", help="like data=2,model=4 (default: model=all)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the weights")
    parser.add_argument("--shard-drafter", action="store_true", help="cut the draft model too")
    parser.add_argument(
        "--programs",
        default=",".join(PROGRAMS),
        metavar="NAME,...",
        help=f"what to compile (default: {', '.join(PROGRAMS)})",
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="all figures as JSON")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="the modelled speed-up as PNG")
    return parser


def _numbers(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise ValueError(f"expected --batch like 1,8,64, got {text!r}")
    return tuple(map(int, text.split(",")))


def _check_files(files: Mapping[str, Path | None]) -> None:
    """Refuses places where nothing can be written before anything is compiled."""
    for flag, file in files.items():
        if file is not None and (file.is_dir() or not file.parent.is_dir()):
            raise ValueError(f"expected {flag} to be a file in a directory that exists, got {file}")
