"""The limit on requests in flight falls on refusals and grows with answers."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward_kit.providers.request_queue import Concurrency


def burst(limit: Concurrency, in_flight: int, refused: int, first: int = 0) -> list[bool]:
    """Refuse `refused` of `in_flight` attempts numbered from `first`; return which changed the limit."""
    return [limit.refused(first + n, first + in_flight - 1, in_flight - n) for n in range(refused)]


def test_limit_is_infinite_before_the_first_refusal():
    limit = Concurrency()
    limit.answered(is_scarce=True)
    assert limit.limit == math.inf
    assert Concurrency(8).limit == 8.0


def test_burst_of_refusals_cuts_the_limit_once_to_seventy_percent():
    limit = Concurrency()
    assert burst(limit, 100, 20) == [True] + [False] * 19
    assert limit.limit == 70.0


def test_burst_after_answers_cuts_once_its_share_exceeds_ten_percent():
    limit = Concurrency()
    for _ in range(100):
        limit.answered(is_scarce=True, in_flight=100)
    news = burst(limit, 100, 40)
    assert news.count(True) == 1
    cut_at = news.index(True)
    assert 15 < cut_at < 25
    assert limit.limit == pytest.approx(min(0.7 * (100 - cut_at), 60.0))


def test_rare_rejections_leave_the_limit():
    limit = Concurrency(64)
    for number in range(1, 10_000):
        if number % 25 == 0:
            assert not limit.refused(number, number + 63, 64)
        else:
            limit.answered(is_scarce=True, in_flight=64)
    assert limit.limit == 64.0


def test_single_rejection_of_few_requests_cuts():
    limit = Concurrency()
    limit.answered(is_scarce=True, in_flight=4)
    assert limit.refused(0, 3, 4)
    assert limit.limit == pytest.approx(2.8)


def test_burst_refusing_most_requests_sets_limit_to_accepted_count():
    limit = Concurrency()
    burst(limit, 1_000, 990)
    assert limit.limit == 10.0


def test_refusal_of_a_request_sent_after_the_cut_cuts_again():
    limit = Concurrency()
    burst(limit, 100, 1)
    assert limit.refused(100, 140, 70)
    assert limit.limit == pytest.approx(49.0)


@given(st.integers(1, 500), st.data())
def test_limit_stays_between_one_and_the_maximum(in_flight, data):
    limit = Concurrency(300)
    number = 0
    for _ in range(data.draw(st.integers(0, 6))):
        burst(limit, in_flight, data.draw(st.integers(1, in_flight)), number)
        number += in_flight
        for _ in range(data.draw(st.integers(0, 400))):
            limit.answered(is_scarce=True)
        assert 1.0 <= limit.limit <= 300.0


def test_limit_doubles_per_round_up_to_the_last_cut_then_grows_by_one():
    limit = Concurrency()
    burst(limit, 100, 99)
    sizes = []
    for _ in range(9):
        sizes.append(int(limit.limit))
        for _ in range(int(limit.limit)):
            limit.answered(is_scarce=True)
    assert sizes == [1, 2, 4, 8, 16, 32, 64, 70, 71]


def test_limit_does_not_grow_without_waiting_requests():
    limit = Concurrency()
    burst(limit, 4, 1)
    before = limit.limit
    limit.answered(is_scarce=False)
    assert limit.limit == before == pytest.approx(2.8)


def test_pauses_double_with_each_cut_until_an_answer_arrives():
    limit = Concurrency()
    pauses = []
    for number in range(9):
        limit.refused(number, number, 1)
        pauses.append(limit.pause_s())
    assert pauses == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]
    limit.answered(is_scarce=True)
    limit.refused(9, 9, 2)
    assert limit.pause_s() == 0.0
