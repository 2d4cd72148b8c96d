"""Takes out of a text what tells who and where it comes from: people, machines, folders, addresses, serial numbers.

For error messages and logs in a report that goes to strangers. What is replaced is named in angle brackets.
"""

from __future__ import annotations

import contextlib
import getpass
import platform
import re
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ..launch import PACK

_IN_COMMON = {"root", "localhost", "user", "linux"}  # on so many machines that they tell nothing

# A path that is quoted may hold spaces. Of any other, what stands behind a space is taken for a part of it if a slash
# follows, or the ending of a model's file: that takes some prose out, too.
_SYSTEM = r"(?!(?:dev|proc|sys)/)"  # folders that every machine has
_WORD = r"[^\s/'\"`,;:()]"
_QUOTED = rf"(?P<quote>['\"`])(?:~|[A-Za-z]:\\|<path>/|/{_SYSTEM}[^/'\"`\n]+/)[^'\"`\n]*(?P=quote)"
_PLAIN = rf"(?:<path>|(?<![\w>./])~?/{_SYSTEM}{_WORD}+)(?:/{_WORD}*)+(?: {_WORD}+(?:/{_WORD}*)+)*"
_MODEL = rf"(?:<path>(?: {_WORD}+){{0,5}} )?(?:(?![<>]){_WORD})+\.(?:safetensors|sft|gguf|ckpt|pth?|bin)\b"
_PATTERNS = tuple(
    (re.compile(pattern), name)
    for pattern, name in (
        (r"\bGPU-[0-9a-fA-F-]{8,}", "<card>"),
        (r"\b\w+://\S+", "<address>"),
        (r"\b[\w.+-]+@[\w-]+\.[\w.-]+", "<address>"),
        (r"(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?(?![\w.-])", "<address>"),
        (r"(?<![\w:])(?:[0-9a-fA-F]{0,4}:){3,7}[0-9a-fA-F]{1,4}(?![\w:])", "<address>"),
        (r"(?<![\w:])(?:[0-9a-fA-F]{1,4}:)*:(?::?[0-9a-fA-F]{1,4})+(?![\w:])", "<address>"),
        (r"\b[0-9a-fA-F]{24,}\b", "<number>"),
        (_QUOTED, "<path>"),
        (_PLAIN, "<path>"),
        (_MODEL, "<file>"),
        (r"\b[A-Za-z]:\\[^\s'\"]+", "<path>"),
    )
)


def anonymous(text: str) -> str:
    """`text` without private data. Files of the pack and of Python's packages keep their names below these."""
    for folder, name in _known_folders():
        text = text.replace(folder, name)
    for pattern, name in _PATTERNS:
        text = pattern.sub(name, text)
    for word, name in _known_words():
        text = re.sub(rf"(?<![A-Za-z0-9]){re.escape(word)}(?![A-Za-z0-9])", name, text)
    return text


def _known_folders() -> list[tuple[str, str]]:
    """Folders of this machine and what they are called instead, the longest first: one may lie in another."""
    found = [(PACK, "<pack>"), (Path(tempfile.gettempdir()), "<path>")]
    found += [(Path(path), "<python>") for path in set(sysconfig.get_paths().values())]
    with contextlib.suppress(RuntimeError):
        found.append((Path.home(), "<path>"))
    texts = {(str(form), name) for path, name in found for form in (path, path.resolve())}
    return sorted(((path, name) for path, name in texts if len(path) > 3), key=lambda one: -len(one[0]))


def _known_words() -> Iterator[tuple[str, str]]:
    users = {Path.home().name}
    with contextlib.suppress(
        Exception
    ):  # without a name in the environment it asks a module that may not be there
        users.add(getpass.getuser())
    host = platform.node()
    for names, instead in ((users, "<user>"), ({host, host.partition(".")[0]}, "<host>")):
        for name in sorted(names, key=len, reverse=True):
            if len(name) > 2 and name.lower() not in _IN_COMMON:
                yield name, instead
