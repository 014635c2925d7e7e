"""Converts any checkpoint (a Hugging Face directory, GGUF file, alias or hub repository) to an Orbax directory."""

import argparse
import sys
from pathlib import Path

import jax

from specjax.io.checkpoint import convert_checkpoint
from specjax.io.sources import DEFAULT_MODEL, resolve_model


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="path, alias or owner/name (default: %(default)s)")
    parser.add_argument("--output", type=Path, required=True, help="directory to write, new or empty")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="(default: %(default)s)")
    options = parser.parse_args(arguments)
    try:
        source = resolve_model(options.model)
        checkpoint = convert_checkpoint(source, options.output, dtype=options.dtype)
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    leaves = jax.tree.leaves(checkpoint.params)
    count, size = sum(leaf.size for leaf in leaves), sum(leaf.nbytes for leaf in leaves)
    kept = sorted(file.name for file in options.output.iterdir() if file.is_file())
    print(f"read {source}: {len(leaves)} tensors, {count:,} parameters")
    print(f"wrote {options.output}: {size:,} bytes of {options.dtype} weights and {', '.join(kept)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
