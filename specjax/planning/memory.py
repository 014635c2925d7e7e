"""What a program takes of a device's memory, and what the compiler says when it is too much."""

import dataclasses
import re
from typing import Any

import jax

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = r"([\d.]+)([KMGT]?)B?"
_ALL = re.compile(rf"Used {_SIZE} of {_SIZE} hbm")
_TEMPORARIES = re.compile(rf"\({_SIZE}\) exceeds available HBM \({_SIZE}\)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Refusal:
    """A program that the compiler refused: for its size, in bytes of HBM, or for another reason."""

    message: str
    used: int | None = None
    """What is needed at least; None: it was not refused for that."""
    available: int | None = None

    @property
    def excess(self) -> int | None:
        """By how much it does not fit, at least."""
        return None if self.used is None or self.available is None else self.used - self.available


def parse_refusal(message: str, argument_bytes: int = 0) -> Refusal:
    """Reads the compiler's message.

    Args:
      message: what it says.
      argument_bytes: what the program is given on a device, which is left out where temporaries alone are too much.
    """
    whole, temporaries = _ALL.search(message), _TEMPORARIES.search(message)
    found, beside = (whole, 0) if whole else (temporaries, argument_bytes)
    if found is None:
        return Refusal(message=message.strip())
    used, available = _num_bytes(found[1], found[2]) + beside, _num_bytes(found[3], found[4])
    return Refusal(message=message.strip(), used=used, available=available)


def compile_or_refuse(lowered: Any, argument_bytes: int = 0) -> Any:
    """The compiled program, or a `Refusal`. See `parse_refusal`."""
    try:
        return lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        return parse_refusal(str(error), argument_bytes)


def num_bytes(tree: Any) -> int:
    """Bytes of a tree of shapes, without what pads them to whole tiles."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def memory_use(compiled: Any) -> dict[str, int]:
    """Bytes of HBM on one device: what goes in, what comes out, how much of that is the same, and the rest."""
    sizes = compiled.memory_analysis()
    use = {
        "arguments": sizes.argument_size_in_bytes,
        "results": sizes.output_size_in_bytes,
        "aliased": sizes.alias_size_in_bytes,
        "temporaries": sizes.temp_size_in_bytes,
        "code": sizes.generated_code_size_in_bytes,
    }
    return use | {"total": sum(use.values()) - 2 * use["aliased"]}


def _num_bytes(number: str, unit: str) -> int:
    return round(float(number) * _UNITS[unit])
