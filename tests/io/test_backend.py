import random

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models
from vocabularies import byte_pieces, byte_tokenizer

from specjax.io.backend import PieceRule, frame_with, piece_rule

SENTENCEPIECE = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]


def backend_with(decoder, pieces=("a", "b")):
    backend = Backend(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[]))
    if decoder is not None:
        backend.decoder = decoder
    return backend


def test_byte_level_alphabet_is_the_published_one():
    rule = PieceRule(byte_level=True, strips_first_space=False)
    assert [rule.to_bytes(piece) for piece in byte_pieces()] == [bytes([byte]) for byte in range(256)]
    assert rule.to_bytes("ĠhÃ©llo") == " héllo".encode()


@pytest.mark.parametrize("piece", ["<|im start|>", "漢字", "a\u00a0b", "\ufffd", "ġ漢"])
def test_pieces_outside_the_alphabet_stand_for_their_own_text(piece):
    rule = PieceRule(byte_level=True, strips_first_space=False)
    assert rule.to_bytes(piece) == piece.encode()
    assert backend_with(decoders.ByteLevel(), [piece]).decode([0]) == piece


def test_sentencepiece_pieces():
    rule = PieceRule(byte_level=False, strips_first_space=True)
    cases = {
        "▁a▁": b" a ",
        "<0x0A>": b"\n",
        "<0xe9>": b"\xe9",
        "<0x0G>": b"<0x0G>",
        "<0x123>": b"<0x123>",
        "Ġ": "Ġ".encode(),
    }
    assert {piece: rule.to_bytes(piece) for piece in cases} == cases


def test_decoders_that_are_understood():
    assert piece_rule(backend_with(decoders.ByteLevel())) == PieceRule(byte_level=True, strips_first_space=False)
    plain = piece_rule(backend_with(decoders.Sequence(SENTENCEPIECE)))
    assert plain == PieceRule(byte_level=False, strips_first_space=False)
    stripped = piece_rule(backend_with(decoders.Sequence([*SENTENCEPIECE, decoders.Strip(content=" ", left=1)])))
    assert stripped == PieceRule(byte_level=False, strips_first_space=True)


@pytest.mark.parametrize(
    ("decoder", "name"),
    [
        (None, "None"),
        (decoders.WordPiece(), "WordPiece"),
        (decoders.Metaspace(), "Metaspace"),
        (decoders.Sequence([*SENTENCEPIECE, decoders.Strip(content=" ", left=2)]), "Strip"),
        (decoders.Sequence(SENTENCEPIECE[:2]), "ByteFallback"),
    ],
)
def test_other_decoders_are_refused_by_name(decoder, name):
    with pytest.raises(ValueError, match=f"expected a byte-level decoder .* got .*{name}"):
        piece_rule(backend_with(decoder))


def test_bytes_decode_as_the_library_decodes():
    tokenizer, generator = byte_tokenizer(special=()), random.Random(0)
    for _ in range(2000):
        ids = [generator.choice([0x41, *range(0x80, 0x100)]) for _ in range(generator.randrange(1, 9))]
        assert tokenizer.decode(ids) == tokenizer.backend.decode(ids)


@pytest.mark.parametrize(
    ("bos", "eos", "ids"), [(None, None, [0]), ("a", None, [0, 0]), (None, "b", [0, 1]), ("a", "b", [0, 0, 1])]
)
def test_frame(bos, eos, ids):
    backend = backend_with(decoders.ByteLevel())
    frame_with(backend, bos, eos)
    assert backend.encode("a").ids == ids
    assert backend.encode("a", add_special_tokens=False).ids == [0]


def test_frame_outside_the_vocabulary():
    with pytest.raises(ValueError, match=r"in the vocabulary, got \['<s>'\]"):
        frame_with(backend_with(None), "<s>", "a")
