"""Runs mypy over the rooms of the house.

`nodes` reaches `runtime` by `from ..runtime`, as ComfyUI loads the pack: there the repository root is the package.
So the pack is checked through a link that gives the root a valid module name whatever its folder is called.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tools import CACHE, ROOT

PACKAGE = "comfyui_sharded"
PACK_ROOMS = ("nodes", "runtime")
PLAIN_ROOMS = ("tools", "demo_model")


def main() -> int:
    stage = CACHE / "typecheck"
    stage.mkdir(parents=True, exist_ok=True)
    link = stage / PACKAGE
    if not link.is_symlink() or link.resolve() != ROOT:
        link.unlink(missing_ok=True)
        link.symlink_to(ROOT, target_is_directory=True)
    pack = [part for room in PACK_ROOMS if _has_code(room) for part in ("-p", f"{PACKAGE}.{room}")]
    plain = [part for room in PLAIN_ROOMS if _has_code(room) for part in ("-p", room)]
    failed = [_mypy(stage, pack), _mypy(ROOT, plain)]
    return int(any(failed))


def _has_code(room: str) -> bool:
    return any((ROOT / room).glob("*.py"))


def _mypy(folder: Path, what: list[str]) -> bool:
    """Run in `folder`, from which mypy takes the module names; True if it found something."""
    if not what:
        return False
    # One cache for both would be thrown away by each: the same files have two names.
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml")]
    command += ["--cache-dir", str(ROOT / ".mypy_cache" / folder.name)]
    return (
        subprocess.run([*command, *what], cwd=folder, env={**os.environ, "MYPYPATH": str(folder)}).returncode
        != 0
    )


if __name__ == "__main__":
    sys.exit(main())
