"""Which settings are tried on a machine whose cards do not reach each other, and what is remembered of it."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from runtime import machine
from runtime.devices import cpu_devices
from runtime.machine import AS_IT_IS, SETTINGS, Setting, first_that_works, recall, remember
from runtime.spec import RankError, Refusal
from tests.support.mocks import MockNVML, mock_cards

CARDS = mock_cards(24, 24)
NAMES = [setting.name for setting in SETTINGS]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache directory of its own for each test; the file in it that remembers."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "comfyui-sharded" / "machine.json"


def broken(what: str = "Rank 1 failed while starting: all_reduce did not end") -> RankError:
    return RankError(f"{what}\nits log", rank=1, kind=machine.BROKEN)


def works_from(first: int, tried: list[str]) -> Callable[[Setting], str]:
    """An attempt for a machine that works with the setting of this number and those after it."""

    def attempt(setting: Setting) -> str:
        tried.append(setting.name)
        if NAMES.index(setting.name) < first:
            raise broken()
        return setting.name

    return attempt


# ---- what is tried


def test_the_settings_are_nccls_own_variables_each_with_less() -> None:
    assert [dict(setting.variables) for setting in SETTINGS] == [
        {},
        {"NCCL_P2P_DISABLE": "1"},
        {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"},
    ]


@pytest.mark.parametrize("first", [0, 1, 2])
def test_the_first_setting_that_works_is_taken(first: int) -> None:
    tried: list[str] = []
    assert first_that_works(CARDS, works_from(first, tried)) == NAMES[first]
    assert tried == NAMES[: first + 1]


@pytest.mark.parametrize("devices", [cpu_devices(2), mock_cards(24)], ids=["CPU", "one card"])
def test_where_nccl_is_not_used_there_is_one_attempt(devices: tuple) -> None:
    tried: list[str] = []
    with pytest.raises(RankError) as caught:
        first_that_works(devices, works_from(1, tried))
    assert tried == [AS_IT_IS.name]
    assert str(caught.value) == str(broken())


@pytest.mark.parametrize(
    "error", [RankError("no card", kind="start"), Refusal("a", "b", "c"), KeyboardInterrupt()], ids=repr
)
def test_any_other_failure_is_not_tried_again(error: BaseException) -> None:
    tried: list[Setting] = []

    def attempt(setting: Setting) -> None:
        tried.append(setting)
        raise error

    with pytest.raises(type(error)):
        first_that_works(CARDS, attempt)
    assert tried == [AS_IT_IS]
    assert recall().entries == ()


def test_where_nothing_works_the_error_has_a_line_for_each_attempt(cache: Path) -> None:
    with pytest.raises(RankError) as caught:
        first_that_works(CARDS, works_from(3, []))
    assert caught.value.kind == machine.BROKEN and caught.value.rank == 1
    assert [line for line in caught.value.detail.splitlines() if line.startswith("- ")] == [
        f"- {setting.words}: Rank 1 failed while starting: all_reduce did not end" for setting in SETTINGS
    ]
    assert caught.value.detail.endswith("its log")
    assert not cache.exists()


def test_what_was_found_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        first_that_works(CARDS, works_from(1, []))
        assert "all_reduce did not end" in caplog.text
        assert "without peer access (NCCL_P2P_DISABLE=1)" in caplog.text
        caplog.clear()
        first_that_works(CARDS, works_from(1, []))
        assert "as found earlier" in caplog.text


# ---- what is remembered


def test_the_next_start_begins_with_what_was_found() -> None:
    first_that_works(CARDS, works_from(1, []))
    tried: list[str] = []
    assert first_that_works(CARDS, works_from(1, tried)) == NAMES[1]
    assert tried == [NAMES[1]]


def test_what_was_found_may_stop_working() -> None:
    first_that_works(CARDS, works_from(1, []))
    tried: list[str] = []
    assert first_that_works(CARDS, works_from(2, tried)) == NAMES[2]
    assert tried == NAMES[1:]
    assert [entry.setting for entry in recall().entries] == [NAMES[2]]


def test_a_machine_without_trouble_has_nothing_to_remember(cache: Path) -> None:
    first_that_works(CARDS, works_from(0, []))
    assert not cache.exists()


def test_it_holds_for_these_cards_in_any_order_and_no_others() -> None:
    remember(CARDS, SETTINGS[1])
    assert machine.settings(CARDS[::-1]) == SETTINGS[1:]
    assert machine.settings(mock_cards(24, 24, 24)) == SETTINGS
    assert machine.settings((CARDS[0], mock_cards(1, 1, 1)[2])) == SETTINGS


@pytest.mark.parametrize("changed", ["driver_version", "version"])
def test_another_driver_or_another_torch_is_tested_anew(
    monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    remember(CARDS, SETTINGS[2])
    assert machine.settings(CARDS) == SETTINGS[2:]
    monkeypatch.setattr(machine, changed, lambda *_: "another")
    assert machine.settings(CARDS) == SETTINGS


def test_the_drivers_version_is_asked_of_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = MockNVML([("GPU-a", "A")])
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    assert machine.driver_version() == "", "an old library lacks the call"
    for answer in ("570.86", b"570.86"):
        driver.nvmlSystemGetDriverVersion = lambda answer=answer: answer
        assert machine.driver_version() == "570.86"
    assert driver.open == 0, "the library was left open"
    monkeypatch.setitem(sys.modules, "pynvml", MockNVML(failing={"nvmlInit": [None]}))
    assert machine.driver_version() == ""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert machine.driver_version() == ""


def test_the_file_is_short_and_for_this_user_alone(cache: Path) -> None:
    for number in range(40):
        remember(mock_cards(*[1] * (2 + number)), SETTINGS[1])
    entries = recall().entries
    assert [len(entry.cards) for entry in entries] == list(range(10, 42)), "the newest stay"
    assert cache.stat().st_mode & 0o077 == 0
    assert list(cache.parent.iterdir()) == [cache]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b'{"entries": [1]}',
        b"\xff" * 100,
        b'{"entries": ' + b"[" * 100_000,
        b" " * (2 << 20) + b"{}",
        json.dumps({"entries": [{"cards": [], "driver": 1, "torch": "", "setting": ""}]}).encode(),
    ],
    ids=range(8),
)
def test_a_file_that_cannot_be_read_is_written_anew(cache: Path, content: bytes) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_bytes(content)
    assert machine.settings(CARDS) == SETTINGS
    assert first_that_works(CARDS, works_from(1, [])) == NAMES[1]
    assert machine.settings(CARDS) == SETTINGS[1:]


def test_a_setting_of_another_release_is_no_setting(cache: Path) -> None:
    remember(CARDS, Setting(name="from the future", words=""))
    assert machine.settings(CARDS) == SETTINGS
    first_that_works(CARDS, works_from(1, []))
    assert [entry.setting for entry in recall().entries] == [NAMES[1]]


@pytest.mark.parametrize("where", ["a file", "no place at all", "full"])
def test_a_home_that_cannot_be_written_is_no_error(
    cache: Path, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if where == "a file":
        (tmp_path / "cache").write_text("")
    elif where == "no place at all":
        monkeypatch.setattr(machine.environment, "cache_directory", lambda: None)
    else:
        monkeypatch.setattr(os, "replace", _no_space)
    assert first_that_works(CARDS, works_from(2, [])) == NAMES[2]
    assert machine.settings(CARDS) == SETTINGS
    if cache.parent.exists() and cache.parent.is_dir():
        assert not list(cache.parent.iterdir()), "a half-written file was left"


def _no_space(*_: object) -> None:
    raise OSError(28, "No space left on device")


def test_what_is_kept_names_nothing_private(cache: Path) -> None:
    remember(CARDS, SETTINGS[1])
    kept = json.loads(cache.read_bytes())
    assert list(kept) == ["entries"]
    assert set(kept["entries"][0]) == {"cards", "driver", "torch", "setting"}
    assert msgspec.json.decode(cache.read_bytes(), type=machine.Notes) == recall()
