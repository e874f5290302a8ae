"""Rows of CSV text: each with its line, its values parsed, and everything that is wrong with it. Pure: opens no file.

A row that cannot be used does not end the reading: the rows after it are read, so that all mistakes of a file can be told
at once. Which of them are refused, and which are left out, decides who reads the rows.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import datetime

from pliant.errors import ConfigError

MAX_MOMENT_S = 1e11
"""Moments are seconds since anything that is at most 3,000 years ago: greater numbers are milliseconds."""


class Row:
    """The values of one row by column, and what is wrong with them.

    A value that is wrong is remembered in `mistakes`, and something harmless is returned for it, so that one pass over a row
    finds all its mistakes. A value that is None is missing, because the row ends before it.
    """

    def __init__(self, line: int, values: Mapping[str, str | None], mistakes: Sequence[str] = ()) -> None:
        self.line = line
        self.mistakes = list(mistakes)
        self._values = values

    def refuse(self, mistake: str) -> None:
        """Remember that something is wrong."""
        self.mistakes.append(mistake)

    def refuse_value(self, key: str, remedy: str) -> None:
        """Remember that a value is wrong, and what to use instead."""
        self.refuse(f"{key} {self._values.get(key)!r:.60}: use {remedy}")

    def has(self, key: str) -> bool:
        """Return whether there is such a column."""
        return key in self._values

    def text(self, key: str) -> str:
        """Return a text, which must be there."""
        value = self._value(key)
        if value == "":
            self.refuse(f"{key} is empty: give one")
        return value or ""

    def optional(self, key: str) -> str:
        """Return a text; empty if the column or the value is missing."""
        return (self._values.get(key) or "").strip()

    def number(self, key: str, *, least: float = 0.0, most: float, unit: str, blank: float | None = None) -> float:
        """Return a number from `least` to `most`; `blank` if nothing is written there, unless that is None."""
        value = self._value(key)
        if value is None or (not value and blank is not None):
            return least if blank is None else blank
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if least <= number <= most:
            return number
        self.refuse_value(key, f"{unit} from {least:,g} to {most:,.15g}")
        return least

    def whole(self, key: str, *, least: int = 0, most: int, unit: str = "a whole number") -> int:
        """Return a whole number from `least` to `most`; it may be written as 8.0."""
        number = self.number(key, least=least, most=most, unit=unit)
        if number != int(number):
            self.refuse_value(key, f"{unit} from {least:,} to {most:,}")
        return int(number)

    def moment(self, key: str, *, blank: float | None = None) -> float:
        """Return the seconds of a moment: a number, or a date and time."""
        value = self._value(key)
        if value and not _is_number(value):
            seconds = seconds_of_date(value)
            if seconds is None:
                self.refuse_value(key, "seconds from 0, or a date and time as in 2017-10-09 07:00:00")
            return seconds or 0.0
        return self.number(key, most=MAX_MOMENT_S, unit="seconds", blank=blank)

    def _value(self, key: str) -> str | None:
        value = self._values[key]
        if value is None:
            self.refuse(f"no {key}: the row ends before it; was the file cut off?")
            return None
        return value.strip()


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def seconds_of_date(text: str) -> float | None:
    """Return the seconds since the year 2000 of a date and time; None if it is none.

    Traces name no time zone, so none is applied: every day has 86400 s.
    """
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    return (moment.replace(tzinfo=None) - datetime(2000, 1, 1)).total_seconds()


def read_header(text: str) -> list[str]:
    """Return the values of the first row, without the spaces around them; none if there is no row."""
    for _, values, _ in _records(text.split("\n")):
        return [value.strip() for value in values]
    return []


def check_header(columns: Sequence[str], needed: Collection[str], what: str) -> list[str]:
    """Return what is wrong with the header of a table that needs certain columns."""
    mistakes = [f"no column {name!r}, which {what} has" for name in needed if name not in columns]
    named = [name for name in columns if name]
    return mistakes + [f"column {name!r} is there twice" for name in dict.fromkeys(named) if named.count(name) > 1]


def read_rows(text: str, columns: Sequence[str] = ()) -> Iterator[Row]:
    """Yield the rows of CSV text, without empty ones. The first row names the columns, unless they are given."""
    records = _records(text.split("\n"))
    if not columns:
        columns = [name.strip() for name in next(records, (1, [], ""))[1]]
    for line, values, wrong in records:
        cells: list[str | None] = [*values, *([None] * (len(columns) - len(values)))]
        mistakes = [wrong] if wrong else []
        if len(values) > len(columns):
            mistakes.append(f"{len(values)} values for {len(columns)} columns: is a comma not in quotes?")
        yield Row(line, dict(zip(columns, cells, strict=False)), mistakes)


def _records(lines: Sequence[str]) -> Iterator[tuple[int, list[str], str]]:
    """Yield line, values and mistake of each row. Where quotes are wrong, that line alone is wrong, and not the rest."""
    begin = 0
    while begin < len(lines):
        reader = csv.reader((f"{lines[place]}\n" for place in range(begin, len(lines))), strict=True)
        at = begin
        try:
            for values in reader:
                if values:
                    yield at + 1, values, ""
                at = begin + reader.line_num
            return
        except csv.Error as error:
            yield at + 1, [], f"no row of a CSV file: {error}; is a quote not closed?"
            begin = at + 1


def decode(data: bytes, name: object) -> str:
    """Return the text of a file called `name`; raises ConfigError with the line of the first byte that is no text."""
    try:
        return data.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{name}:{line}: it is not text; give a file of text, in UTF-8") from None
