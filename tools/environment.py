"""Sets up the virtual environment: torch, the pack's needs, ComfyUI's needs and the developer's tools.

Runs on a bare Python (standard library only) as `python3 -m tools.environment`. Idempotent: a stamp inside the
environment holds a hash of every requirement list, and while it matches nothing is started.

Environment variables: VENV (folder, default .venv), TORCH_REQUIREMENTS (replaces the pinned torch and torchvision),
COMFYUI_PATH (whose requirements to install).
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import time
import venv
from pathlib import Path

from tools import ROOT, comfy_source

TORCH_PAIR = "torch==2.14.1 torchvision==0.29.1"
LISTS = (ROOT / "requirements.txt", ROOT / "requirements-dev.txt")
OLDEST_PYTHON = (3, 10)


def main() -> None:
    if sys.version_info < OLDEST_PYTHON:
        sys.exit(
            f"Python {'.'.join(map(str, OLDEST_PYTHON))} or newer is needed, this is {sys.version.split()[0]}"
        )
    folder = ROOT / os.environ.get("VENV", ".venv")
    python = str(folder / "bin" / "python")
    try:
        _create(folder)
        tree = comfy_source.obtain(python)
    except (comfy_source.SourceError, subprocess.CalledProcessError) as error:
        sys.exit(f"environment: {error}")
    comfy_needs = _comfy_requirements(tree)
    stamp = folder / "comfyui-sharded.stamp"
    wanted = _fingerprint(comfy_needs)
    if stamp.is_file() and stamp.read_text() == wanted:
        return
    stamp.unlink(missing_ok=True)
    began = time.monotonic()
    print(
        f"environment: installing into {folder.name} (a few minutes and about 6 GB the first time)",
        flush=True,
    )
    _install(python, comfy_needs)
    if _needs_torchaudio(tree):
        _install_torchaudio(python)
    stamp.write_text(wanted)
    print(f"environment: ready after {time.monotonic() - began:.0f} s", flush=True)


def _create(folder: Path) -> None:
    """Make the virtual environment where there is none."""
    if (folder / "bin" / "python").exists() and (folder / "pyvenv.cfg").is_file():
        return
    try:
        import ensurepip  # noqa: F401  Debian splits it off, and venv's own message then hides the mend
    except ImportError:
        sys.exit(
            "this Python has no ensurepip: install it first (Debian and Ubuntu: apt-get install python3-venv)"
        )
    venv.create(folder, with_pip=True, symlinks=True)


def _comfy_requirements(tree: Path) -> list[str]:
    """ComfyUI's own list without the torch family, which is pinned here.

    torchsde only starts with the same letters: it stays.
    """
    ours = re.compile(r"torch(vision|audio)?\b", re.IGNORECASE)
    lines = (line.split("#")[0].strip() for line in (tree / "requirements.txt").read_text().splitlines())
    return [line for line in lines if line and not ours.match(line)]


def _fingerprint(comfy_needs: list[str]) -> str:
    parts = [f"{sys.version_info[:2]}", os.environ.get("TORCH_REQUIREMENTS", TORCH_PAIR), *comfy_needs]
    parts += [path.read_text() for path in LISTS]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _install(python: str, comfy_needs: list[str]) -> None:
    """One resolver run over every list, so that no list undoes what another one chose."""
    command = [python, "-m", "pip", "install", "--quiet", *_torch_requirements(python), *comfy_needs]
    for path in LISTS:
        command += ["-r", str(path)]
    if subprocess.run(command).returncode:
        sys.exit("environment: pip failed, see above")


def _torch_requirements(python: str) -> list[str]:
    """What to ask of torch: the override, else what is installed already, else the pinned pair."""
    override = os.environ.get("TORCH_REQUIREMENTS")
    if override:
        return override.split()
    probe = (
        "from importlib.metadata import version\n"
        "print(*(f'{name}=={version(name)}' for name in ('torch', 'torchvision')))"
    )
    found = subprocess.run([python, "-c", probe], capture_output=True, text=True)
    return (found.stdout if found.returncode == 0 else TORCH_PAIR).split()


def _needs_torchaudio(tree: Path) -> bool:
    """0.3.x only loses its audio nodes without torchaudio; later releases do not start."""
    numbers = re.findall(r"\d+", comfy_source.version(tree))
    return tuple(map(int, numbers[:2])) >= (0, 4)


def _install_torchaudio(python: str) -> None:
    """Without its dependencies: the newest torchaudio may name an older torch, and imports beside a newer one."""
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", "torchaudio"])


if __name__ == "__main__":
    main()
