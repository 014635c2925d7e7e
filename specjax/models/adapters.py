"""Flax modules as `LanguageModel`: the module keeps its own structure, its weights travel as params.

A module takes part in one of two ways, chosen by `cached`:

    cached=False   module(tokens [B, S]) -> logits [B, S, V], causal. Works for any causal module; every step runs the
                   whole text again.
    cached=True    module(tokens [B, T], positions [B, T], cache) -> (logits [B, T, V], cache), as `LanguageModel.apply`
                   has it: a token goes to the cache slot of its position, a query at position t sees slots 0..t and
                   nothing else, position -1 is neither written nor seen.
                   module.init_cache(batch_size, capacity) -> cache, any pytree, with room for `capacity` positions.

A call may change nothing in the module: what an NNX module stores in itself is lost, a Linen module is refused by Flax.
Dropout and the like are switched off by the user, before the module comes here.
"""

import abc
import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen, nnx, struct

from specjax.types import ModelOutput


@struct.dataclass(kw_only=True)
class ModuleCache:
    """What an adapted module has seen."""

    content: Any
    """What the module's `init_cache` made; for a module without a cache the text, `[B, S]` int32."""
    length: jax.Array
    """`[B]` int32, tokens the cache stands for."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _ModuleModel(abc.ABC):
    """A `LanguageModel` around a module of either library. Positions from `max_positions` on have NaN logits."""

    vocab_size: int
    max_positions: int
    cached: bool = False
    """Whether the module keeps a cache of its own (see the head of this file)."""

    @abc.abstractmethod
    def module(self, params: Any) -> Any:
        """The module with its weights in place."""

    def init_cache(self, params: Any, batch_size: int, capacity: int) -> ModuleCache:
        """An empty cache.

        Raises:
          ValueError: the module has no `init_cache(batch_size, capacity)`.
        """
        if self.cached:
            content = _call(self.module(params), "init_cache", batch_size=batch_size, capacity=capacity)
        else:
            content = jnp.zeros((batch_size, min(capacity, self.max_positions)), jnp.int32)
        return ModuleCache(content=content, length=jnp.zeros((batch_size,), jnp.int32))

    def apply(
        self, params: Any, tokens: jax.Array, positions: jax.Array, cache: ModuleCache
    ) -> tuple[ModelOutput, ModuleCache]:
        """Runs the module. See `LanguageModel.apply`.

        Raises:
          ValueError: the module cannot be called, or answers, otherwise than the head of this file says.
        """
        run = self._run_cached if self.cached else self._run_text
        logits, content = run(self.module(params), jnp.clip(tokens, 0, self.vocab_size - 1), positions, cache.content)
        known = (positions < self.max_positions)[..., None]
        output = ModelOutput(logits=jnp.where(known, logits, jnp.nan))
        return output, ModuleCache(content=content, length=cache.length)

    def _run_cached(self, module: Any, tokens: jax.Array, positions: jax.Array, content: Any) -> tuple[jax.Array, Any]:
        answer = _call(module, "__call__", tokens=tokens, positions=positions, cache=content)
        if not isinstance(answer, tuple) or len(answer) != 2:
            raise ValueError(f"expected the module to return (logits, cache), got {_describe(answer)}")
        if _describe(answer[1]) != _describe(content):
            raise ValueError(
                f"expected the module to return a cache like the one it was given, {_describe(content)}, "
                f"got {_describe(answer[1])}"
            )
        return _float_logits(answer[0], (*tokens.shape, self.vocab_size)), answer[1]

    def _run_text(
        self, module: Any, tokens: jax.Array, positions: jax.Array, text: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        slots = jnp.where(positions < 0, text.shape[1], positions)
        text = text.at[jnp.arange(text.shape[0])[:, None], slots].set(tokens, mode="drop")
        logits = _float_logits(_call(module, "__call__", tokens=text), (*text.shape, self.vocab_size))
        index = jnp.clip(positions, 0, text.shape[1] - 1)[..., None]
        return jnp.take_along_axis(logits, index, axis=1), text


@dataclasses.dataclass(frozen=True, kw_only=True)
class NNXModel(_ModuleModel):
    """A Flax NNX module. `graphdef, params = nnx.split(module)` gives the field and the params."""

    graphdef: nnx.GraphDef

    def module(self, params: nnx.State) -> Any:
        """The module with its weights in place."""
        return nnx.merge(self.graphdef, params)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinenModel(_ModuleModel):
    """A Flax Linen module; its params are what `definition.init` returned."""

    definition: linen.Module

    def module(self, params: Any) -> Any:
        """The module with its weights in place."""
        return self.definition.bind(params)


def _call(module: Any, name: str, **arguments: Any) -> Any:
    """Calls a method with its arguments by position, after making sure that it exists and takes that many."""
    method = getattr(module, name, None)
    values = tuple(arguments.values())
    if method is None or not _takes(method, values):
        found = "no such method" if method is None else f"{name}{inspect.signature(method)}"
        raise ValueError(f"expected {type(module).__name__}.{name}({', '.join(arguments)}), got {found}: see `cached`")
    return method(*values)


def _takes(method: Callable, values: tuple) -> bool:
    try:
        inspect.signature(method).bind(*values)
    except TypeError:
        return False
    return True


def _float_logits(logits: Any, shape: tuple[int, ...]) -> jax.Array:
    if not isinstance(logits, jax.Array) or logits.shape != shape or not jnp.issubdtype(logits.dtype, jnp.floating):
        raise ValueError(f"expected floating-point logits {list(shape)} from the module, got {_describe(logits)}")
    return logits.astype(jnp.float32)


def _describe(tree: Any) -> str:
    """The tree with `dtype[shape]` in place of each array."""
    return str(jax.tree.map(lambda leaf: f"{jnp.result_type(leaf)}{list(jnp.shape(leaf))}", tree))
