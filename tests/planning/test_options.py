"""The command line of scripts/plan.py."""

from pathlib import Path

import pytest

from specjax.jobs.placement import Placement
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


@pytest.mark.parametrize("mesh", ["data=4", "model=4", "model=2,data=2"])
def test_a_mesh_is_what_generate_makes_of_it(mesh):
    request = parse("--mesh", mesh, "--batch", 4)
    assert {"data": request.data, "model": request.parts} == Placement(mesh=mesh).sizes()


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
        (["--batch", "3", "--mesh", "data=2"], "expected batch sizes that are multiples of data=2"),
        (["--mesh", "data=3,model=4"], "expected a mesh of at most 8 devices, got 3 x 4"),
        (["--mesh", "rows=2"], "expected --mesh like data=2,model=4"),
        (["--context", "256"], "expected new tokens in 1..255, got 256"),
        (["--context", "131073"], "expected a context within the target's 131072 positions, got 131073"),
        (["--output", "nowhere/plan.json"], "expected --output to be a file in a directory that exists, got nowhere"),
        (["--plot", "."], "expected --plot to be a file in a directory that exists"),
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
