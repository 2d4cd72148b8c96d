"""What every refusal owes its reader: three lines that say what cannot be done, why, and what can."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from runtime.spec import Refusal


@contextmanager
def refused(*parts: str) -> Iterator[pytest.ExceptionInfo[Refusal]]:
    """What runs inside must be refused, in three non-empty lines that hold every one of `parts`."""
    with pytest.raises(Refusal) as caught:
        yield caught
    check_lines(caught.value)
    text = str(caught.value)
    missing = [part for part in parts if part not in text]
    assert not missing, f"{missing} not in:\n{text}"


def check_lines(refusal: Refusal) -> None:
    text = str(refusal)
    lines = text.split("\n")
    assert len(text.splitlines()) == len(lines) == 3, text
    assert all(line.strip() for line in lines), text
    assert lines == [refusal.what, refusal.why, refusal.instead]
