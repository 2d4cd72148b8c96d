"""What tests of the page need besides the environment: releases of ComfyUI's frontend, and axe-core, the auditor.

Both come from their registries under a pinned version and hash, once, into `.cache/`: `python -m tools.page_parts`
fetches what is missing. Nothing of them is committed, and neither is a dependency of the pack.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from tools import CACHE

PACKAGE = "comfyui-frontend-package"
OLDEST_FRONTEND = "1.32.9"
NEWEST_FRONTEND = "1.58.1"
FRONTEND_SHA256 = {
    OLDEST_FRONTEND: "737ea322fcef803635d2c8db7dd93122b381a371a8ef66e42762d355e9913c17",
    NEWEST_FRONTEND: "37912597537a731a8f421179618a736c24184c5bdbfa327f38b2fb7c291852d9",
}
STATIC = "comfyui_frontend_package/static"
AXE = "axe-core@4.14.1"
AXE_SHA256 = "e6b0ce02b84d892e2e33e403485e7f3d6c29e2be6df65daf44d89ba564139745"
AXE_FILE = "package/axe.min.js"
FETCH_SECONDS = 300


class PartError(RuntimeError):
    """A part could not be fetched, or is not the one that was pinned; the message says what to do."""


def main() -> None:
    try:
        for part in (*map(frontend, FRONTEND_SHA256), axe_core()):
            print(part)
    except PartError as error:
        raise SystemExit(str(error)) from None


def frontend(version: str) -> Path:
    """The folder of a frontend's page, for ComfyUI's --front-end-root. Raises PartError.

    The installed release is taken as it is; another one has to be in FRONTEND_SHA256.
    """
    if version == installed_frontend():
        found = importlib.util.find_spec("comfyui_frontend_package")
        assert found is not None and found.submodule_search_locations
        return Path(found.submodule_search_locations[0]) / "static"
    if version not in FRONTEND_SHA256:
        raise PartError(f"frontend {version} is not pinned; known are {', '.join(FRONTEND_SHA256)}")
    return _kept(f"frontend-{version}", lambda folder: _fetch_frontend(version, folder)) / STATIC


def installed_frontend() -> str:
    """The version that ComfyUI shows by itself, "" where there is none."""
    try:
        return importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return ""


def axe_core() -> Path:
    """The file of axe-core that a page evaluates. Raises PartError."""
    return _kept(AXE.replace("@", "-"), _fetch_axe) / AXE_FILE


def _kept(name: str, fetch: Callable[[Path], None]) -> Path:
    """The folder of that name in the cache, filled by `fetch` if it is not there; whole or not at all."""
    kept = CACHE / name
    if kept.is_dir():
        return kept
    CACHE.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE, prefix=f"{name}-") as scratch:
        fresh = Path(scratch) / "fresh"
        fresh.mkdir()
        fetch(fresh)
        if not kept.exists():
            fresh.rename(kept)
    return kept


def _fetch_frontend(version: str, folder: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="comfyui-wheel-") as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        _run([*command, "--dest", scratch, f"{PACKAGE}=={version}"])
        wheel = _only_file(Path(scratch), "*.whl", FRONTEND_SHA256[version])
        with zipfile.ZipFile(wheel) as archive:
            # Source maps are most of a wheel, and no browser asks for them unless its developer tools are open.
            wanted = (
                one for one in archive.namelist() if one.startswith(STATIC) and not one.endswith(".map")
            )
            archive.extractall(folder, wanted)


def _fetch_axe(folder: Path) -> None:
    npm = shutil.which("npm")
    if npm is None:
        raise PartError(
            f"{AXE} comes by npm, and there is none here (Debian and Ubuntu: apt-get install npm)"
        )
    with tempfile.TemporaryDirectory(prefix="axe-core-") as scratch:
        _run([npm, "pack", "--silent", "--pack-destination", scratch, AXE])
        with tarfile.open(_only_file(Path(scratch), "*.tgz", AXE_SHA256)) as archive:
            for name in (AXE_FILE, "package/LICENSE"):
                inside = archive.extractfile(name)
                assert inside is not None
                target = folder / name
                target.parent.mkdir(exist_ok=True)
                target.write_bytes(inside.read())


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=FETCH_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise PartError(f"no answer within {FETCH_SECONDS} s: {' '.join(command)}") from None
    if done.returncode:
        raise PartError(f"{' '.join(command)} ended with {done.returncode}\n{done.stderr.strip()}")


def _only_file(folder: Path, pattern: str, sha256: str) -> Path:
    """The file that was fetched, once its hash is known to be the pinned one."""
    files = list(folder.glob(pattern))
    if len(files) != 1:
        raise PartError(f"expected one {pattern}, got {[one.name for one in files]}")
    digest = hashlib.sha256(files[0].read_bytes()).hexdigest()
    if digest != sha256:
        raise PartError(f"{files[0].name} has sha256 {digest}, expected {sha256}")
    return files[0]


if __name__ == "__main__":
    main()
