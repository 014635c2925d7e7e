"""A model by name: its weights, its tokenizer and its stop ids in one record."""

import dataclasses
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from specjax.io.checkpoint import load_checkpoint, load_config
from specjax.io.sources import resolve_model
from specjax.io.tokenizer import Tokenizer, load_tokenizer
from specjax.models.params import join_projections
from specjax.models.transformer import Transformer
from specjax.parallel.specs import param_cuts


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class LoadedModel:
    """A model in memory, ready to read text and write it."""

    model: Transformer
    params: Any
    """Param pytree; on the default device its projections are joined."""
    tokenizer: Tokenizer
    eos_ids: tuple[int, ...]
    """Ids that end a text, as the tokenizer and the checkpoint name them."""
    source: Path
    """The file or directory that it came from."""
    mesh: Mesh | None = None
    """Where the params lie; None: on the default device."""


def load_model(name: str, *, dtype: str, mesh: Mesh | None = None, axis: str | None = None) -> LoadedModel:
    """Loads a model, fetching it once if it is not on this machine.

    Args:
      name: a path, an alias or `owner/name`, as `resolve_model` takes it.
      dtype: of the params, "float32" or "bfloat16".
      mesh: where the params go, each process reading its part; None: the default device.
      axis: axis of the mesh that the model is cut over; None: every device has the whole of it.

    Raises:
      ValueError: no such model, or one that cannot be loaded.
    """
    path = resolve_model(name)
    cuts = None if mesh is None else param_cuts(Transformer(load_config(path), axis=axis), mesh)
    checkpoint = load_checkpoint(path, dtype=dtype, sharding=cuts)
    tokenizer = load_tokenizer(checkpoint.source)
    return LoadedModel(
        model=Transformer(checkpoint.config, axis=axis),
        params=join_projections(checkpoint.params) if mesh is None else checkpoint.params,
        tokenizer=tokenizer,
        eos_ids=tuple(dict.fromkeys((*tokenizer.eos_ids, *checkpoint.eos_ids))),
        source=checkpoint.source,
        mesh=mesh,
    )
