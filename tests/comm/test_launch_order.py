"""The launch order as values: who is released when, and what is refused."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pliant.comm.device.launch_order import Agreed, LaunchOrder, Release, Settle, Submitted, check_equal
from pliant.errors import ConfigError, Mismatch


def names_of(actions: list[Release | Settle]) -> list[str]:
    return [action.name for action in actions if isinstance(action, Release)]


def test_the_first_iteration_is_released_by_name_and_later_ones_by_rank_0s_arrival() -> None:
    order = LaunchOrder(["b", "c", "a"])
    assert order.handle(Submitted("c")) == []
    assert order.handle(Submitted("a")) == [Release("a", 1)]
    assert order.handle(Submitted("b")) == [Release("b", 1), Release("c", 1), Settle(("c", "a", "b"))]
    assert order.handle(Agreed(("c", "a", "b"))) == []
    assert order.handle(Submitted("a")) == []
    assert order.handle(Submitted("c")) == [Release("c", 2), Release("a", 2)]
    assert order.handle(Submitted("b")) == [Release("b", 2)]
    assert order.handle(Submitted("c")) == [Release("c", 3)]


def test_what_is_submitted_before_the_order_has_come_is_held() -> None:
    order = LaunchOrder(["a", "b"])
    order.handle(Submitted("a"))
    assert order.handle(Submitted("b"))[-1] == Settle(("a", "b"))
    for name in ["a", "b", "b", "a", "b"]:
        assert order.handle(Submitted(name)) == []
    assert order.iteration == 4
    released = order.handle(Agreed(("b", "a")))
    assert released == [Release("b", 2), Release("a", 2), Release("b", 3), Release("a", 3), Release("b", 4)]


def test_one_name_needs_no_agreement() -> None:
    order = LaunchOrder(["only"])
    assert order.settled
    assert [order.handle(Submitted("only")) for _ in range(3)] == [[Release("only", i)] for i in (1, 2, 3)]


def test_a_name_twice_says_what_is_lacking() -> None:
    order = LaunchOrder(["a", "b", "c"])
    order.handle(Submitted("a"))
    assert order.lacking == ("b", "c")
    with pytest.raises(Mismatch, match="iteration 1: 'a' was submitted again before 'b', 'c'"):
        order.handle(Submitted("a"))
    assert names_of(order.handle(Submitted("b")) + order.handle(Submitted("c"))) == ["b", "c"], "nothing had changed"
    assert order.lacking == ()


def test_a_new_name_is_refused() -> None:
    order = LaunchOrder(["a"])
    with pytest.raises(Mismatch, match="'z' is not one of the 1 names"):
        order.handle(Submitted("z"))


def test_an_order_of_other_names_or_at_another_time_is_refused() -> None:
    order = LaunchOrder(["a", "b"])
    with pytest.raises(Mismatch, match="none was asked for"):
        order.handle(Agreed(("a", "b")))
    order.handle(Submitted("a"))
    order.handle(Submitted("b"))
    with pytest.raises(Mismatch, match="rank 0 lacks 'b' and rank 0 also has 'x'"):
        order.handle(Agreed(("a", "x")))
    with pytest.raises(Mismatch, match="some of them twice"):
        order.handle(Agreed(("a", "b", "a")))
    order.handle(Agreed(("a", "b")))
    with pytest.raises(Mismatch, match="none was asked for"):
        order.handle(Agreed(("b", "a")))


@pytest.mark.parametrize(("names", "reason"), [([], "no names"), (["a", "b", "a"], "'a' given twice")])
def test_names_that_cannot_be_ordered(names: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        LaunchOrder(names)


def test_ranks_that_disagree_are_told_the_difference() -> None:
    check_equal([{"a": "float32[3]"}, {"a": "float32[3]"}])
    with pytest.raises(Mismatch, match="rank 1 lacks 'b' and rank 1 also has 'c'"):
        check_equal([{"a": "x", "b": "x"}, {"a": "x", "c": "x"}])
    with pytest.raises(Mismatch, match="rank 2 also has '0', '1', '10', '11' and 16 more"):
        check_equal([{}, {}, {str(i): "x" for i in range(20)}])
    with pytest.raises(Mismatch, match=r"'a' is float32\[3\] on rank 0, but float32\[4\] on rank 1"):
        check_equal([{"a": "float32[3]"}, {"a": "float32[4]"}])


@st.composite
def arrivals(draw: st.DrawFn) -> list[list[list[str]]]:
    """For each rank, for each iteration, the order in which it submits the names."""
    names = draw(st.lists(st.text(max_size=3), min_size=1, max_size=6, unique=True))
    num_ranks, num_iterations = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    return [[draw(st.permutations(names)) for _ in range(num_iterations)] for _ in range(num_ranks)]


@settings(max_examples=80, deadline=None)
@given(arrivals=arrivals(), data=st.data())
def test_all_ranks_release_the_same(arrivals: list[list[list[str]]], data: st.DataObject) -> None:
    """Whatever the arrivals, and however late rank 0's order comes to each of the ranks."""
    names = arrivals[0][0]
    first = arrivals[0][0]
    released = []
    for mine in arrivals:
        submissions = list(itertools.chain.from_iterable(mine))
        comes_at = data.draw(st.integers(len(names), len(submissions)), label="the order comes after")
        order = LaunchOrder(names)
        actions: list[Release | Settle] = []
        for count, name in enumerate(submissions, start=1):
            actions += order.handle(Submitted(name))
            if count == comes_at and not order.settled:
                actions += order.handle(Agreed(tuple(first)))
        assert [a for a in actions if isinstance(a, Settle)] == ([Settle(tuple(mine[0]))] if len(names) > 1 else [])
        released.append([a for a in actions if isinstance(a, Release)])
    num_iterations = len(arrivals[0])
    expected = [Release(name, 1) for name in sorted(names)]
    expected += [Release(name, i) for i in range(2, num_iterations + 1) for name in first]
    assert all(mine == expected for mine in released)
