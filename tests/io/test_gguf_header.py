import struct
import time
import tracemalloc

import gguf
import numpy as np
import pytest
from checkpoint_writers import gguf_metadata, gguf_tensors, random_params, tiny, write_gguf
from hypothesis import given, settings
from hypothesis import strategies as st

from specjax.io.checkpoint import load_checkpoint
from specjax.io.gguf_header import read_header

SMALL = tiny(num_layers=1, tied_embeddings=True)
STRING, ARRAY, UINT32, UINT8 = 8, 9, 4, 0
ABSURD = 2**60


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A whole file with metadata of every kind; its last tensor ends where the file ends."""
    metadata = gguf_metadata(SMALL) | {
        "tokenizer.ggml.tokens": ["a", "\u00e9", ""],
        "tokenizer.ggml.scores": [0.5, -1.0, 2.0],
        "tokenizer.ggml.add_bos_token": True,
    }
    tensors = gguf_tensors(random_params(SMALL), paired=True)
    return write_gguf(tmp_path_factory.mktemp("gguf") / "small.gguf", metadata, tensors)


def test_reads_metadata_of_every_kind(small):
    metadata = read_header(small).metadata
    assert metadata["general.architecture"] == "llama"
    assert metadata["llama.block_count"] == 1
    assert metadata["llama.rope.freq_base"] == 10000.0
    assert metadata["tokenizer.ggml.tokens"] == ["a", "\u00e9", ""]
    assert metadata["tokenizer.ggml.add_bos_token"] is True
    np.testing.assert_array_equal(metadata["tokenizer.ggml.scores"], [0.5, -1.0, 2.0])


def test_places_tensors_as_the_package_does(small):
    tensors = read_header(small).tensors
    assert len(tensors) == 11
    for tensor in gguf.GGUFReader(small).tensors:
        mine = tensors[tensor.name]
        assert mine.shape == tuple(tensor.shape.tolist()[::-1])
        assert (mine.kind, mine.offset, mine.num_bytes) == (tensor.tensor_type, tensor.data_offset, tensor.n_bytes)


def test_a_file_cut_anywhere_is_refused(small, tmp_path):
    content = small.read_bytes()
    start = min(tensor.offset for tensor in read_header(small).tensors.values())
    path = tmp_path / "cut.gguf"
    for length in [*range(start), *range(start, len(content), 997), len(content) - 1]:
        path.write_bytes(content[:length])
        with pytest.raises(ValueError, match=r"cut\.gguf"):
            load_checkpoint(path, dtype="float32")


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 1500), st.integers(0, 255)), min_size=1, max_size=3))
def test_changed_bytes_give_a_model_or_a_clear_error(small, tmp_path_factory, changes):
    content = bytearray(small.read_bytes())
    for place, value in changes:
        content[place] = value
    path = tmp_path_factory.getbasetemp() / "changed.gguf"
    path.write_bytes(content)
    assert outcome(path) in ("a model", "an error with the file's name")


def outcome(path):
    try:
        load_checkpoint(path, dtype="float32")
    except ValueError as error:
        return "an error with the file's name" if path.name in str(error) else str(error)
    return "a model"


# ---- Headers made by hand ----


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def header(*entries: bytes, tensors: tuple[bytes, ...] = (), version: int = 3, counts=None) -> bytes:
    num_tensors, num_entries = counts or (len(tensors), len(entries))
    return struct.pack("<4sIQQ", b"GGUF", version, num_tensors, num_entries) + b"".join(entries) + b"".join(tensors)


def entry(key: bytes, code: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", code) + value


def tensor(
    name: bytes, shape: tuple[int, ...], *, code: int = 0, offset: int = 0, dimensions: int | None = None
) -> bytes:
    sizes = struct.pack(f"<{len(shape)}Q", *shape)
    return text(name) + struct.pack("<I", dimensions or len(shape)) + sizes + struct.pack("<IQ", code, offset)


EMPTY = entry(b"", UINT8, b"\0")
HOSTILE = {
    "empty": (b"", "4 bytes wanted"),
    "no mark": (b"GGML" + bytes(60), "no GGUF mark"),
    "old version": (header(version=1), "version 1"),
    "big-endian": (header(version=3 << 24), "version"),
    "tensor count": (header(counts=(ABSURD, 0)), "bytes wanted"),
    "entry count": (header(counts=(0, ABSURD)), "bytes wanted"),
    "entries that are all alike": (header(counts=(0, ABSURD)) + EMPTY * 1000, "'' twice"),
    "key length": (header(counts=(0, 1)) + struct.pack("<Q", ABSURD), f"{ABSURD} bytes wanted"),
    "string length": (header(entry(b"a", STRING, struct.pack("<Q", ABSURD))), f"{ABSURD} bytes wanted"),
    "array length": (header(entry(b"a", ARRAY, struct.pack("<IQ", UINT32, ABSURD))), f"{ABSURD * 4} bytes wanted"),
    "array of strings": (header(entry(b"a", ARRAY, struct.pack("<IQ", STRING, ABSURD))), "8 bytes wanted"),
    "array of arrays": (header(entry(b"a", ARRAY, struct.pack("<IQ", ARRAY, ABSURD))), "unknown type 9"),
    "unknown metadata": (header(entry(b"a", 99, b"")), "unknown type 99"),
    "not UTF-8": (header(entry(b"\xff", UINT8, b"\0")), "utf-8"),
    "repeated key": (header(EMPTY, EMPTY), "twice"),
    "alignment of zero": (header(entry(b"general.alignment", UINT32, bytes(4))), "alignment of 0"),
    "odd alignment": (header(entry(b"general.alignment", UINT32, b"\3\0\0\0")), "alignment of 3"),
    "textual alignment": (header(entry(b"general.alignment", STRING, text(b"x"))), "alignment of 'x'"),
    "dimension count": (header(tensors=(tensor(b"a", (), dimensions=2**32 - 1),)), "4294967295 dimensions"),
    "huge tensor": (header(tensors=(tensor(b"a", (2**62, 2**62)),)) + bytes(99), "ending at byte"),
    "empty tensor": (header(tensors=(tensor(b"a", (0,)),)), "whole blocks"),
    "broken block": (header(tensors=(tensor(b"a", (31,), code=8),)) + bytes(99), "whole blocks of 32"),
    "unknown tensor": (header(tensors=(tensor(b"a", (4,), code=77),)) + bytes(99), "unknown type 77"),
    "far tensor": (header(tensors=(tensor(b"a", (4,), offset=2**63),)) + bytes(99), "ending at byte"),
    "repeated tensor": (header(tensors=(tensor(b"a", (4,)),) * 2) + bytes(99), "'a' twice"),
    "overlap": (header(tensors=(tensor(b"a", (8,)), tensor(b"b", (8,), offset=16))) + bytes(99), "overlapping"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_headers_are_refused_at_once(tmp_path, name):
    content, message = HOSTILE[name]
    path = tmp_path / "hostile.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    start = time.monotonic()
    with pytest.raises(ValueError, match=message) as caught:
        read_header(path)
    elapsed, (_, peak) = time.monotonic() - start, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert "hostile.gguf" in str(caught.value)
    assert peak < 1 << 20
    assert elapsed < 5


def test_headers_are_bounded_whatever_the_size_of_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr("specjax.io.gguf_header.MAX_HEADER_BYTES", 1000)
    path = tmp_path / "large.gguf"
    path.write_bytes(header(entry(b"a", STRING, text(bytes(2000)))) + bytes(5000))
    with pytest.raises(ValueError, match=r"2000 bytes wanted at offset .*, where the header ends at 1000"):
        read_header(path)
