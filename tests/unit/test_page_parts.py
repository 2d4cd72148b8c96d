"""What tests of the page fetch: pinned, checked, and kept whole or not at all. Nothing is fetched here."""

from __future__ import annotations

import tarfile
import zipfile
from pathlib import Path

import pytest

from tools import page_parts


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(page_parts, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(page_parts, "installed_frontend", lambda: "")
    return tmp_path / "cache"


def deliver(monkeypatch: pytest.MonkeyPatch, path: Path) -> list[list[str]]:
    """Have the registry's client put a copy of `path` where it is told to; the commands it was called with."""
    commands: list[list[str]] = []

    def run(command: list[str]) -> None:
        commands.append(command)
        flag = "--dest" if "--dest" in command else "--pack-destination"
        Path(command[command.index(flag) + 1], path.name).write_bytes(path.read_bytes())

    monkeypatch.setattr(page_parts, "_run", run)
    monkeypatch.setattr(page_parts.shutil, "which", lambda _name: "npm")
    return commands


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / "comfyui_frontend_package-1.58.1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name in ("index.html", "assets/app.js", "assets/app.js.map"):
            archive.writestr(f"{page_parts.STATIC}/{name}", name)
        archive.writestr("comfyui_frontend_package/__init__.py", "")
    return path


@pytest.fixture
def tarball(tmp_path: Path) -> Path:
    path = tmp_path / "axe-core-4.14.1.tgz"
    with tarfile.open(path, "w:gz") as archive:
        for name in (page_parts.AXE_FILE, "package/LICENSE", "package/axe.js"):
            file = tmp_path / "file"
            file.write_text(name)
            archive.add(file, name)
    return path


def pin(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    digest = page_parts.hashlib.sha256(path.read_bytes()).hexdigest()
    monkeypatch.setitem(page_parts.FRONTEND_SHA256, page_parts.NEWEST_FRONTEND, digest)
    monkeypatch.setattr(page_parts, "AXE_SHA256", digest)


def test_a_frontend_is_fetched_once_without_its_source_maps(
    wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pin(monkeypatch, wheel)
    commands = deliver(monkeypatch, wheel)
    for _ in range(2):
        root = page_parts.frontend(page_parts.NEWEST_FRONTEND)
    assert sorted(path.name for path in root.rglob("*") if path.is_file()) == ["app.js", "index.html"]
    assert len(commands) == 1
    assert f"{page_parts.PACKAGE}=={page_parts.NEWEST_FRONTEND}" in commands[0]


def test_axe_comes_with_its_licence(tarball: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pin(monkeypatch, tarball)
    commands = deliver(monkeypatch, tarball)
    script = page_parts.axe_core()
    assert script.read_text() == page_parts.AXE_FILE
    assert sorted(path.name for path in script.parent.iterdir()) == ["LICENSE", "axe.min.js"]
    assert len(commands) == 1 and commands[0][-1] == page_parts.AXE


def test_another_file_than_the_pinned_one_is_refused_and_not_kept(
    wheel: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deliver(monkeypatch, wheel)
    with pytest.raises(page_parts.PartError, match="sha256"):
        page_parts.frontend(page_parts.NEWEST_FRONTEND)
    assert list(cache.iterdir()) == []


def test_only_pinned_frontends_are_fetched() -> None:
    with pytest.raises(page_parts.PartError, match="9.9 is not pinned"):
        page_parts.frontend("9.9")


def test_without_npm_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_parts.shutil, "which", lambda _name: None)
    with pytest.raises(page_parts.PartError, match="apt-get install npm"):
        page_parts.axe_core()


def test_a_client_that_fails_is_quoted() -> None:
    with pytest.raises(page_parts.PartError, match="ended with 3"):
        page_parts._run(["sh", "-c", "exit 3"])
