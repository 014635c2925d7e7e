"""What running a compiled program moves: bytes of HBM, and collectives.

Of each instruction that runs, what it reads and what it writes, as the buffers lie in memory; of a slice, a gather or
an update in place only the part that it touches; nothing of what the compiler keeps on the chip. A loop counts as often
as the compiler or the caller knows that it runs, otherwise once. A conditional counts as its cheapest branch
or its dearest.
"""

import dataclasses
import enum
from collections.abc import Callable, Iterator, Mapping

from specjax.planning.hlo import Buffer, Computation, Instruction, Program

Known = Callable[[Instruction], int | None]
"""How often a loop runs; None: it is not known."""

COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "reduce-scatter", "collective-permute", "collective-broadcast")
_FREE = {
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "after-all",
    "partition-id",
    "replica-id",
    "opt-barrier",
    "add-dependency",
    "domain",
}
_PARTS = {"slice", "dynamic-slice", "gather"}
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}
"""Instructions that write into their first operand, and which operand holds what they write."""
_VIEWS = {"bitcast", "reshape", "copy"}
_HOST = ("infeed", "outfeed", "send", "recv")
_HOST_SPACE = 5


class Count(enum.Enum):
    """Which branch of a conditional counts."""

    CHEAPEST = enum.auto()
    DEAREST = enum.auto()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traffic:
    """Sums over what runs, on one device."""

    num_bytes: float = 0
    collectives: dict[str, tuple[float, float]] = dataclasses.field(default_factory=dict)
    """By kind: how many, and the bytes of their results."""

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(
            num_bytes=self.num_bytes + other.num_bytes,
            collectives=_both(self.collectives, other.collectives),
        )

    def __mul__(self, times: float) -> "Traffic":
        return Traffic(
            num_bytes=self.num_bytes * times,
            collectives={kind: (count * times, size * times) for kind, (count, size) in self.collectives.items()},
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counter:
    """Counts one program."""

    program: Program
    known: Known
    count: Count = Count.CHEAPEST

    def computation(self, name: str) -> Traffic:
        """What one run of a computation moves."""
        body = self.program.computations[name]
        moved = sum((self.instruction(body, one) for one in body.instructions.values()), Traffic())
        return moved + Traffic(collectives=self._exchanged(body))

    def instruction(self, body: Computation, one: Instruction) -> Traffic:
        """What one instruction of a computation moves, with all that it calls; collectives not among them."""
        if one.opcode == "while":
            rounds = self.known(one) if one.trip_count is None else one.trip_count
            return sum(map(self.computation, one.called), Traffic()) * (1 if rounds is None else rounds)
        if one.opcode == "conditional":
            return self._conditional(one)
        if one.opcode in ("call", "async-start"):
            return sum(map(self.computation, one.called), Traffic())
        return Traffic(num_bytes=self._moved(body, one))

    def _exchanged(self, body: Computation) -> dict[str, tuple[float, float]]:
        """The collectives of a computation, also inside its fusions."""
        found = {one.chain or one.name: one for one in self._collectives(body)}
        sums: dict[str, tuple[float, float]] = {}
        for one in found.values():
            kind = _kind(one)
            count, size = sums.get(kind, (0, 0))
            sums[kind] = count + 1, size + sum(buffer.num_bytes for buffer in made(one))
        return sums

    def _collectives(self, body: Computation) -> Iterator[Instruction]:
        for one in body.instructions.values():
            if _kind(one) in COLLECTIVES:
                yield one
            if one.opcode == "fusion":
                yield from self._collectives(self.program.computations[one.called[0]])

    def _conditional(self, one: Instruction) -> Traffic:
        pick = min if self.count is Count.CHEAPEST else max
        return pick((self.computation(name) for name in one.called), key=lambda traffic: traffic.num_bytes)

    def _moved(self, body: Computation, one: Instruction) -> float:
        if one.opcode in _FREE or one.opcode.endswith("-done"):
            return 0
        if one.opcode == "fusion":
            return self._fused(body, one)
        if one.opcode.removesuffix("-start") in _PARTS:
            return sum(map(_in_hbm, made(one))) + sum(map(_in_hbm, _cut_from(body, one)))
        if one.opcode in _UPDATES:
            return 2 * sum(buffer.num_bytes for buffer in _written(body, one))
        taken = [buffer for name in dict.fromkeys(one.operands) for buffer in _operand(body, name)]
        return sum(map(_in_hbm, taken)) + sum(map(_in_hbm, made(one)))

    def _fused(self, body: Computation, one: Instruction) -> float:
        """A fusion reads of each operand what its instructions touch, and writes its results."""
        inside = self.program.computations[one.called[0]]
        read = sum(
            self._touched(inside, parameter.name)
            for parameter, name in zip(inside.parameters, one.operands, strict=True)
            if any(map(_in_hbm, _operand(body, name)))
        )
        roots = _roots(inside, inside.root)
        if _in_flight(inside.instructions[inside.root]) and len(one.buffers) > 1:
            return read
        if len(roots) != len(one.buffers):
            return read + sum(map(_in_hbm, one.buffers))
        return read + sum(self._result(inside, root, buffer) for root, buffer in zip(roots, one.buffers, strict=True))

    def _touched(self, inside: Computation, name: str) -> float:
        """Bytes of a fusion's parameter that are read."""
        whole = sum(buffer.num_bytes for buffer in inside.instructions[name].buffers)
        uses = [self._use(inside, user, name) for user in inside.users(name)]
        return min(sum(whole if use is None else use for use in uses), whole)

    def _use(self, inside: Computation, user: Instruction, name: str) -> float | None:
        """Bytes of the value `name` that an instruction in a fusion reads; None: all."""
        first = user.operands[0] == name
        if user.opcode in _PARTS and first:
            return sum(buffer.num_bytes for buffer in user.buffers)
        if (user.opcode in _UPDATES and first) or user.opcode == "tuple" or _in_flight(user):
            return 0
        if user.opcode in _VIEWS:
            return self._touched(inside, user.name)
        if user.opcode == "fusion":
            nested = self.program.computations[user.called[0]]
            mine = [nested.parameters[place].name for place, one in enumerate(user.operands) if one == name]
            passed = {_seen_through(nested, nested.instructions[root]).name for root in _roots(nested, nested.root)}
            beyond = self._touched(inside, user.name) if passed & {*mine} else 0  # the fusion is but a view
            return sum(self._touched(nested, one) for one in mine) + beyond
        return None

    def _result(self, inside: Computation, name: str, made: Buffer) -> float:
        """Bytes that a fusion writes as one of its results: an update in place writes what it changes."""
        root = _seen_through(inside, inside.instructions[name])
        if root.opcode == "parameter" or root.chain is not None:
            return 0
        if root.opcode == "fusion":
            nested = self.program.computations[root.called[0]]
            return self._result(nested, nested.root, made)
        if root.opcode in _UPDATES:
            return sum(buffer.num_bytes for buffer in _written(inside, root)) if not made.space else 0
        return _in_hbm(made)


def _both(
    some: Mapping[str, tuple[float, float]], others: Mapping[str, tuple[float, float]]
) -> dict[str, tuple[float, float]]:
    pairs = {kind: (some.get(kind, (0, 0)), others.get(kind, (0, 0))) for kind in {*some, *others}}
    return {kind: (one[0] + other[0], one[1] + other[1]) for kind, (one, other) in pairs.items()}


def made(one: Instruction) -> tuple[Buffer, ...]:
    """What an instruction makes, without what the start of an asynchronous one hands on beside that."""
    if not one.opcode.endswith("-start") or len(one.buffers) == 1:
        return one.buffers
    place = 0 if one.opcode == "copy-start" else len(one.operands)
    return one.buffers if one.opcode == "all-reduce-start" else one.buffers[place : place + 1]


def in_place(program: Program, one: Instruction) -> bool:
    """Whether an instruction, or every result of a fusion, changes part of a buffer that it was given."""
    if one.opcode != "fusion":
        return one.opcode in _UPDATES
    inside = program.computations[one.called[0]]
    roots = [inside.instructions[name] for name in _roots(inside, inside.root)]
    return all(in_place(program, _seen_through(inside, root)) for root in roots)


def _in_flight(one: Instruction) -> bool:
    """Whether an instruction is part of a collective that goes on beside other work; its end makes the result."""
    return one.chain is not None or (one.opcode == "custom-call" and '"AsyncCollective' in one.text)


def _kind(one: Instruction) -> str:
    return one.opcode.removesuffix("-start")


def is_host_transfer(one: Instruction) -> bool:
    """Whether an instruction speaks to the host, or to its memory."""
    if one.opcode in _HOST or (one.opcode == "custom-call" and "callback" in one.text):
        return True
    return any(buffer.space == _HOST_SPACE for buffer in one.buffers) and one.opcode.startswith("copy")


def _seen_through(inside: Computation, one: Instruction) -> Instruction:
    """The instruction behind mere views of its result."""
    return _seen_through(inside, inside.instructions[one.operands[0]]) if one.opcode in _VIEWS else one


def _in_hbm(buffer: Buffer) -> int:
    return 0 if buffer.space else buffer.num_bytes


def _operand(body: Computation, name: str) -> tuple[Buffer, ...]:
    return body.instructions[name].buffers if name in body.instructions else ()


def _cut_from(body: Computation, one: Instruction) -> list[Buffer]:
    """The part of its first operand that a slice reads: as large as what it makes, where the operand lies."""
    source = _operand(body, one.operands[0])
    return [dataclasses.replace(buffer, space=source[0].space) for buffer in made(one)] if source else []


def _written(body: Computation, one: Instruction) -> tuple[Buffer, ...]:
    place = _UPDATES[one.opcode] if one.opcode != "scatter" else len(one.operands) - 1
    return _operand(body, one.operands[place])


def _roots(inside: Computation, name: str) -> list[str]:
    root = inside.instructions[name]
    return [leaf for part in root.operands for leaf in _roots(inside, part)] if root.opcode == "tuple" else [name]
