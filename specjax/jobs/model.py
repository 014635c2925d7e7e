"""A model by name: its weights, its tokenizer and its stop ids in one record."""

import dataclasses
from pathlib import Path
from typing import Any

from specjax.io.checkpoint import load_checkpoint
from specjax.io.sources import resolve_model
from specjax.io.tokenizer import Tokenizer, load_tokenizer
from specjax.models.params import join_projections
from specjax.models.transformer import Transformer


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class LoadedModel:
    """A model in memory, ready to read text and write it."""

    model: Transformer
    params: Any
    """Param pytree on the default device, its projections joined."""
    tokenizer: Tokenizer
    eos_ids: tuple[int, ...]
    """Ids that end a text, as the tokenizer and the checkpoint name them."""
    source: Path
    """The file or directory that it came from."""


def load_model(name: str, *, dtype: str) -> LoadedModel:
    """Loads a model, fetching it once if it is not on this machine.

    Args:
      name: a path, an alias or `owner/name`, as `resolve_model` takes it.
      dtype: of the params, "float32" or "bfloat16".

    Raises:
      ValueError: no such model, or one that cannot be loaded.
    """
    checkpoint = load_checkpoint(resolve_model(name), dtype=dtype)
    tokenizer = load_tokenizer(checkpoint.source)
    return LoadedModel(
        model=Transformer(checkpoint.config),
        params=join_projections(checkpoint.params),
        tokenizer=tokenizer,
        eos_ids=tuple(dict.fromkeys((*tokenizer.eos_ids, *checkpoint.eos_ids))),
        source=checkpoint.source,
    )
