import jax
import pytest

from specjax.jobs.placement import Placement
from specjax.parallel.drivers import SINGLE_DEVICE
from specjax.parallel.launch import agreed, only_on_first, start
from specjax.parallel.pmapped import PMap
from specjax.parallel.sharded import Jit, ShardMap


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"mesh": "2,4"}, "expected --mesh like data=2,model=4, got '2,4'"),
        ({"mesh": "data=0"}, "expected --mesh like"),
        ({"mesh": "data=1,data=1"}, "expected --mesh like"),
        ({"mesh": "rows=2"}, "expected --mesh like"),
        ({"coordinator_address": "a:1"}, "--num-processes and --process-id together, got some"),
        ({"num_processes": 2, "process_id": 0}, "together, got some"),
        ({"coordinator_address": "auto", "num_processes": 2}, "auto without --num-processes"),
        ({"coordinator_address": "a:1", "num_processes": 2, "process_id": 2}, r"--process-id in 0..1, got 2"),
        ({"driver": "pmap", "coordinator_address": "auto"}, "shard_map or jit with several processes, got pmap"),
    ],
)
def test_what_does_not_go_together_is_refused(fields, says):
    with pytest.raises(ValueError, match=says):
        Placement(**fields)


def test_a_single_device_needs_no_mesh():
    assert Placement().build() == SINGLE_DEVICE
    assert Placement().num_groups == 1


@pytest.mark.parametrize(("name", "kind"), [("auto", ShardMap), ("shard_map", ShardMap), ("jit", Jit), ("pmap", PMap)])
def test_drivers_by_name(name, kind):
    driver = Placement(driver=name, mesh="model=1").build()
    assert type(driver) is kind
    assert dict(driver.mesh.shape) == {"data": 1, "model": 1}


def test_more_devices_than_there_are_are_refused():
    placement = Placement(mesh="model=2,data=3")
    assert placement.num_groups == 3
    with pytest.raises(ValueError, match="expected a mesh of 1 to 1 devices, got data=3 and model=2"):
        placement.build()


def test_sizes_of_the_mesh():
    assert Placement().sizes() == {"data": 1, "model": 1}
    assert Placement(mesh="data=4").sizes() == {"data": 4, "model": 1}


def test_one_process_agrees_with_itself_and_writes():
    start()
    assert not jax.distributed.is_initialized()
    assert agreed((1.0, 2.0)) == (1.0, 2.0)
    assert only_on_first("a") == "a"


def test_a_pod_that_was_not_joined_is_refused(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 4)
    with pytest.raises(ValueError, match="expected --coordinator-address auto on 4 hosts, got none"):
        start()
