"""The rows of a batch job: one JSON object a line, with a prompt or messages, and parameters of its own.

    {"id": "a", "prompt": "...", "sampling": {"temperature": 0.7, "max_tokens": 100}}
    {"messages": [{"role": "user", "content": "..."}]}
    {"custom_id": "b", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [...], "max_tokens": 100}}
    {"question_id": 81, "category": "writing", "turns": ["...", "..."]}

The third is the OpenAI batch format; the model that its body names is not looked at. The last is Spec-Bench's, of which
the first turn is completed.
"""

import dataclasses
import functools
import hashlib
import io
import json
import typing
from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from typing import Any

import fsspec

from specjax.jobs.prompts import ALIASES, Prompt, parse_json, prompt_of, refuse_strays
from specjax.jobs.settings import Sampling, Settings
from specjax.verify import Greedy

_FIELDS = typing.get_type_hints(Sampling)
_NO_PARAMETERS = {"prompt", "messages", "model", "user", "metadata"}
_NOT_BESIDE_BODY = {"id", "prompt", "messages", "turns", "sampling"}
_NEUTRAL = {"n": 1, "stream": False, "logprobs": False}
"""Keys of an OpenAI body that are taken with the one value that asks for nothing."""
_URLS = {"/v1/chat/completions": "messages", "/v1/completions": "prompt"}
"""What an OpenAI body must hold, by where its request goes."""
_BUFFER_BYTES = 1 << 20
"""Read at a time: files far away fetch or copy a block for every line that is read from them as they are."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """A line of the input."""

    line: int
    """Its number, from 1."""
    prompt: Prompt
    sampling: Sampling
    digest: str
    """Of prompt and parameters: what was completed under this id before must have been the same."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fault:
    """A line that is no row, or a row that cannot be completed."""

    line: int
    error: str


def read_rows(path: str, settings: Settings, lines: Container[int] | None = None) -> Iterator[Row | Fault]:
    """Reads a file of rows line by line.

    Args:
      path: the file, on any file system that `fsspec` can open; compressed if its name ends like that (`.gz`).
      settings: what rows are completed with where they do not say.
      lines: numbers of the lines to look at; None: all.

    Raises:
      OSError: the file cannot be read.
    """
    for number, line in _lines(path):
        if lines is not None and number not in lines:
            continue
        try:
            yield _parse(line, number, settings)
        except (ValueError, RecursionError) as error:
            yield Fault(line=number, error=str(error))


def _lines(path: str) -> Iterator[tuple[int, bytes]]:
    if Path(path).is_fifo():
        raise OSError(f"expected --input of a file, which can be read twice, got the pipe {path}")
    try:
        opened: Any = fsspec.open(path, "rb", compression="infer")
        with opened as file, io.BufferedReader(file, _BUFFER_BYTES) as lines:
            yield from enumerate(lines, 1)
    except Exception as error:  # each file system has its own, or lacks a package
        if isinstance(error, OSError) and error.filename is not None:
            raise
        raise OSError(f"expected --input that can be read, got {path}: {error or type(error).__name__}") from error


def _parse(line: bytes, number: int, settings: Settings) -> Row:
    row = parse_json(line.decode("utf-8-sig" if number == 1 else "utf-8"))
    row, changes = _unwrap(row) if isinstance(row, dict) and "body" in row else (row, _own(row))
    prompt = prompt_of(row, number - 1)
    str(prompt.id).encode()  # a lone surrogate could not be written back
    sampling = _changed(settings, changes) if changes else settings.sampling
    content = json.dumps([prompt.content, dict(changes)], sort_keys=True)
    digest = hashlib.sha256(content.encode()).hexdigest()[:16]
    return Row(line=number, prompt=prompt, sampling=sampling, digest=digest)


def _own(row: Any) -> Mapping[str, Any]:
    """The parameters of a plain row, which stand below `sampling` and nowhere else."""
    if not isinstance(row, dict):
        return {}
    refuse_strays(row)
    changes = row.get("sampling", {})
    if not isinstance(changes, dict):
        raise ValueError(f"expected 'sampling' to be an object, got {type(changes).__name__}")
    return changes


def _unwrap(row: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A plain row and its parameters from a request of the OpenAI batch format."""
    body = row["body"]
    for name in sorted(_NOT_BESIDE_BODY & row.keys()):
        raise ValueError(f"expected no {name!r} beside 'body' (OpenAI's format, with 'custom_id'), got one")
    if not isinstance(body, dict) or row.get("method", "POST") != "POST":
        raise ValueError("expected a POST request whose 'body' is an object")
    url = row.get("url")
    if url is not None and not any(url == known and name in body for known, name in _URLS.items()):
        wanted = " or ".join(f"{known} with {name!r} in its body" for known, name in _URLS.items())
        raise ValueError(f"expected a 'url' of {wanted}, got {url!r} with {', '.join(map(repr, body)) or 'nothing'}")
    body = {name: value for name, value in body.items() if value is not None}
    for name, neutral in _NEUTRAL.items():
        if body.get(name, neutral) != neutral:
            raise ValueError(f"expected {name} to be {json.dumps(neutral)}, got {body[name]!r}")
    plain = {name: body[name] for name in ("prompt", "messages") if name in body}
    if "custom_id" in row:
        plain["id"] = row["custom_id"]
    return plain, {name: value for name, value in body.items() if name not in _NO_PARAMETERS | _NEUTRAL.keys()}


def _changed(settings: Settings, changes: Mapping[str, Any]) -> Sampling:
    """The job's parameters with those of a row in their place."""
    values = {}
    for name, value in changes.items():
        field = ALIASES.get(name, name)
        if field not in _FIELDS:
            raise ValueError(f"expected sampling parameters among {', '.join(_FIELDS)}, got {name!r}")
        if field in values:
            raise ValueError(f"expected one value of {field}, got {name!r} as well")
        values[field] = _typed(name, value, _FIELDS[field])
    sampling = dataclasses.replace(settings.sampling, **values)
    _check(sampling, settings)
    return sampling


def _typed(name: str, value: Any, kind: Any) -> Any:
    if kind == tuple[str, ...]:
        texts = [value] if isinstance(value, str) else value
        if isinstance(texts, list) and all(isinstance(text, str) and text for text in texts):
            return tuple(texts)
        raise ValueError(f"expected {name} to be a text or a list of texts, got {value!r}")
    if type(value) is not kind and not (kind is float and type(value) is int):
        raise ValueError(f"expected {name} of type {kind.__name__}, got {value!r}")
    return value


def _check(sampling: Sampling, settings: Settings) -> None:
    _check_ranges(dataclasses.replace(sampling, seed=0, stop=()))
    if sampling.max_new_tokens > settings.sampling.max_new_tokens:
        raise ValueError(
            f"expected max_tokens of at most {settings.sampling.max_new_tokens} (--max-new-tokens, which the buffers "
            f"have room for), got {sampling.max_new_tokens}"
        )
    if isinstance(settings.verifier, Greedy) and sampling.temperature > 0:
        raise ValueError(f"expected temperature 0 with --verifier greedy, got {sampling.temperature}")


@functools.lru_cache(maxsize=1024)
def _check_ranges(sampling: Sampling) -> None:
    sampling.rows(1, ())
