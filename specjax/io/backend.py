"""What is read off, and set on, a `tokenizers.Tokenizer`: the bytes its pieces stand for, the ids it adds to a text."""

import dataclasses
import json
import re
from typing import Any

import tokenizers
from tokenizers import pre_tokenizers, processors

WORD_BOUNDARY = "\u2581"
"""The character that stands for a space in SentencePiece vocabularies."""
_BYTE_PIECE = re.compile("<0x([0-9A-Fa-f]{2})>")
_SENTENCEPIECE_STEPS = [
    {"type": "Replace", "pattern": {"String": WORD_BOUNDARY}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
]
_STRIP_FIRST_SPACE = {"type": "Strip", "content": " ", "start": 1, "stop": 0}


def _byte_level_table() -> dict[int, int | str]:
    """Code points of the byte-level alphabet to the byte they stand for.

    Printable Latin-1 characters stand for themselves; the remaining bytes follow in order from U+0100 on. The other
    Latin-1 characters map to a character outside Latin-1, so that encoding a text that holds one fails.
    """
    alphabet = sorted(map(ord, pre_tokenizers.ByteLevel.alphabet()))
    direct = [code for code in alphabet if code < 256]
    others = sorted(set(range(256)) - set(direct))
    outside: dict[int, int | str] = dict.fromkeys(others, "\uffff")
    return outside | dict(zip(alphabet[len(direct) :], others, strict=True))


_BYTE_LEVEL = _byte_level_table()


@dataclasses.dataclass(frozen=True)
class PieceRule:
    """How the pieces of a vocabulary spell text."""

    byte_level: bool
    """Each character stands for one byte; otherwise U+2581 is a space and `<0x0A>` a byte (SentencePiece)."""
    strips_first_space: bool
    """The space that the encoder put before a text is removed when decoding."""

    def to_bytes(self, piece: str) -> bytes:
        """The bytes that `piece` adds to a text, which need not be whole characters."""
        if not self.byte_level:
            byte = _BYTE_PIECE.fullmatch(piece)
            return bytes.fromhex(byte[1]) if byte else piece.replace(WORD_BOUNDARY, " ").encode()
        try:
            return piece.translate(_BYTE_LEVEL).encode("latin-1")
        except UnicodeEncodeError:
            return piece.encode()


def piece_rule(backend: tokenizers.Tokenizer) -> PieceRule:
    """Reads the rule off a tokenizer's decoder.

    Raises:
      ValueError: neither a byte-level nor a SentencePiece decoder with byte fallback.
    """
    decoder: Any = json.loads(backend.decoder.__getstate__()) if backend.decoder else {"type": None}
    if decoder["type"] == "ByteLevel":
        return PieceRule(byte_level=True, strips_first_space=False)
    steps = decoder.get("decoders", [])
    if steps[:3] == _SENTENCEPIECE_STEPS and steps[3:] in ([], [_STRIP_FIRST_SPACE]):
        return PieceRule(byte_level=False, strips_first_space=len(steps) == 4)
    raise ValueError(
        "expected a byte-level decoder or a SentencePiece one (Replace, ByteFallback, Fuse, Strip), got "
        f"{[step['type'] for step in steps] or decoder['type']}: convert the tokenizer with a current transformers"
    )


def frame_with(backend: tokenizers.Tokenizer, bos: str | None, eos: str | None) -> None:
    """Makes `backend` put the given pieces before and after every text, and nothing else.

    Raises:
      ValueError: a piece outside the vocabulary.
    """
    ids = {piece: backend.token_to_id(piece) for piece in (bos, eos) if piece is not None}
    missing = [piece for piece, token_id in ids.items() if token_id is None]
    if missing:
        raise ValueError(f"expected the tokens put around a text to be in the vocabulary, got {missing}")
    single = ["$A"] if bos is None else [bos, "$A"]
    single += [] if eos is None else [eos]
    backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=list(ids.items()))
