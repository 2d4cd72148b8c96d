"""The doctor on CPU ranks: a machine that works, one whose links lose data or get stuck, and a group beside it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from runtime import launch
from runtime.doctor import examine as doctor
from runtime.doctor.findings import WORKS, WRONG, Findings
from runtime.doctor.text import report
from runtime.group import GROUPS
from runtime.spec import EXCHANGES, Cancelled, Progress
from tests.support.groups import layout_of, slot_on_ranks
from tests.support.models import DEMO
from tests.support.processes import descendants, wait_until
from tools import ROOT


def only_exchanges(monkeypatch: pytest.MonkeyPatch, worker: str) -> Findings:
    """What the doctor finds with ranks that run the module `worker`, without the pictures of the demo model."""
    monkeypatch.setattr(launch, "WORKER", worker)
    monkeypatch.setattr(doctor._Examination, "_compare", lambda self, *, together: None)
    return doctor.examine("cpu")


@pytest.mark.slow
def test_a_machine_that_works() -> None:
    said: list[str] = []
    phases: list[str] = []

    def reported(progress: Progress, _tensors: object) -> None:
        phases.append(progress.phase)

    found = doctor.examine("cpu", say=said.append, report=reported)
    print(report(found))
    assert (found.status, found.problems) == (WORKS, ())
    assert {(rate.kind, rate.nbytes) for rate in found.rates} == {
        (kind, nbytes) for kind in EXCHANGES for nbytes in doctor.CPU_SIZES
    }
    assert all(0 < rate.seconds < 5 and not rate.wrong_ranks for rate in found.rates)
    assert [one.layout for one in found.comparisons] == ["tensor 2", "ulysses 2", "ring 2"]
    # Not 0: that would be the same run twice.
    assert all(0 < one.max_rel < 1e-5 for one in found.comparisons)
    assert {one.arithmetic for one in found.measured.values()}.isdisjoint({0.0})
    assert said[0] == "starting 2 ranks"
    assert {"starting", "measuring", "loading", "sampling"} <= set(phases)
    assert not GROUPS.groups()
    wait_until(lambda: not ranks(), 5, "the ranks to be gone")


def ranks() -> list[int]:
    return [one.pid for one in descendants(os.getpid()) if launch.WORKER in one.cmdline()]


@pytest.mark.slow
def test_a_running_group_is_not_disturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    with slot_on_ranks(DEMO, layout_of(tensor=2)) as slot:
        before = GROUPS.snapshot()[0]
        monkeypatch.setattr(doctor._Examination, "_compare", lambda self, *, together: None)
        found = doctor.examine("cpu")
        assert [device.index for device in found.used] == [2, 3]
        assert found.start_seconds
        after = GROUPS.snapshot()[0]
        assert [one["pid"] for one in after["ranks"]] == [one["pid"] for one in before["ranks"]]
        assert slot.loaded
    assert len(before["ranks"]) == 2


def test_links_that_lose_data_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    found = only_exchanges(monkeypatch, "tests.support.wrong_exchange")
    assert found.status == WRONG
    assert found.verdict == "Something is wrong: all_to_all brings wrong data to CPU 1."
    wrong = {(rate.kind, rate.nbytes, rate.wrong_ranks) for rate in found.rates if rate.wrong_ranks}
    assert wrong == {("all_to_all", doctor.CPU_SIZES[-1], (1,))}
    assert "SOMETHING ELSE ARRIVED THAN WAS SENT" in " ".join(report(found).split())


@pytest.mark.slow
def test_links_that_get_stuck_end_the_exchange_and_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found = only_exchanges(monkeypatch, "tests.support.stuck_exchange")
    assert found.status == WRONG
    assert "ring of 8 MB did not work" in found.verdict
    text = report(found)
    # Of either rank: the one that waits ends itself as well as the one that it waits for.
    assert "Timeout" in text and "doctor.py" in text, "the stacks of the rank are in the report"


def test_cancel_ends_it() -> None:
    phases: list[str] = []
    with pytest.raises(Cancelled):
        doctor.examine(
            "cpu",
            report=lambda progress, _: phases.append(progress.phase),
            cancelled=lambda: "measuring" in phases,
        )
    wait_until(lambda: not ranks(), 5, "the ranks to be gone")


def test_the_command_tells_nothing_private(tmp_path: Path) -> None:
    """With a pack that cannot read its demo model, so that the report has an error in it."""
    home = tmp_path / "wilhelmina"
    home.mkdir()
    code = (
        "import sys; from pathlib import Path; from runtime.doctor import examine; from tools import doctor\n"
        f"examine.DEMO = Path({str(home)!r}) / 'secret' / 'shapes-flux'\n"
        "sys.argv[1:] = ['--devices', 'cpu', *sys.argv[1:]]; sys.exit(doctor.main())"
    )
    environment = {**os.environ, "HOME": str(home), "USER": "wilhelmina", "LOGNAME": "wilhelmina"}
    command = [sys.executable, "-c", code, "--json"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == WRONG, done.stderr
    found = json.loads(done.stdout)
    assert len(found["problems"]) == 1 and "demo model" in found["problems"][0]
    private = ["wilhelmina", "secret", str(tmp_path), str(ROOT)]
    assert not [word for word in private if word in done.stdout]
