"""How the kit compiles: anew for each check, so that what a mutation patches is compiled in, and in a hurry."""

import functools
from collections.abc import Callable
from typing import Any

import jax


@functools.cache
def compiler_options(level: int) -> dict[str, Any] | None:
    """Options that spare compile time on a CPU, which is most of what small programs cost; the programs stay the same.

    Where XLA can still do without fusion emitters, that halves it again.

    Args:
      level: 0 for programs that run a few steps, 1 for those that run long.
    """
    if jax.default_backend() != "cpu":
        return None
    options = {"xla_backend_optimization_level": level, "xla_cpu_use_fusion_emitters": False}
    try:
        jax.jit(lambda x: x, compiler_options=options).lower(0).compile()
    except jax.errors.JaxRuntimeError:
        options.pop("xla_cpu_use_fusion_emitters")
    return options


def compiled(function: Callable[..., Any], *, level: int = 0) -> Callable[..., Any]:
    """A function, jitted apart from every other jitted version of it."""
    return jax.jit(lambda *arguments: function(*arguments), compiler_options=compiler_options(level))
