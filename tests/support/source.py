"""The pack's Python files as syntax trees, for the tests of the architecture."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tools import ROOT


@dataclass(frozen=True)
class Import:
    file: str
    """Path from the root of the repository."""
    line: int
    module: str
    """Dotted name; relative imports resolved, so that both `..spec` and `runtime.spec` are "runtime.spec"."""

    def within(self, *packages: str) -> bool:
        return any(self.module == package or self.module.startswith(f"{package}.") for package in packages)

    def __str__(self) -> str:
        return f"{self.file}:{self.line} imports {self.module}"


@dataclass(frozen=True)
class Source:
    file: str
    tree: ast.Module

    def walk(self) -> Iterator[ast.AST]:
        return ast.walk(self.tree)


@functools.cache
def sources(*rooms: str) -> tuple[Source, ...]:
    """Every module below the given folders of the root; "" stands for the root's own files."""
    paths: list[Path] = []
    for room in rooms:
        paths += sorted((ROOT / room).rglob("*.py")) if room else sorted(ROOT.glob("*.py"))
    return tuple(
        Source(path.relative_to(ROOT).as_posix(), ast.parse(path.read_text(encoding="utf-8"), str(path)))
        for path in paths
    )


def imports(*rooms: str) -> list[Import]:
    """Every import statement, those inside functions and under TYPE_CHECKING included."""
    found = []
    for source in sources(*rooms):
        for node in source.walk():
            if isinstance(node, ast.Import):
                found += [Import(source.file, node.lineno, alias.name) for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                base = _absolute(source.file, node)
                found += [Import(source.file, node.lineno, _member(base, alias.name)) for alias in node.names]
    return found


def dotted(node: ast.AST) -> str:
    """`os.environ` for the expression os.environ; "" for anything that is not a chain of names."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return f"{base}.{node.attr}" if base else ""
    return ""


def _absolute(file: str, node: ast.ImportFrom) -> str:
    """The module an import statement starts from, seen from the root of the repository."""
    if not node.level:
        return node.module or ""
    package = Path(file).parent.parts
    upper = package[: len(package) - (node.level - 1)]
    return ".".join([*upper, *filter(None, [node.module])])


def _member(base: str, name: str) -> str:
    """`from runtime import spec` and `from runtime.spec import Refusal` both mean the module runtime.spec."""
    folder = ROOT.joinpath(*base.split(".")) if base else ROOT
    is_module = (folder / f"{name}.py").is_file() or (folder / name).is_dir()
    if base and not folder.is_dir():
        # Outside the pack it cannot be told: keep the longer name, and every rule about a package still applies.
        return base if folder.with_suffix(".py").is_file() else f"{base}.{name}"
    if is_module:
        return f"{base}.{name}" if base else name
    return base or name
