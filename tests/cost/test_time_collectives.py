"""Collectives by hand: rings inside nodes, and across."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrl.cluster.hardware import Machine, device_spec
from flowrl.cost import efficiency
from flowrl.cost.collectives import (
    Ranks,
    all_gather_s,
    all_reduce_s,
    all_to_all_s,
    reduce_scatter_s,
    send_s,
)

H100 = Machine(spec=device_spec("H100-SXM-80GB"), node_size=8)
NEAR = 450e9 * efficiency.LINK_SHARE
FAR = 50e9 * efficiency.NETWORK_SHARE


def _start(ranks: int) -> float:
    return efficiency.ALL_REDUCE_BASE_S + ranks * efficiency.ALL_REDUCE_RANK_S


def test_an_all_reduce_inside_a_node_moves_twice_what_a_ring_passes_on():
    expected = _start(4) + 2 * 3 / 4 * 1e9 / NEAR
    assert all_reduce_s(1e9, Ranks(size=4), H100) == pytest.approx(expected)


def test_gathering_and_scattering_are_half_of_an_all_reduce():
    ranks = Ranks(size=8)
    half = _start(8) + 7 / 8 * 1e9 / NEAR
    assert all_gather_s(1e9, ranks, H100) == pytest.approx(half)
    assert reduce_scatter_s(1e9, ranks, H100) == pytest.approx(half)


def test_across_nodes_each_rank_of_a_node_handles_its_share():
    # 32 ranks side by side are 4 nodes of 8.
    expected = _start(8) + 3 * efficiency.NETWORK_LATENCY_S
    expected += 2 * 7 / 8 * 1e9 / NEAR + 2 * 3 / 4 * 1e9 / 8 / FAR
    assert all_reduce_s(1e9, Ranks(size=32), H100) == pytest.approx(expected)


def test_ranks_a_node_apart_have_the_network_alone():
    expected = 2 * efficiency.NETWORK_LATENCY_S + 2 * 1 / 2 * 1e9 / FAR
    assert all_reduce_s(1e9, Ranks(size=2, stride=8), H100) == pytest.approx(expected)


def test_an_all_to_all_sends_most_of_it_out_of_the_node():
    expected = _start(8) + 2 * efficiency.NETWORK_LATENCY_S
    expected += 1e9 * 7 / 16 / NEAR + 1e9 * 8 / 16 / FAR
    assert all_to_all_s(1e9, Ranks(size=16), H100) == pytest.approx(expected)


def test_one_rank_exchanges_nothing():
    for collective in (all_reduce_s, all_gather_s, reduce_scatter_s, all_to_all_s):
        assert collective(1e9, Ranks(size=1), H100) == 0
        assert collective(0, Ranks(size=8), H100) == 0
    assert send_s(0, H100, across=True) == 0
    assert send_s(1e9, H100, across=True) > send_s(1e9, H100, across=False)


@given(size=st.sampled_from([2, 4, 8, 16, 64]), nbytes=st.floats(1e3, 1e10))
def test_more_bytes_and_leaving_the_node_take_longer(size, nbytes):
    for collective in (all_reduce_s, all_gather_s, all_to_all_s):
        once = collective(nbytes, Ranks(size=size), H100)
        assert collective(2 * nbytes, Ranks(size=size), H100) > once
        assert collective(nbytes, Ranks(size=size, stride=8), H100) > once or size > 8
