"""What a program takes of a device's memory, and what the compiler says when it is too much."""

import dataclasses
import re
from typing import Any

import jax

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = r"([\d.]+)([KMGT]?)B?"
_REFUSED = tuple(
    re.compile(form) for form in (rf"Used {_SIZE} of {_SIZE} hbm", rf"\({_SIZE}\) exceeds available HBM \({_SIZE}\)")
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Refusal:
    """A program that the compiler refused for its size, in bytes of HBM."""

    used: int
    """What it named: all that is needed, or the temporaries if they alone are too much."""
    available: int
    message: str

    @property
    def excess(self) -> int:
        """By how much it does not fit."""
        return self.used - self.available


def parse_refusal(message: str) -> Refusal:
    """Reads the compiler's message.

    Raises:
      ValueError: a message about something else.
    """
    found = next(filter(None, (form.search(message) for form in _REFUSED)), None)
    if found is None:
        raise ValueError(f"expected a message about HBM, got: {message}")
    return Refusal(
        used=_num_bytes(found[1], found[2]), available=_num_bytes(found[3], found[4]), message=message.strip()
    )


def compile_or_refuse(lowered: Any) -> Any:
    """The compiled program, or a `Refusal` if it does not fit."""
    try:
        return lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return parse_refusal(str(error))


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
