"""Whether this Python has the packages that the ranks import: looked at before they are started.

Other packs install into the same environment, and may have replaced what was there. requirements.txt is the one list.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from . import launch
from .spec import Refusal

LIST = launch.PACK / "requirements.txt"
_TORCH = "torch>=2.9"  # ComfyUI's, hence not in the list, which would have it replaced


def check(requirements: Path | None = None) -> None:
    """Raise Refusal for packages that are missing or too old, each with the version that is there."""
    unmet = [problem for line in _lines(requirements or LIST) if (problem := _problem(line))]
    if not unmet:
        return
    wanted, found = zip(*unmet, strict=True)
    quoted = " ".join(f"'{one}'" for one in wanted)
    raise Refusal(
        f"The ranks need {', '.join(wanted)}; ComfyUI's Python has {', '.join(found)}.",
        "They run in the same Python as ComfyUI, and another pack may have changed what is installed there.",
        f"Works: python -m pip install {quoted} with ComfyUI's own Python, and a restart of ComfyUI.",
    )


def _lines(requirements: Path) -> Iterator[str]:
    yield _TORCH
    with contextlib.suppress(OSError):  # a pack that was unpacked without it
        for line in requirements.read_text(encoding="utf-8").splitlines():
            if text := line.partition("#")[0].strip():
                yield text


def _problem(line: str) -> tuple[str, str] | None:
    """What is wanted and what is there instead; None if that will do."""
    from packaging.requirements import Requirement

    wanted = Requirement(line)
    try:
        found = version(wanted.name)
    except PackageNotFoundError:
        return line, f"no {wanted.name}"
    if wanted.specifier.contains(found, prereleases=True):
        return None
    return line, f"{wanted.name} {found}"
