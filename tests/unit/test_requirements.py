"""Packages that the ranks need: what is missing or too old is named with both versions."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest

from runtime import requirements
from runtime.devices import cpu_devices
from runtime.group import WorkerGroup
from runtime.spec import Refusal


def written(folder: Path, *lines: str) -> Path:
    path = folder / "requirements.txt"
    path.write_text("# a comment\n" + "\n".join(lines) + "\n")
    return path


def test_this_environment_has_them() -> None:
    requirements.check()


def test_too_old_and_missing_packages_are_named_with_both_versions(tmp_path: Path) -> None:
    asked = written(tmp_path, "diffusers>=99.1", "no-such-package  # why", "safetensors")
    with pytest.raises(Refusal) as caught:
        requirements.check(asked)
    what, _why, instead = str(caught.value).splitlines()
    assert what == (
        "The ranks need diffusers>=99.1, no-such-package; "
        f"ComfyUI's Python has diffusers {version('diffusers')}, no no-such-package."
    )
    assert "pip install 'diffusers>=99.1' 'no-such-package'" in instead


def test_a_pack_without_its_list_is_not_kept_from_starting(tmp_path: Path) -> None:
    requirements.check(tmp_path / "requirements.txt")


def test_versions_from_source_count_as_what_they_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requirements, "version", lambda name: "2.11.0.dev20260101+cu130")
    requirements.check(written(tmp_path, "diffusers>=0.42"))


def test_a_group_is_refused_before_it_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requirements, "LIST", written(tmp_path, "diffusers>=99"))
    group = WorkerGroup(cpu_devices(1))
    with pytest.raises(Refusal, match="need diffusers>=99"):
        group.start()
    assert group.state.current.phase == "stopped"
