"""Every error that a node shows has three lines: what, why, what works instead. Checked where errors are made.

A newer frontend shows three lines of an error and no more, so nothing that a user needs may come after them.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from runtime.healing import BRIEF, brief
from runtime.spec import Device, RankError, RankOutOfMemory, Refusal, describe_devices
from tests.support.mocks import mock_cards
from tests.support.source import Source, dotted, sources

ROOMS = ("", "nodes", "runtime")
INNER = "The group does not run."  # tells the caller to do without it; no node shows it


def calls_of(*names: str) -> list[tuple[Source, ast.Call]]:
    return [
        (source, node)
        for source in sources(*ROOMS)
        for node in source.walk()
        if isinstance(node, ast.Call) and dotted(node.func).split(".")[-1] in names
    ]


def literal(node: ast.AST) -> str | None:
    """The text of a string in the source, with {} for what is filled in; None if it is made elsewhere."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(
                "{}" if isinstance(part, ast.FormattedValue) else literal(part) or "" for part in parts
            )
    return None


def refusals() -> Iterator[tuple[str, list[str | None]]]:
    for source, call in calls_of("Refusal"):
        if not any(isinstance(argument, ast.Starred) for argument in call.args):
            yield f"{source.file}:{call.lineno}", [literal(argument) for argument in call.args]


def test_there_are_refusals() -> None:
    assert len(list(refusals())) > 80  # of a hundred


@pytest.mark.parametrize(
    ("place", "lines"), list(refusals()), ids=lambda one: one if isinstance(one, str) else ""
)
def test_a_refusal_is_three_sentences(place: str, lines: list[str | None]) -> None:
    assert len(lines) == 3, "what, why, instead"
    for text in lines:
        if text is None:
            continue  # made by a function; tests/support/refusals.py checks what comes out
        assert text.strip() and "\n" not in text
        assert text.endswith((".", "{}")), text


@pytest.mark.parametrize(
    ("place", "text"),
    [
        (f"{source.file}:{call.lineno}", text)
        for source, call in calls_of("RankError", "RankOutOfMemory")
        if call.args and (text := literal(call.args[0])) is not None and text != INNER
    ],
    ids=lambda one: one if isinstance(one, str) and ":" in one and " " not in one else "",
)
def test_the_error_of_a_rank_has_at_most_three_lines(place: str, text: str) -> None:
    assert 1 <= len(text.split("\n")) <= 3
    assert all(line.strip() for line in text.split("\n")), text


def test_what_belongs_to_the_log_is_not_in_the_message() -> None:
    """Tracebacks, memory and log lines: whoever makes an error hands them over as its detail."""
    for _, call in calls_of("RankError", "RankOutOfMemory"):
        names = {
            dotted(node) for node in ast.walk(call.args[0]) if isinstance(node, ast.Name | ast.Attribute)
        }
        assert not names & {"detail", "tail", "tails", "failure.traceback", "traceback"}, ast.unparse(call)


def test_an_error_is_told_in_full_to_the_log() -> None:
    error = RankError("What.\nWhy.\nWhat to do.", detail="\n\nThe log.\n", rank=1)
    assert (error.what, error.why, error.instead) == ("What.", "Why.", "What to do.")
    assert str(error) == "What.\nWhy.\nWhat to do."
    assert error.whole == "What.\nWhy.\nWhat to do.\n\nThe log."
    assert RankError("What.").whole == "What."


def test_advice_makes_no_fourth_line() -> None:
    error = RankOutOfMemory("What.")
    error.advise("Less of it.")
    error.advise("None of it.")
    assert str(error) == "What.\nNone of it. Less of it."
    error.explain("Why.", "Anew.")
    assert str(error) == "What.\nWhy.\nAnew." and error.detail == "None of it. Less of it."


def test_a_librarys_own_words_are_one_line() -> None:
    assert brief("RuntimeError: one\n\n  two") == "RuntimeError: one two"
    long = brief("x" * 1000)
    assert len(long) == BRIEF and long.endswith("...")


def test_a_refusal_is_its_three_lines() -> None:
    assert str(Refusal("a", "b", "c")) == "a\nb\nc"


# ---- devices have names


@pytest.mark.parametrize(
    ("devices", "words"),
    [
        (mock_cards(24), "GPU 0 Mock"),
        (mock_cards(24, 24), "GPU 0, 1 Mock"),
        (mock_cards(24, 24, 24, 24), "GPU 0-3 Mock"),
        (
            (*mock_cards(24, 24, 24)[1:], Device(kind="cuda", index=0, name="NVIDIA L40")),
            "GPU 1, 2 Mock and GPU 0 NVIDIA L40",
        ),
        ((Device(kind="cuda", index=5),), "GPU 5"),
        ((Device(kind="cpu", index=0, name="CPU"), Device(kind="cpu", index=1, name="CPU")), "the CPU"),
    ],
)
def test_devices_are_named_in_few_words(devices: tuple[Device, ...], words: str) -> None:
    assert describe_devices(devices) == words


# ---- progress has words


def test_every_phase_that_a_call_reports_has_words_for_the_node() -> None:
    """`nodes/comfy_host.py` needs ComfyUI, so its table is read from the source."""
    (host,) = (source for source in sources("nodes") if source.file == "nodes/comfy_host.py")
    (table,) = (
        ast.literal_eval(node.value)
        for node in host.walk()
        if isinstance(node, ast.Assign) and dotted(node.targets[0]) == "_PHASES"
    )
    phases = {
        keyword.value.value
        for _, call in calls_of("Progress")
        for keyword in call.keywords
        if keyword.arg == "phase" and isinstance(keyword.value, ast.Constant)
    }
    assert {"starting", "loading", "restoring", "sampling", "decoding", "measuring"} <= phases
    assert not phases - table.keys()
    # The page draws them as Markdown in one renderer and as HTML in another.
    assert not [words for words in table.values() if re.search(r"[<>&*_#\[\]]", words)]
