"""Tokenizers: text to ids and back, read from Hugging Face or specjax directories and from GGUF files."""

import dataclasses
import datetime
import functools
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from specjax.io.backend import PieceRule, piece_rule
from specjax.io.chat import render_chat
from specjax.io.files import read_json
from specjax.io.gguf_header import read_header
from specjax.io.gguf_tokenizer import backend_from_gguf, special_tokens_from_gguf

_SPECIAL_NAMES = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_PLACEHOLDER = re.compile(
    r"[<\[]\|?\w{0,16}(pad|unused|reserved|extra|dummy|placeholder)\w{0,32}\d\|?[>\]]", re.IGNORECASE
)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Tokenizer:
    """A vocabulary with its splitting rules, special ids and chat template.

    Text is the concatenation of the bytes of the tokens (`token_bytes`), read as UTF-8 with U+FFFD for what is not.
    """

    backend: tokenizers.Tokenizer = dataclasses.field(repr=False)
    """Owned by this object: its truncation and padding are switched off."""
    special_tokens: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Texts by name (`bos_token`, `eos_token`, ...), as chat templates see them."""
    eos_ids: tuple[int, ...] = ()
    """Ids that end a text: the tokenizer's own EOS first, then the others that the source names."""
    chat_template: str | None = None
    template_time: datetime.datetime | None = None
    """What the chat template takes for now; None: the time at which it is used."""
    piece_rule: PieceRule = dataclasses.field(init=False)
    """How pieces spell text."""

    def __post_init__(self) -> None:
        self.backend.no_truncation()
        self.backend.no_padding()
        object.__setattr__(self, "piece_rule", piece_rule(self.backend))
        for name in ("bos_token", "eos_token", "pad_token"):
            self._special_id(name)
        strangers = [i for i in self.eos_ids if not (isinstance(i, int) and 0 <= i < self.vocab_size)]
        if strangers:
            raise ValueError(f"expected eos_ids below the vocabulary size {self.vocab_size}, got {strangers}")
        if not isinstance(self.chat_template, str | None):
            raise ValueError(f"expected the chat template to be a string, got {type(self.chat_template).__name__}")

    @functools.cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of control tokens, which have no text unless it is asked for."""
        return frozenset(i for i, token in self.backend.get_added_tokens_decoder().items() if token.special)

    @functools.cached_property
    def vocab_size(self) -> int:
        """One more than the largest id that has a text; a model's head may be wider."""
        return max(self.backend.get_vocab().values()) + 1

    @property
    def bos_id(self) -> int | None:
        """Id of the beginning-of-text token, if the source names one."""
        return self._special_id("bos_token")

    @property
    def pad_id(self) -> int | None:
        """Id of the padding token, if the source names one."""
        return self._special_id("pad_token")

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Encodes a text.

        The text of a special token inside `text` becomes that token, as it does in `transformers`: text from users
        can therefore hold control tokens.

        Args:
          text: anything that UTF-8 can hold.
          add_special_tokens: follow the source's own setting (the post-processor of `tokenizer.json`, the flags of a
            GGUF file), which puts a BOS first in some vocabularies (Llama) and nothing in others (Qwen, SmolLM);
            False: encode the text alone.

        Raises:
          ValueError: a lone surrogate.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"expected text that UTF-8 can hold, got a lone surrogate at index {error.start}: decode the input "
                "with errors='replace'"
            ) from error
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def token_bytes(self, token_id: int, *, skip_special_tokens: bool = True) -> bytes:
        """The bytes that one token adds to a text, which need not be whole characters.

        Args:
          token_id: at least 0. Ids outside the vocabulary (padding rows of a model's head) have no bytes.
          skip_special_tokens: special tokens have no bytes either.
        """
        if token_id < 0:
            raise ValueError(f"expected token ids of at least 0, got {token_id}: cut padding off before decoding")
        piece = self.backend.id_to_token(token_id)
        if piece is None or (skip_special_tokens and token_id in self.special_ids):
            return b""
        return self.piece_rule.to_bytes(piece)

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Decodes ids, as `transformers` does.

        One difference: where SentencePiece byte tokens are not valid UTF-8, only the bytes that are wrong become
        U+FFFD, not all their neighbours, so that a text never changes when tokens are added to it.

        Args:
          ids: integers of at least 0.
          skip_special_tokens: leave special tokens out of the text.
        """
        data = b"".join(self.token_bytes(int(i), skip_special_tokens=skip_special_tokens) for i in ids)
        if self.piece_rule.strips_first_space:
            data = data.removeprefix(b" ")
        return data.decode(errors="replace")

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True
    ) -> list[int]:
        """Encodes a conversation with the source's chat template; BOS and EOS are the template's business.

        Args:
          messages: dictionaries with a `role` and a `content` string each.
          add_generation_prompt: end with what opens the assistant's answer.

        Raises:
          ValueError: no template, messages of another form, or a template that fails or is refused.
        """
        if self.chat_template is None:
            raise ValueError(
                "expected a tokenizer with a chat template, got none: use plain prompts, or put a chat_template.jinja "
                "beside tokenizer.json"
            )
        text = render_chat(
            self.chat_template,
            messages,
            special_tokens=self.special_tokens,
            add_generation_prompt=add_generation_prompt,
            now=self.template_time,
        )
        return self.encode(text, add_special_tokens=False)

    def _special_id(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        token_id = None if text is None else self.backend.token_to_id(text)
        if text is not None and token_id is None:
            raise ValueError(f"expected {name} to be in the vocabulary, got {text!r}")
        return token_id


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """Loads the tokenizer of a model.

    Args:
      path: a directory with a `tokenizer.json` (`tokenizer_config.json`, `special_tokens_map.json`,
        `chat_template.jinja` and `generation_config.json` are read where they exist), or a `.gguf` file.

    Raises:
      ValueError: no tokenizer there, or one of a kind that is not supported.
    """
    path = Path(path)
    if path.is_file():
        return _load_gguf(path)
    if not (path / "tokenizer.json").is_file():
        raise ValueError(
            f"expected a .gguf file or a directory with a tokenizer.json, got {path}: convert other tokenizers with "
            "save_pretrained of a transformers AutoTokenizer"
        )
    return _load_directory(path)


def save_tokenizer(tokenizer: Tokenizer, directory: str | os.PathLike[str]) -> None:
    """Writes `tokenizer.json`, `tokenizer_config.json` and `generation_config.json` (only the stop ids).

    `load_tokenizer(directory)` gives an equal tokenizer, and `transformers` reads the same files.

    Args:
      tokenizer: what to write.
      directory: made if it does not exist.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.backend.save(str(directory / "tokenizer.json"))
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **tokenizer.special_tokens}
    if tokenizer.chat_template is not None:
        config["chat_template"] = tokenizer.chat_template
    _write_json(directory / "tokenizer_config.json", config)
    _write_json(directory / "generation_config.json", {"eos_token_id": list(tokenizer.eos_ids)})


def encode_prompt(tokenizer: Tokenizer, row: Mapping[str, Any]) -> list[int]:
    """Encodes one row of a prompt file.

    Args:
      tokenizer: the model's.
      row: `{"prompt": str}` is encoded as it is; `{"messages": [...]}` goes through the chat template. Other keys
        belong to the caller.

    Returns:
      Token ids; none at all for an empty prompt in a vocabulary that adds no BOS.

    Raises:
      ValueError: neither or both keys, or a value of another type.
    """
    if ("prompt" in row) == ("messages" in row):
        raise ValueError(f"expected a row with either 'prompt' or 'messages', got the keys {sorted(row)}")
    if "messages" in row:
        return tokenizer.apply_chat_template(row["messages"])
    if not isinstance(row["prompt"], str):
        raise ValueError(f"expected 'prompt' to be a string, got {type(row['prompt']).__name__}")
    return tokenizer.encode(row["prompt"])


def check_same_vocabulary(target: Tokenizer, draft: Tokenizer) -> None:
    """Checks that every id means the same text to two models.

    Padding may differ: ids without a text, and placeholders such as `[PAD5]` or `<|reserved_special_token_7|>`.

    Args:
      target: the tokenizer of the model that decides.
      draft: the tokenizer of the model that proposes.

    Raises:
      ValueError: the first id with two texts, or two different EOS ids.
    """
    for token_id in range(max(target.vocab_size, draft.vocab_size)):
        texts = _meaning(target, token_id), _meaning(draft, token_id)
        if texts[0] != texts[1]:
            raise ValueError(
                f"expected target and draft to share a vocabulary, got id {token_id} as {texts[0]!r} in the target and "
                f"{texts[1]!r} in the draft"
            )
    ends = [tokenizer.eos_ids[0] if tokenizer.eos_ids else None for tokenizer in (target, draft)]
    if ends[0] != ends[1]:
        raise ValueError(f"expected target and draft to share their EOS id, got {ends[0]} and {ends[1]}")


def _meaning(tokenizer: Tokenizer, token_id: int) -> tuple[bytes, str] | None:
    """The bytes of an id and whether it is special; None for padding."""
    piece = tokenizer.backend.id_to_token(token_id)
    if piece is None or _PLACEHOLDER.fullmatch(piece):
        return None
    kind = "special" if token_id in tokenizer.special_ids else "text"
    return tokenizer.piece_rule.to_bytes(piece), kind


def _load_gguf(path: Path) -> Tokenizer:
    metadata = read_header(path).metadata
    backend, special = backend_from_gguf(metadata), special_tokens_from_gguf(metadata)
    keys = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
    eos_ids = tuple(dict.fromkeys(metadata[key] for key in keys if key in metadata))
    template = metadata.get("tokenizer.chat_template")
    return Tokenizer(backend=backend, special_tokens=special, eos_ids=eos_ids, chat_template=template)


def _load_directory(path: Path) -> Tokenizer:
    config = {**_read_optional(path / "special_tokens_map.json"), **_read_optional(path / "tokenizer_config.json")}
    special = {name: _text(config[name]) for name in _SPECIAL_NAMES if config.get(name) is not None}
    backend = _read_backend(path / "tokenizer.json")
    _add_listed_tokens(backend, config.get("added_tokens_decoder", {}))
    own = backend.token_to_id(special.get("eos_token", ""))
    listed = _read_optional(path / "generation_config.json").get("eos_token_id")
    ends = [own, *(listed if isinstance(listed, list) else [listed])]
    eos_ids = tuple(dict.fromkeys(i for i in ends if i is not None))
    template = _read_template(path, config)
    return Tokenizer(backend=backend, special_tokens=special, eos_ids=eos_ids, chat_template=template)


def _read_backend(path: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises a bare Exception for a file that it cannot read
        raise ValueError(f"expected a tokenizer in {path}: {error}") from error


def _add_listed_tokens(backend: tokenizers.Tokenizer, listed: Mapping[str, Mapping[str, Any]]) -> None:
    """Adds the tokens that only `tokenizer_config.json` knows."""
    try:
        tokens = sorted((int(token_id), AddedToken(**token)) for token_id, token in listed.items())
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"expected added_tokens_decoder to hold tokens by id: {error}") from error
    for token_id, token in tokens:
        if backend.token_to_id(token.content) is None:
            backend.add_tokens([token])
        if backend.token_to_id(token.content) != token_id:
            raise ValueError(f"expected tokenizer.json to give {token.content!r} the id {token_id}")


def _read_template(path: Path, config: Mapping[str, Any]) -> str | None:
    """The template of `chat_template.jinja`, or else the one, or the default one, of `tokenizer_config.json`."""
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        if "default" not in named:
            raise ValueError(f"expected a chat template called 'default' in {path}, got {sorted(named)}")
        return named["default"]
    return template


def _read_optional(path: Path) -> Mapping[str, Any]:
    """The object in a JSON file; empty if there is no such file."""
    return read_json(path) if path.is_file() else {}


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _text(token: Any) -> str:
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str):
        raise ValueError(f"expected a special token to be a string or an object with a 'content', got {token!r}")
    return text
