"""Every family whose stock MODEL can run on a group: found in the files beside this one, so a new one is one file."""

from __future__ import annotations

from . import *  # noqa: F403 - imports the files that `__all__` of the package lists
from . import __all__ as _files
from .family import NativeFamily

FAMILIES: dict[str, NativeFamily] = {
    family.transformer: family
    for name in _files
    for family in vars(globals()[name]).values()
    if isinstance(family, NativeFamily)
}


def working() -> str:
    """The families that work, for messages."""
    return ", ".join(sorted({family.name for family in FAMILIES.values()}))
