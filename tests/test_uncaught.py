"""What is the same about an error whenever it comes."""

from __future__ import annotations

import sys

import pytest

from pliant.uncaught import fingerprint


def error_with(text: str) -> str:
    try:
        raise ValueError(text)
    except ValueError as error:
        return fingerprint(error, sys.exc_info()[2])


@pytest.mark.parametrize(
    ("text", "later"),
    [
        ("loader process 0 (pid 22244) ended", "loader process 1 (pid 317) ended"),
        ("bad value 17.25", "bad value 3e-07"),
        ("<object at 0x7f00aa>", "<object at 0x55>"),
    ],
)
def test_numbers_in_the_message_make_no_other_error(text: str, later: str) -> None:
    assert error_with(text) == error_with(later)
    assert error_with(text) != error_with("something else")


def test_the_line_counts() -> None:
    def elsewhere() -> str:
        try:
            raise ValueError("bad")
        except ValueError as error:
            return fingerprint(error, error.__traceback__)

    assert elsewhere() != error_with("bad")
    assert "test_uncaught.py:" in elsewhere()
