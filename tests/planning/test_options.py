"""The command line of scripts/plan.py."""

from pathlib import Path

import pytest

from specjax.planning.options import parse_request
from specjax.verify import Rejection

GIVEN = ["--target", "llama-3.1-8b", "--draft", "llama-3.2-1b", "--topology", "v5e:2x4"]


def parse(*arguments):
    return parse_request([*GIVEN, *map(str, arguments)])[0]


def test_what_is_not_said():
    request, output, plot = parse_request(GIVEN)
    assert (request.batch_sizes, request.context, request.num_speculative_tokens) == ((1, 8, 64), 2048, 4)
    assert (request.data, request.parts, request.parallel, request.dtype) == (1, 8, "shard_map", "bfloat16")
    assert request.programs == ("prefill", "plain", "speculative")
    assert (output, plot) == (None, None)


def test_everything_said(tmp_path):
    arguments = ["--mesh", "data=2,model=4", "--batch", "2,4", "--context", "512", "--parallel", "pmap"]
    arguments += ["--shard-drafter", "--output", str(tmp_path / "plan.json"), "--plot", "plan.png"]
    request, output, plot = parse_request([*GIVEN, *arguments])
    assert (request.data, request.parts, request.batch_sizes, request.context) == (2, 4, (2, 4), 512)
    assert (request.parallel, output, plot) == ("pmap", tmp_path / "plan.json", Path("plan.png"))


def test_a_mesh_of_one_axis_leaves_the_rest_to_the_other():
    assert parse("--mesh", "data=4", "--batch", 4).parts == 2
    assert parse("--mesh", "model=4").parts == 4


@pytest.mark.parametrize("shard", [False, True])
def test_the_decoder(shard):
    config = parse(*["--shard-drafter"] * shard).decoder()
    assert (config.target.config.num_layers, config.target.axis) == (32, "model")
    assert (config.drafter.model.config.num_layers, config.drafter.num_tokens) == (16, 4)
    assert config.drafter.model.axis == ("model" if shard else None)
    assert config.verifier == Rejection()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch", "1,"], "expected --batch like 1,8,64, got '1,'"),
        (["--batch", "3", "--mesh", "data=2"], "expected batch sizes that divide by data=2"),
        (["--mesh", "data=3,model=4"], "expected a mesh of at most 8 devices, got 3 x 4"),
        (["--mesh", "rows=2"], "expected --mesh like data=2,model=4"),
        (["--context", "256"], "expected new tokens in 1..255, got 256"),
        (["--num-speculative-tokens", "0"], "expected 1 to 16 speculative tokens, got 0"),
        (["--programs", "draft"], "expected programs among prefill, plain, speculative, got draft"),
        (["--topology", "v9:2x4"], "expected a topology like v5e:2x4"),
        (["--target", "gpt"], "expected a path to a config.json or one of"),
        (["--parallel", "jit"], "invalid choice"),
        (["--batches", "1"], "expected options that --help names, got --batches 1"),
    ],
)
def test_what_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        parse(*arguments)
