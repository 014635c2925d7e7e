"""Control flow over states too large to copy."""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax

T = TypeVar("T")


def run_if(wanted: jax.Array, function: Callable[[T], T], carry: T) -> T:
    """`function(carry)` if `wanted`, else `carry`, with every large buffer written in place.

    It is a loop of one round at most: what a conditional returns XLA copies, what a loop carries it does not.
    """

    def run(loop: tuple[jax.Array, T]) -> tuple[jax.Array, T]:
        return jnp.zeros_like(wanted), function(loop[1])

    return lax.while_loop(lambda loop: loop[0], run, (wanted, carry))[1]
