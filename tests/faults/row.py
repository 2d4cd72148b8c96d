"""One line of the fault suite, and which of them were asked for."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Row:
    """What was done, while what, to which rank (None: to none in particular), and how it went.

    `seconds` are those that count, as until the error is shown; `detail` says what was seen, or what is wrong.
    """

    fault: str
    stage: str
    rank: int | None
    ok: bool
    seconds: float
    detail: str

    @property
    def key(self) -> str:
        return key(self.fault, self.stage, self.rank)

    def line(self, as_json: bool) -> str:
        fields = {**asdict(self), "seconds": round(self.seconds, 2)}
        if as_json:
            return json.dumps(fields)
        verdict = "ok    " if self.ok else "FAILED"
        return f"{verdict} {self.key:36} {self.seconds:7.2f} s  {self.detail}"


def key(fault: str, stage: str, rank: int | None) -> str:
    return f"{fault}/{stage}/{'-' if rank is None else rank}"


@dataclass(frozen=True)
class Wanted:
    """Which rows to make: those that match one of `patterns`, as "kill/*/1", and did not pass before (`done`)."""

    patterns: tuple[str, ...] = ()
    done: frozenset[str] = frozenset()

    @classmethod
    def of(cls, patterns: Iterable[str], resume: Path | None) -> Wanted:
        """`resume` is a file of JSON lines of an earlier run."""
        done = set()
        if resume is not None and resume.exists():
            for line in resume.read_text(encoding="utf-8").splitlines():
                if line.startswith("{") and (row := Row(**json.loads(line))).ok:
                    done.add(row.key)
        return cls(tuple(patterns), frozenset(done))

    def __call__(self, fault: str, stage: str, rank: int | None) -> bool:
        name = key(fault, stage, rank)
        chosen = not self.patterns or any(fnmatch.fnmatch(name, f"{one}*") for one in self.patterns)
        return chosen and name not in self.done
