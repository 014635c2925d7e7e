"""Bytes and collectives counted in programs written by hand: each line's own share, worked out beside it."""

import pytest

from specjax.planning.hlo import parse_program
from specjax.planning.traffic import Count, Counter, Traffic, in_place, is_host_transfer

FUSIONS = """
%look_up (table: f32[100,10], row: s32[]) -> f32[1,10] {
  %table = f32[100,10] parameter(0)
  %row = s32[] parameter(1)
  %view = f32[1000] bitcast(%table)
  ROOT %found = f32[10] dynamic-slice(%view, %row), dynamic_slice_sizes={10}
}

%write (old: f32[100,10], new: f32[1,10], at: s32[]) -> f32[100,10] {
  %old = f32[100,10] parameter(0)
  %new = f32[1,10] parameter(1)
  %at = s32[] parameter(2)
  %twice = f32[1,10] add(%new, %new)
  ROOT %changed = f32[100,10] dynamic-update-slice(%old, %twice, %at, %at)
}

%outer (big: f32[100,10], where: s32[]) -> (f32[10], f32[100,10]) {
  %big = f32[100,10] parameter(0)
  %where = s32[] parameter(1)
  %inner = f32[10] fusion(%big, %where), kind=kLoop, calls=%look_up
  %copied = f32[100,10] negate(%big)
  ROOT %both = (f32[10], f32[100,10]) tuple(%inner, %copied)
}

%view_only (seen: f32[100,10]) -> f32[1000] {
  %seen = f32[100,10] parameter(0)
  ROOT %flat = f32[1000] bitcast(%seen)
}

%through_a_view (whole: f32[100,10], add: f32[5]) -> f32[1000] {
  %whole = f32[100,10] parameter(0)
  %add = f32[5] parameter(1)
  %line = f32[1000] fusion(%whole), kind=kLoop, calls=%view_only
  ROOT %sum = f32[1000] add(%line, %add)
}

%small (a: f32[5]) -> f32[5] {
  %a = f32[5] parameter(0)
  ROOT %negated = f32[5] negate(%a)
}

%large (b: f32[5]) -> f32[5] {
  %b = f32[5] parameter(0)
  %wide = f32[50] broadcast(%b), dimensions={}
  ROOT %summed = f32[5] all-reduce(%wide), to_apply=%small
}

%go (c: f32[5]) -> pred[] {
  %c = f32[5] parameter(0)
  ROOT %yes = pred[] constant(true)
}

ENTRY %main (x: f32[100,10], i: s32[], y: f32[1,10], z: f32[5]) -> f32[5] {
  %x = f32[100,10] parameter(0)
  %i = s32[] parameter(1)
  %y = f32[1,10] parameter(2)
  %z = f32[5] parameter(3)
  %on_chip = f32[100,10]{1,0:S(1)} parameter(4)
"""


def last(line):
    """One line as an instruction at the end of that program."""
    program = parse_program(f"HloModule test\n{FUSIONS}  ROOT %last = {line}\n}}\n")
    return program.computations["main"].instructions["last"]


def moved(line, count=Count.CHEAPEST, known=None):
    """What one line moves, at the end of a program that holds the arguments and computations above."""
    program = parse_program(f"HloModule test\n{FUSIONS}  ROOT %last = {line}\n}}\n")
    counter = Counter(program=program, known=lambda one: known, count=count)
    return counter.computation("main")


@pytest.mark.parametrize(
    ("line", "num_bytes"),
    [
        ("f32[100,10] negate(%x)", 8000),
        ("f32[100,10] add(%x, %x)", 8000),
        ("f32[100,10] negate(%on_chip)", 4000),
        ("f32[100,10]{1,0:S(1)} copy(%x)", 4000),
        ("f32[1000] bitcast(%x)", 0),
        ("(f32[5], f32[5]) tuple(%z, %z)", 0),
        ("f32[2,10] slice(%x), slice={[0:2], [0:10]}", 160),
        ("f32[2,10] dynamic-slice(%on_chip, %i, %i), dynamic_slice_sizes={2,10}", 80),
        ("f32[100,10] dynamic-update-slice(%x, %y, %i, %i)", 80),
        ("f32[100,10] scatter(%x, %i, %y), to_apply=%small", 80),
        ("f32[10] fusion(%x, %i), kind=kLoop, calls=%look_up", 40 + 4 + 40),
        ("f32[10] fusion(%on_chip, %i), kind=kLoop, calls=%look_up", 4 + 40),
        ("f32[100,10] fusion(%x, %y, %i), kind=kLoop, calls=%write", 40 + 4 + 40),
        ("(f32[10], f32[100,10]) fusion(%x, %i), kind=kLoop, calls=%outer", 4000 + 4 + 40 + 4000),
        ("f32[1000] fusion(%x, %z), kind=kLoop, calls=%through_a_view", 4000 + 20 + 4000),
        ("(f32[100,10]{1,0:S(1)}, f32[100,10], u32[]) copy-start(%x)", 4000),
        ("(f32[100,10], f32[100,10]{1,0:S(1)}, u32[]) copy-start(%on_chip)", 4000),
        ("f32[100,10] copy-done(%x)", 0),
        ("((f32[100,10]), f32[2,10]{1,0:S(1)}, s32[]) slice-start(%x), slice={[0:2], [0:10]}", 80),
    ],
)
def test_bytes_of_an_instruction(line, num_bytes):
    assert moved(line).num_bytes == num_bytes


SMALL, LARGE = 40, 20 + 200 + 200 + 20


def test_loops_count_their_rounds_where_these_are_known():
    loop = "f32[5] while(%z), condition=%go, body=%large"
    assert moved(loop) == Traffic(num_bytes=LARGE, collectives={"all-reduce": (1, 20)})
    assert moved(loop, known=2).num_bytes == 2 * LARGE
    rounds = moved(loop + ', backend_config={"known_trip_count":{"n":"3"}}', known=2)
    assert rounds == Traffic(num_bytes=3 * LARGE, collectives={"all-reduce": (3, 60)})


def test_a_collective_spread_over_fusions_counts_once():
    """The compiler runs other work while it waits: each of those fusions repeats the collective, under one chain."""
    plain = "all-reduce(%wide)"
    parts = FUSIONS.replace(plain, f'{plain}, frontend_attributes={{chain_id="3"}}')
    last = "  %first = f32[5] fusion(%z), calls=%large\n  ROOT %last = f32[5] fusion(%z), calls=%large\n}\n"
    program = parse_program(f"HloModule test\n{parts}{last}")
    assert Counter(program=program, known=lambda one: None).computation("main").collectives == {"all-reduce": (1, 20)}


def test_conditionals_count_one_branch():
    choice = "f32[5] conditional(%i, %z, %z), branch_computations={%large, %small}"
    assert moved(choice).num_bytes == SMALL
    assert moved(choice, Count.DEAREST).num_bytes == LARGE


def test_collectives_by_kind():
    assert moved("f32[5] all-gather(%z), dimensions={0}").collectives == {"all-gather": (1, 20)}
    assert moved("(f32[5], f32[40]) all-gather-start(%z), dimensions={0}").collectives == {"all-gather": (1, 160)}
    assert moved("f32[40] all-gather-done(%z)").collectives == {}
    spread = "f32[5] fusion(%z), kind=kCustom, calls=%large"
    assert moved(spread).collectives == {"all-reduce": (1, 20)}
    one, two = Traffic(collectives={"all-gather": (1, 4)}), Traffic(collectives={"all-reduce": (2, 8)})
    assert (one + two + one).collectives == {"all-gather": (2, 8), "all-reduce": (2, 8)}


@pytest.mark.parametrize(
    "line",
    [
        "((f32[5]), token[]) infeed(%z)",
        "(f32[5], u32[], token[]) send(%z, %z), is_host_transfer=true",
        'f32[5] custom-call(%z), custom_call_target="xla_ffi_python_cpu_callback"',
        "f32[5]{0:S(5)} copy(%z)",
    ],
)
def test_the_host_is_noticed(line):
    assert is_host_transfer(last(line))
    assert not is_host_transfer(last("f32[5] negate(%z)"))


def test_which_instructions_work_in_place():
    text = f"HloModule test\n{FUSIONS}" + "\n".join(
        [
            "  %a.1 = f32[100,10] fusion(%x, %y, %i), kind=kLoop, calls=%write",
            "  %a.2 = (f32[10], f32[100,10]) fusion(%x, %i), kind=kLoop, calls=%outer",
            "  %a.3 = f32[100,10] copy(%x)",
            "  ROOT %a.4 = f32[100,10] scatter(%x, %i, %y), to_apply=%small\n}\n",
        ]
    )
    program = parse_program(text)
    instructions = program.computations["main"].instructions
    assert [in_place(program, instructions[f"a.{index}"]) for index in range(1, 5)] == [True, False, False, True]
