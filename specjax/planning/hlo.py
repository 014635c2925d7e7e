"""Reads the text of a compiled program: computations, their instructions, and the buffers these make."""

import dataclasses
import math
import re
from collections.abc import Iterator

_ITEM_BYTES = {"pred": 1, "s4": 0.5, "u4": 0.5, "token": 0, "opaque": 0}
_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.-]+) (?:\(.*\) -> .*)?\{")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.-]+) = ")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,<=]*)\](?:\{([^}]*)\})?")
_CALLED = re.compile(r"(calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.-]+)")
_LISTED = re.compile(r"(?:branch_computations|called_computations)=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_CHAIN = re.compile(r'chain_id="(\d+)"')
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_ALIAS = re.compile(r"\{[\d, ]*\}: \((\d+), \{[\d, ]*\}")


@dataclasses.dataclass(frozen=True)
class Buffer:
    """One array in memory."""

    dtype: str
    dims: tuple[int, ...]
    num_bytes: int
    """As it lies there, padded to whole tiles."""
    space: int
    """0 is HBM; others are on the chip, or the host's (5)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Instruction:
    """One line of a computation."""

    name: str
    opcode: str
    buffers: tuple[Buffer, ...]
    """What it makes: one, or the leaves of a tuple in order."""
    operands: tuple[str, ...]
    called: tuple[str, ...]
    """Computations it runs: a loop's condition and body, the branches of a conditional, what a fusion holds."""
    trip_count: int | None
    """Of a loop whose rounds the compiler knows."""
    chain: str | None
    """What the parts of a collective have in common that the compiler spread over several fusions."""
    op_name: str
    """Where in the traced program it comes from."""
    text: str
    """What stands behind the opcode."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Computation:
    """Instructions in the order in which they run."""

    instructions: dict[str, Instruction]
    root: str

    @property
    def parameters(self) -> list[Instruction]:
        """Its parameters in order."""
        found = [one for one in self.instructions.values() if one.opcode == "parameter"]
        return sorted(found, key=lambda one: int(one.text.split(")")[0]))

    def users(self, name: str) -> list[Instruction]:
        """Instructions that take this one."""
        return [one for one in self.instructions.values() if name in one.operands]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """A compiled module."""

    computations: dict[str, Computation]
    entry: str
    aliased: tuple[int, ...]
    """Parameters of the entry whose buffers become results."""


def parse_program(text: str) -> Program:
    """Reads what `compiled.as_text()` returns.

    Raises:
      ValueError: text without an entry computation.
    """
    computations: dict[str, Computation] = {}
    entry, name, body, root = "", "", {}, ""
    for line in text.splitlines():
        head, found = _COMPUTATION.match(line), _INSTRUCTION.match(line)
        if head and not line.startswith("HloModule"):
            name, body, root = head[2], {}, ""
            entry = name if head[1] else entry
        elif found:
            one = _instruction(found[2], line[found.end() :])
            body[one.name] = one
            root = one.name if found[1] else root
        elif line.startswith("}") and name:
            computations[name] = Computation(instructions=body, root=root)
    if not entry:
        raise ValueError("expected the text of a compiled program, got none with an ENTRY")
    aliases = re.search(r"input_output_alias=\{(.*?)\}, [a-z_]+=", text.split("\n", 1)[0] + ", x=")
    return Program(
        computations=computations,
        entry=entry,
        aliased=tuple(int(number) for number in _ALIAS.findall(aliases[1])) if aliases else (),
    )


def walk(program: Program, name: str | None = None) -> Iterator[tuple[str, Instruction]]:
    """Every instruction that a computation (the entry) runs, with the computation it is in; fusions are not opened."""
    name = program.entry if name is None else name
    for one in program.computations[name].instructions.values():
        yield name, one
        if one.opcode in ("while", "conditional", "call", "async-start"):
            for called in one.called:
                yield from walk(program, called)


def buffers(text: str) -> tuple[Buffer, ...]:
    """The arrays of a type as a program writes it."""
    return tuple(_buffer(*found) for found in _ARRAY.findall(text))


def _instruction(name: str, line: str) -> Instruction:
    made = _balanced(line) if line.startswith("(") else line.split(" ", 1)[0]
    opcode, _, rest = line[len(made) :].strip().partition("(")
    inside = _balanced(f"({rest}")[1:-1]
    attributes = rest[len(inside) + 1 :]
    listed = _LISTED.search(attributes)
    called = [found[1] for found in sorted(_CALLED.findall(attributes), key=lambda found: found[0] == "body")]
    called += [one.strip(" %") for one in listed[1].split(",")] if listed else []
    trips, chain, op_name = (one.search(attributes) for one in (_TRIPS, _CHAIN, _OP_NAME))
    return Instruction(
        name=name,
        opcode=opcode,
        buffers=buffers(made),
        operands=tuple(re.findall(r"%([\w.-]+)", inside)),
        called=tuple(called),
        trip_count=int(trips[1]) if trips else None,
        chain=chain[1] if chain else None,
        op_name=op_name[1] if op_name else "",
        text=rest,
    )


def _balanced(text: str) -> str:
    """The text up to the bracket that closes the first one."""
    depth = 0
    for index, sign in enumerate(text):
        depth += (sign == "(") - (sign == ")")
        if not depth:
            return text[: index + 1]
    return text


def _buffer(dtype: str, sizes: str, layout: str) -> Buffer:
    dims = tuple(int(size.strip("<=")) for size in sizes.split(",") if size)
    space = re.search(r"S\((\d+)\)", layout)
    number = math.prod(_tiled(dims, layout)) * item_bytes(dtype)
    return Buffer(dtype, dims, math.ceil(number), int(space[1]) if space else 0)


def _tiled(dims: tuple[int, ...], layout: str) -> list[int]:
    """The dimensions, slowest first, rounded up to whole tiles: `2,0,1:T(8,128)(2,1)S(1)`."""
    order, _, rest = layout.partition(":")
    sizes = [dims[int(place)] for place in reversed(order.split(","))] if order and dims else list(dims)
    tile = re.search(r"T\(([\d,]+)\)", rest)
    if tile is None:
        return sizes
    tiles = [int(size) for size in tile[1].split(",")]
    sizes = [1] * (len(tiles) - len(sizes)) + sizes
    whole = len(sizes) - len(tiles)
    return sizes[:whole] + [-(-size // step) * step for size, step in zip(sizes[whole:], tiles, strict=True)]


def item_bytes(dtype: str) -> float:
    """Bytes of one element: the number in the name is its bits."""
    if dtype in _ITEM_BYTES:
        return _ITEM_BYTES[dtype]
    bits = re.search(r"\d+", dtype)
    return int(bits[0]) / 8 if bits else 0
