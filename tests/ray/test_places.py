"""The order in which the nodes of a Ray cluster are filled."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

if find_spec("ray") is None:
    pytest.skip("places are those of Ray's nodes", allow_module_level=True)

from flowrl.runtime.ray.places import Places, assigned

NODES = {"here": {"CPU": 8.0}, "a": {"CPU": 2.0}, "b": {"CPU": 4.0, "GPU": 2.0}}


def test_one_node_is_filled_before_the_next_and_that_of_the_run_last():
    assert assigned(NODES, {"CPU": 1}, 7, last="here") == [*("b" * 4), *("a" * 2), "here"]


def test_no_worker_is_divided_between_nodes():
    assert assigned(NODES, {"CPU": 3}, 3, last="here") == ["b", "here", "here"]
    assert assigned(NODES, {"CPU": 3}, 4, last="here") is None


def test_an_accelerator_and_its_cpus_are_of_one_node():
    assert assigned(NODES, {"CPU": 1, "GPU": 1}, 2, last="here") == ["b", "b"]
    assert assigned(NODES, {"CPU": 1, "GPU": 1}, 3, last="here") is None


def test_a_node_that_goes_while_it_is_looked_at_gets_no_worker(monkeypatch: pytest.MonkeyPatch):
    places = Places.__new__(Places)
    places._here = "here"
    monkeypatch.setattr(places, "_free", lambda: NODES)
    monkeypatch.setattr(places, "_nodes", list)
    assert places.roomiest() == "DEFAULT"
