"""One step of the decoding loop, found in a compiled `decode_steps` or `prefill`, and what there is to say of it."""

import dataclasses
from typing import Any

import jax

from specjax.models.attention import block_size
from specjax.planning.hlo import Buffer, Instruction, Program, walk
from specjax.planning.traffic import Count, Counter, Known, Traffic, in_place, is_host_transfer, made

_LAYER = "_run_layer"
"""What the origin of every instruction of a layer holds; attention's are the loops in it."""
_CARRIED = ("parameter", "get-tuple-element", "tuple", "bitcast", "while", "conditional", "call", "opt-barrier")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """What one round of the decoding loop moves."""

    whole: Traffic
    """Draft, verify and commit, with the widest window."""
    verify: Traffic
    """The target's call, the law, the verdict, and what the drafter learns from them."""


def attention(capacity: int, context: int, sliding_window: int | None = None) -> Known:
    """Blocks that attention reads of buffers of `capacity` slots, `context` of them taken in each row.

    With a sliding window (in tokens, the query included) in all layers, those before it are not read.
    """
    size = block_size(capacity)
    first = 0 if sliding_window is None else max(context - sliding_window + 1, 0)
    num_blocks = -(-context // size) - first // size
    return lambda one: num_blocks if one.opcode == "while" and _LAYER in one.op_name else None


def main_loop(program: Program) -> Instruction:
    """The loop that all others are in.

    Raises:
      ValueError: a program without loops.
    """
    counter = Counter(program=program, known=lambda one: None)
    loops = _outermost(program, program.entry)
    if not loops:
        raise ValueError("expected a program with a loop, got none")
    return max(loops, key=lambda one: sum(counter.computation(name).num_bytes for name in one.called))


def count_step(program: Program, window: int, known: Known, count: Count) -> Step:
    """One round of `decode_steps` that drafts and verifies `window` tokens; 0 is a step without speculation.

    What drafts comes first and holds a loop over the tokens. Then each window is a loop of one round at most, the
    narrowest first (see `decode.verify_step`): only the last one runs.

    Raises:
      ValueError: a loop that does not look so.
    """
    loop = main_loop(program)
    rounds, num_windows = f"{loop.op_name}/body/while", 2 if window else 1

    def told(one: Instruction) -> int | None:
        return window if one.op_name == f"{rounds}/body/while" else known(one)

    inner = [one for one in _outermost(program, loop.called[-1]) if one.op_name == rounds]
    if len(inner) < num_windows:
        raise ValueError(f"expected a loop for each of {num_windows} windows in the decoding loop, got {len(inner)}")
    *skipped, widest = inner[-num_windows:]
    counter, left_out = Counter(program=program, known=told, count=count), {one.name for one in skipped}
    others = Traffic()
    for name, one in walk(program, loop.called[-1]):
        if one.name in left_out:
            others = others + counter.instruction(program.computations[name], one)
    verify = sum(map(counter.computation, widest.called), Traffic())
    return Step(whole=count_loop(program, told, count) + others * -1, verify=verify)


def count_loop(program: Program, known: Known, count: Count) -> Traffic:
    """One round of the main loop."""
    counter = Counter(program=program, known=known, count=count)
    return sum(map(counter.computation, main_loop(program).called), Traffic())


def host_transfers(program: Program) -> int:
    """Instructions in the main loop that speak to the host, in whatever branch or window they are."""
    names = main_loop(program).called
    return sum(is_host_transfer(one) for name in names for _, one in walk(program, name))


def made_like(program: Program, cache: Any) -> list[str]:
    """Instructions inside the loop that make a buffer as large as one of a cache's in HBM, other than in place."""
    shapes = {_shape(leaf.shape) for leaf in jax.tree.leaves(cache) if len(leaf.shape) > 2}

    def large(buffer: Buffer) -> bool:
        return not buffer.space and _shape(buffer.dims) in shapes

    found = []
    for _, one in walk(program, main_loop(program).called[-1]):
        idle = one.opcode in _CARRIED or one.opcode.endswith("-done") or in_place(program, one)
        if not idle and any(map(large, made(one))):
            found.append(f"{one.opcode} {one.name}")
    return found


def _outermost(program: Program, name: str) -> list[Instruction]:
    """The loops of a computation and of what it calls, not those inside loops."""
    loops = []
    for one in program.computations[name].instructions.values():
        if one.opcode == "while":
            loops.append(one)
        if one.opcode == "call":
            loops += [loop for called in one.called for loop in _outermost(program, called)]
    return loops


def _shape(dims: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in dims if size != 1)
