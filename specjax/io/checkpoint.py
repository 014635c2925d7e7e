"""Loading and converting models: the one entry point for every checkpoint format."""

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from specjax.io import gguf, huggingface, orbax
from specjax.io.orbax import save_checkpoint
from specjax.io.tokenizer import load_tokenizer, save_tokenizer
from specjax.io.weights import Checkpoint
from specjax.models.config import TransformerConfig

__all__ = ["Checkpoint", "convert_checkpoint", "load_checkpoint", "load_config", "save_checkpoint"]

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)
"""What goes with the weights from one directory to another."""
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_DTYPES = tuple(jnp.dtype(dtype) for dtype in (jnp.float32, jnp.bfloat16))


@dataclasses.dataclass(frozen=True)
class _Format:
    load: Callable[[Path, np.dtype, Any], Checkpoint]
    read_config: Callable[[Path], TransformerConfig]


_ORBAX = _Format(orbax.load, orbax.read_config)
_HUGGING_FACE = _Format(huggingface.load, huggingface.read_config)
_GGUF = _Format(gguf.load, gguf.read_config)


def load_checkpoint(path: str | Path, *, dtype: Any, sharding: Any = None) -> Checkpoint:
    """Loads a model, tensor by tensor: the host holds at most the largest tensor beside what lies on the devices.

    Args:
      path: a Hugging Face directory (safetensors), a GGUF file or a directory with exactly one, or a directory that
        `save_checkpoint` wrote. Where several lie together: Orbax, then safetensors, then GGUF.
      dtype: of the params, float32 or bfloat16.
      sharding: where the params go: None (the default device), one `jax.sharding.Sharding` for all, or a pytree of
        them, or of `io.weights.Cut`, like the params (`load_config` and `models.params.param_shapes` tell its
        structure). Each process keeps what its own devices hold, and reads no more of safetensors, but for both tables
        of a tied model that stores its head too; of GGUF it reads rows whole, and of Orbax those tensors whole that a
        `Cut` pads or repeats.

    Returns:
      The checkpoint; params as `models.params.param_shapes(config)` lays them out.

    Raises:
      ValueError: nothing there that can be read, or what is there is damaged, incomplete or not supported.
    """
    if jnp.dtype(dtype) not in _DTYPES:
        raise ValueError(f"expected dtype to be float32 or bfloat16, got {jnp.dtype(dtype)}")
    form, where = _recognise(Path(path))
    return form.load(where, jnp.dtype(dtype), sharding)


def load_config(path: str | Path) -> TransformerConfig:
    """The architecture of what `load_checkpoint` would load, without its weights.

    Raises:
      ValueError: as `load_checkpoint`.
    """
    form, where = _recognise(Path(path))
    return form.read_config(where)


def convert_checkpoint(source: str | Path, directory: str | Path, *, dtype: Any) -> Checkpoint:
    """Writes any checkpoint as an Orbax directory, its tokenizer with it.

    Args:
      source: what `load_checkpoint` reads.
      directory: a directory that is new or empty.
      dtype: of the weights written, float32 or bfloat16.

    Returns:
      The checkpoint that was written.

    Raises:
      ValueError: as `load_checkpoint` and `save_checkpoint`.
    """
    orbax.check_new(Path(directory))
    form, where = _recognise(Path(source))
    tokenizer = load_tokenizer(where) if form is _GGUF and gguf.has_tokenizer(where) else None
    checkpoint = load_checkpoint(where, dtype=dtype)
    save_checkpoint(directory, checkpoint)
    if tokenizer is not None:
        save_tokenizer(tokenizer, Path(directory))
    elif form is not _GGUF:
        for name in TOKENIZER_FILES:
            if (where / name).is_file():
                shutil.copyfile(where / name, Path(directory) / name)
    return checkpoint


def _recognise(path: Path) -> tuple[_Format, Path]:
    """The format of what lies at a path, and the file or directory to read."""
    if path.is_file() and path.suffix == ".gguf":
        return _GGUF, path
    if not path.is_dir():
        raise ValueError(f"expected a model directory or a .gguf file, got {path}: {_reason(path)}")
    if (path / orbax.SETTINGS).is_file():
        return _ORBAX, path
    if (path / huggingface.WEIGHTS).is_file() or (path / huggingface.INDEX).is_file():
        return _HUGGING_FACE, path
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return _GGUF, files[0]
    raise ValueError(f"expected safetensors, one .gguf file or a specjax Orbax checkpoint in {path}: {_found(path)}")


def _reason(path: Path) -> str:
    if path.suffix in _PICKLES:
        return "pickled weights can run code and are never read; convert to safetensors first"
    if path.suffix == ".safetensors":
        return "pass the directory that holds it and its config.json"
    return "not one of these" if path.exists() else "no such file or directory"


def _found(directory: Path) -> str:
    names = sorted(file.name for file in directory.iterdir())
    pickles = [name for name in names if name.endswith(_PICKLES)]
    if pickles:
        return f"got pickled weights ({pickles[0]}): they can run code and are never read; convert to safetensors first"
    return f"got {len(names)} files ({', '.join(names[:10])})"
