"""Compiled programs read from text written by hand."""

import pytest

from specjax.planning.hlo import buffers, parse_program, walk

TEXT = """\
HloModule jit_steps, is_scheduled=true, input_output_alias={ {0}: (2, {}, may-alias), {1}: (0, {}, must-alias) }, \
entry_computation_layout={(f32[4]{0})->f32[4]{0}}

%fused (param_0.1: bf16[4,8], param_1.1: s32[]) -> bf16[1,8] {
  %param_1.1 = s32[]{:T(128)} parameter(1)
  %param_0.1 = bf16[4,8]{1,0:T(8,128)(2,1)} parameter(0)
  ROOT %slice.2 = bf16[1,8]{1,0:T(8,128)(2,1)} dynamic-slice(%param_0.1, %param_1.1), dynamic_slice_sizes={1,8}
}

%body.1 (arg: (s32[], /*index=1*/f32[4]{0})) -> (s32[], f32[4]) {
  %arg = (s32[]{:T(128)}, /*index=1*/f32[4]{0:T(128)S(1)}) parameter(0)
  ROOT %tuple.3 = (s32[]{:T(128)}, f32[4]{0:T(128)S(1)}) tuple(%arg, %arg)
}

%condition.1 (arg.2: (s32[], f32[4])) -> pred[] {
  %arg.2 = (s32[]{:T(128)}, f32[4]{0:T(128)}) parameter(0)
  ROOT %less = pred[]{:T(512)} constant(true)
}

ENTRY %main.9 (p: f32[4]) -> f32[4] {
  %p = f32[4]{0:T(128)} parameter(0), sharding={replicated}
  %while.5 = (s32[]{:T(128)}, f32[4]{0:T(128)}) while(%p), condition=%condition.1, body=%body.1, \
metadata={op_name="jit(steps)/while" stack_frame_id=3}, backend_config={"known_trip_count":{"n":"7"},"other":{}}
  %choice = f32[4]{0:T(128)} conditional(%p, %while.5, %p), branch_computations={%body.1, %condition.1}
  ROOT %all-reduce-start.1 = (f32[4]{0}, f32[4]{0}) all-reduce-start(%choice), to_apply=%condition.1
}
"""


@pytest.fixture(scope="module")
def program():
    return parse_program(TEXT)


def test_computations_and_their_instructions(program):
    assert list(program.computations) == ["fused", "body.1", "condition.1", "main.9"]
    assert program.entry == "main.9"
    assert program.computations["fused"].root == "slice.2"
    assert [one.name for one in program.computations["fused"].parameters] == ["param_0.1", "param_1.1"]
    assert [one.name for one in program.computations["fused"].users("param_0.1")] == ["slice.2"]


def test_what_an_instruction_says(program):
    loop = program.computations["main.9"].instructions["while.5"]
    assert (loop.opcode, loop.operands, loop.called) == ("while", ("p",), ("condition.1", "body.1"))
    assert (loop.trip_count, loop.op_name) == (7, "jit(steps)/while")
    assert [buffer.dims for buffer in loop.buffers] == [(), (4,)]
    choice = program.computations["main.9"].instructions["choice"]
    assert (choice.called, choice.trip_count, choice.op_name) == (("body.1", "condition.1"), None, "")


def test_results_that_live_on_in_arguments(program):
    assert program.aliased == (2, 0)
    assert parse_program(TEXT.replace("input_output_alias", "other")).aliased == ()


def test_walking_enters_loops_and_branches_and_no_fusion(program):
    names = [one.name for _, one in walk(program)]
    assert names.index("while.5") < names.index("less") < names.index("tuple.3") < names.index("choice")
    assert names.count("tuple.3") == 2
    assert "slice.2" not in names


@pytest.mark.parametrize(
    ("text", "num_bytes", "space"),
    [
        ("f32[4,8]", 128, 0),
        ("f32[4,8]{1,0}", 128, 0),
        ("f32[4,8]{1,0:T(8,128)}", 8 * 128 * 4, 0),
        ("bf16[8,5,200]{2,1,0:T(8,128)(2,1)}", 8 * 8 * 256 * 2, 0),
        ("bf16[8,5,200]{0,2,1:T(8,128)(2,1)S(1)}", 5 * 200 * 128 * 2, 1),
        ("s32[3]{0:T(128)}", 512, 0),
        ("s32[]{:T(128)}", 512, 0),
        ("f32[7]{0:T(8,128)}", 8 * 128 * 4, 0),
        ("pred[16]{0:S(5)}", 16, 5),
        ("u4[6]", 3, 0),
        ("token[]", 0, 0),
    ],
)
def test_bytes_of_a_buffer_are_those_of_its_tiles(text, num_bytes, space):
    (found,) = buffers(text)
    assert (found.num_bytes, found.space) == (num_bytes, space)


def test_other_text_is_refused():
    with pytest.raises(ValueError, match="expected the text of a compiled program"):
        parse_program("HloModule nothing\n")
