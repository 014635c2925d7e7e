"""A bounded reader of GGUF headers: no count in the file makes it loop or allocate beyond the header's own bytes."""

import dataclasses
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

MAX_HEADER_BYTES = 1 << 26
"""64 MiB: several times the largest vocabulary in public use."""
_VERSIONS = (2, 3)
_MAX_DIMENSIONS = 4
_ALIGNMENT = 32
_SCALARS = {
    GGUFValueType.UINT8: "<u1",
    GGUFValueType.INT8: "<i1",
    GGUFValueType.UINT16: "<u2",
    GGUFValueType.INT16: "<i2",
    GGUFValueType.UINT32: "<u4",
    GGUFValueType.INT32: "<i4",
    GGUFValueType.FLOAT32: "<f4",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "<u8",
    GGUFValueType.INT64: "<i8",
    GGUFValueType.FLOAT64: "<f8",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class GGUFTensor:
    """Where a tensor lies in the file."""

    shape: tuple[int, ...]
    """In elements, `[out, in]` for a matrix (GGUF itself lists the fastest axis first)."""
    kind: GGMLQuantizationType
    offset: int
    """Bytes from the start of the file."""
    num_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class GGUFHeader:
    """All of a GGUF file but the weights."""

    metadata: Mapping[str, Any]
    """int, float, bool, str, a list of str, or a NumPy array of numbers for each key."""
    tensors: Mapping[str, GGUFTensor]


def read_header(path: Path) -> GGUFHeader:
    """Reads and checks the header of a GGUF file (versions 2 and 3, little-endian).

    Args:
      path: the file.

    Returns:
      Its metadata and the places of its tensors, all of them inside the file.

    Raises:
      ValueError: not a GGUF file, damaged, truncated, or with a header above `MAX_HEADER_BYTES`.
    """
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            return _read(_Cursor(file, min(size, MAX_HEADER_BYTES)), size)
    except ValueError as error:
        raise ValueError(f"expected {path} to be a whole GGUF file, got: {error}") from error


class _Cursor:
    """Reads forward through the header, never past `limit`."""

    def __init__(self, file: BinaryIO, limit: int):
        self._file = file
        self._limit = limit
        self.position = 0

    def take(self, count: int) -> bytes:
        if count > self._limit - self.position:
            raise ValueError(f"{count} bytes wanted at offset {self.position}, where the header ends at {self._limit}")
        self.position += count
        return self._file.read(count)

    def integer(self, layout: str) -> int:
        return struct.unpack(layout, self.take(struct.calcsize(layout)))[0]

    def string(self) -> str:
        return self.take(self.integer("<Q")).decode("utf-8")


def _read(cursor: _Cursor, size: int) -> GGUFHeader:
    if cursor.take(4) != b"GGUF":
        raise ValueError("no GGUF mark at its start")
    version = cursor.integer("<I")
    if version not in _VERSIONS:
        raise ValueError(f"version {version}, none of {_VERSIONS} in little-endian order")
    num_tensors, num_entries = cursor.integer("<Q"), cursor.integer("<Q")
    metadata: dict[str, Any] = {}
    for _ in range(num_entries):
        _add(metadata, cursor.string(), _read_value(cursor, cursor.integer("<I")))
    entries: dict[str, tuple[tuple[int, ...], int, int]] = {}
    for _ in range(num_tensors):
        _add(entries, cursor.string(), _read_tensor(cursor))
    start = _align(cursor.position, metadata.get("general.alignment", _ALIGNMENT))
    tensors = {name: _locate(name, start, *entry) for name, entry in entries.items()}
    _check_places(tensors, size)
    return GGUFHeader(metadata=metadata, tensors=tensors)


def _add(entries: dict[str, Any], name: str, value: Any) -> None:
    """A repeated name is damage, and ends a run of empty entries at its second one."""
    if name in entries:
        raise ValueError(f"{name!r} twice")
    entries[name] = value


def _read_value(cursor: _Cursor, code: int) -> Any:
    if code == GGUFValueType.STRING:
        return cursor.string()
    if code != GGUFValueType.ARRAY:
        return _read_scalars(cursor, code, 1)[0].item()
    code, count = cursor.integer("<I"), cursor.integer("<Q")
    if code == GGUFValueType.STRING:
        return [cursor.string() for _ in range(count)]
    return _read_scalars(cursor, code, count)


def _read_scalars(cursor: _Cursor, code: int, count: int) -> np.ndarray:
    if code not in _SCALARS:
        raise ValueError(f"metadata of the unknown type {code}")
    dtype = np.dtype(_SCALARS[GGUFValueType(code)])
    return np.frombuffer(cursor.take(count * dtype.itemsize), dtype)


def _read_tensor(cursor: _Cursor) -> tuple[tuple[int, ...], int, int]:
    """Shape (slowest axis first), type code and offset among the weights."""
    dimensions = cursor.integer("<I")
    if not 1 <= dimensions <= _MAX_DIMENSIONS:
        raise ValueError(f"a tensor of {dimensions} dimensions, not 1 to {_MAX_DIMENSIONS}")
    shape = tuple(cursor.integer("<Q") for _ in range(dimensions))
    return shape[::-1], cursor.integer("<I"), cursor.integer("<Q")


def _align(position: int, alignment: Any) -> int:
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise ValueError(f"an alignment of {alignment!r}, not a power of two")
    return -(-position // alignment) * alignment


def _locate(name: str, start: int, shape: tuple[int, ...], code: int, offset: int) -> GGUFTensor:
    if code not in GGML_QUANT_SIZES:
        raise ValueError(f"{name!r} of the unknown type {code}")
    kind = GGMLQuantizationType(code)
    block, block_bytes = GGML_QUANT_SIZES[kind]
    if 0 in shape or shape[-1] % block:
        raise ValueError(f"{name!r} of shape {list(shape)}, whose rows are not whole blocks of {block} ({kind.name})")
    num_bytes = math.prod(shape) // block * block_bytes
    return GGUFTensor(shape=shape, kind=kind, offset=start + offset, num_bytes=num_bytes)


def _check_places(tensors: Mapping[str, GGUFTensor], size: int) -> None:
    """Tensors lie one after the other, within the file."""
    end = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].offset):
        if tensor.offset < end:
            raise ValueError(f"{name!r} overlapping the tensor before it")
        end = tensor.offset + tensor.num_bytes
        if end > size:
            raise ValueError(f"{name!r} ending at byte {end} of a file of {size}")
