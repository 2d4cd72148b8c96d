"""The doctor without ranks: what it sees of a machine, which devices it takes, what it concludes and keeps quiet."""

from __future__ import annotations

import dataclasses
import getpass
import os
import platform
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from runtime import machine, planner
from runtime.devices import cpu_devices, physical_cards
from runtime.doctor import examine, facts
from runtime.doctor.facts import Card, Link, Machine, describe_machine, remembered
from runtime.doctor.findings import EQUAL, NOT_EXAMINED, WORKS, WRONG, Comparison, Findings, rates
from runtime.doctor.privacy import anonymous
from runtime.doctor.text import as_plain_data, report
from runtime.engine.backend import Backend
from runtime.engine.doctor import measured as measure
from runtime.environment import RankEnvironment, library_settings
from runtime.launch import PACK
from runtime.spec import (
    EXCHANGES,
    Cancelled,
    Device,
    Exchange,
    Measure,
    Measured,
    ParallelConfig,
    Progress,
    Refusal,
)
from tests.support.mocks import MockNVML, MockNVMLError, mock_cards

USER, HOST, HOME = "wilhelmina", "gpu-cellar-7", "/home/wilhelmina"
MACHINE = Machine(
    system="Linux 6.1.0 x86_64, Debian GNU/Linux 12 (bookworm)",
    python="3.11.2",
    versions={"torch": "2.14.1"},
    driver="",
    ram=(64 << 30, 32 << 30),
    ram_limit=None,
    shared_memory=(64 << 20, 64 << 20),
    temporary_free=1 << 30,
    settings={},
    cards=(),
    links=(),
)


@pytest.fixture
def person(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mock user at a mock machine."""
    monkeypatch.setattr(getpass, "getuser", lambda: USER)
    monkeypatch.setattr(platform, "node", lambda: f"{HOST}.lan")
    monkeypatch.setattr(Path, "home", lambda: Path(HOME))


# ---- what is kept quiet

PRIVATE = (
    USER,
    HOST,
    "ComfyUI/models",
    "secret",
    "192.168",
    "fe80",
    "4b1d",
    "mail",
    "/mnt",
    "Users",
    "deadbeef",
)


@pytest.mark.parametrize(
    "text",
    [
        f'File "{HOME}/ComfyUI/models/secret model.safetensors", line 3',
        f"no such file: {HOME}/ComfyUI/models/secret.safetensors",
        f"{HOME}/a b/secret",
        f"{HOME}/ComfyUI/models/my secret model.safetensors",
        "my-secret.gguf has no tensors",
        "open('/mnt/big disk/secret thing/x.bin')",
        "reading /mnt/data/secret/x.bin: failed",
        "~/secret/x",
        r"C:\Users\somebody\secret",
        f"{USER} on {HOST} and {HOST}.lan",
        f"logged in as {USER}: no",
        "connect to 192.168.0.17:29500 refused, also [fe80::1ff:fe23:4567:890a] and fe80::1",
        "tcp://somebody.example:29500/secret",
        "write to mail@somebody.example",
        "no GPU-4b1d5c6e-0000-1111-2222-333344445555",
        "token deadbeefdeadbeefdeadbeefdeadbeef",
        f"/tmp/comfyui-sharded-x/secret and {HOME}",
    ],
)
@pytest.mark.usefixtures("person")
def test_private_data_is_taken_out(text: str) -> None:
    told = anonymous(text)
    assert "<" in told
    assert not [word for word in PRIVATE if word in told], told


@pytest.mark.parametrize(
    "text",
    [
        "torch 2.14.1, driver 580.65.06, PCIe 4.0 x16, 23.5 GB/s",
        "/dev/shm is full; /proc/self/maps",
        "c10::Error in all_reduce/all_gather at 12:34:56.789",
        "tensor 2 x ulysses 2: max_rel 1.2e-06",
        "Linux 5.15.153.1-microsoft-standard-WSL2",
    ],
)
@pytest.mark.usefixtures("person")
def test_what_helps_stays(text: str) -> None:
    assert anonymous(text) == text


@pytest.mark.usefixtures("person")
def test_files_of_the_pack_and_of_packages_keep_their_names() -> None:
    text = f'File "{PACK}/runtime/worker.py", line 1\nFile "{Path(pytest.__file__)}", line 2'
    told = anonymous(text)
    assert "<pack>/runtime/worker.py" in told
    assert "<python>/pytest/__init__.py" in told


def test_settings_tell_numbers_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", f"eth-{USER}")
    monkeypatch.setenv("SECRET", "1")
    found = library_settings()
    assert (found["NCCL_P2P_DISABLE"], found["CUDA_VISIBLE_DEVICES"]) == ("1", "0,2")
    assert found["NCCL_SOCKET_IFNAME"] == "set"
    assert "SECRET" not in found


# ---- what it sees of a machine


class TalkativeNVML(MockNVML):
    """Mock cards whose driver tells everything: the first two joined by NVLink, the first with a display."""

    def nvmlSystemGetDriverVersion(self) -> bytes:
        return b"580.65.06"

    def nvmlSystemGetCudaDriverVersion(self) -> int:
        return 13010

    def nvmlDeviceGetCudaComputeCapability(self, handle: int) -> tuple[int, int]:
        return 8, 9

    def nvmlDeviceGetDisplayActive(self, handle: int) -> int:
        return int(handle == 0)

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: int) -> int:
        return 4

    def nvmlDeviceGetMaxPcieLinkWidth(self, handle: int) -> int:
        return 16

    def nvmlDeviceGetCurrPcieLinkWidth(self, handle: int) -> int:
        return 4 if handle == 2 else 16

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[types.SimpleNamespace]:
        pids = [[os.getpid()], [os.getpid(), 1], []][handle]
        return [types.SimpleNamespace(pid=pid) for pid in pids]

    def nvmlDeviceGetPciInfo(self, handle: int) -> types.SimpleNamespace:
        return types.SimpleNamespace(domain=0, bus=handle + 1)

    def nvmlDeviceGetNvLinkState(self, handle: int, link: int) -> int:
        if handle == 2 or link > 3:
            raise MockNVMLError("mock: no such link")
        return int(link < 2)

    def nvmlDeviceGetNvLinkRemotePciInfo(self, handle: int, link: int) -> types.SimpleNamespace:
        return types.SimpleNamespace(domain=0, bus=(1 - handle) + 1)

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, handle: int, link: int) -> int:
        return 0

    def nvmlDeviceGetTopologyCommonAncestor(self, one: int, other: int) -> int:
        return 30


def install(monkeypatch: pytest.MonkeyPatch, nvml: MockNVML) -> MockNVML:
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    return nvml


THREE = [("GPU-a", "Mock A"), ("GPU-b", "Mock B"), ("GPU-c", "Mock C")]


def test_everything_a_driver_tells_is_in_the_description(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = install(monkeypatch, TalkativeNVML(THREE, unlinked=[(0, 2), (1, 2)]))
    found = describe_machine("0.3.75")
    assert nvml.open == 0
    assert found.driver == "580.65.06, for CUDA up to 13.1"
    assert found.versions["ComfyUI"] == "0.3.75"
    assert [card.compute for card in found.cards] == ["8.9"] * 3
    assert [card.display for card in found.cards] == [True, False, False]
    assert [card.pcie for card in found.cards] == ["PCIe 4.0 x16", "PCIe 4.0 x16", "PCIe 4.0 x4"]
    assert [card.narrow for card in found.cards] == [False, False, True]
    assert [card.other_programs for card in found.cards] == [0, 1, 0]
    assert found.links == (
        Link(cards=(0, 1), way="NVLink x2", peers=True),
        Link(cards=(0, 2), way="PHB", peers=False),
        Link(cards=(1, 2), way="PHB", peers=False),
    )


def test_cards_behind_a_switch_are_linked(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = TalkativeNVML(THREE)
    nvml.nvmlDeviceGetNvLinkRemotePciInfo = lambda handle, link: types.SimpleNamespace(domain=9, bus=9)
    nvml.nvmlDeviceGetNvLinkRemoteDeviceType = lambda handle, link: 2
    install(monkeypatch, nvml)
    assert describe_machine().links[0].way == "NVLink x2"


def test_an_old_driver_leaves_gaps_and_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, MockNVML(THREE))
    found = describe_machine()
    assert [card.device for card in found.cards] == list(physical_cards())
    assert {(card.compute, card.display, card.pcie) for card in found.cards} == {("", None, "")}
    assert {link.way for link in found.links} == {"unknown"}
    assert "GPU 2" in report(Findings(machine=found))


def test_a_machine_without_a_driver_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    found = describe_machine()
    assert not found.cards
    assert found.versions["torch"] != "missing"
    assert found.versions["ComfyUI"] == "unknown"
    assert found.ram[0] >= found.ram[1] > 0


def test_what_is_remembered_is_told_of_cards_that_are_here(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(machine, "notes_file", lambda: tmp_path / "machine.json")
    here, gone = mock_cards(24, 24), (Device(kind="cuda", index=0, uuid="GPU-gone"),)
    assert remembered([Card(card) for card in here]) == ""
    machine.remember(gone, machine.SETTINGS[2])
    machine.remember(here, machine.SETTINGS[1])
    told = remembered([Card(card) for card in here])
    assert told.startswith(f"GPU 0, GPU 1 work {machine.SETTINGS[1].words} (driver ")
    assert ";" not in told


# ---- which devices it takes


class Groups:
    """A mock registry: groups that run on some devices, and one that does not run."""

    def __init__(self, *running: Device, stopped: tuple[Device, ...] = ()):
        self._groups = [
            types.SimpleNamespace(alive=True, devices=running),
            types.SimpleNamespace(alive=False, devices=stopped),
        ]

    def groups(self) -> list[types.SimpleNamespace]:
        return self._groups


@pytest.fixture
def no_group(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(examine, "GROUPS", Groups())
    yield


def test_a_groups_devices_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    cards = mock_cards(24, 24, 24)
    monkeypatch.setattr(examine, "GROUPS", Groups(cards[1], stopped=(cards[0],)))
    assert examine._free(cards, MACHINE) == ((cards[0], cards[2]), ("GPU 1 Mock is in use by a group",))


@pytest.mark.usefixtures("no_group")
def test_another_programs_ranks_and_full_cards_are_left_alone() -> None:
    first, second, third = mock_cards(24, 24, 24)
    full = msgspec.structs.replace(third, free_bytes=1 << 30)
    shared = msgspec.structs.replace(first, total_bytes=0, free_bytes=0, uuid="GPU-shared")
    seen = dataclasses.replace(MACHINE, cards=(Card(first), Card(second, foreign_ranks=True), Card(full)))
    used, left_out = examine._free((first, second, full, shared), seen)
    assert used == (first, shared)
    assert left_out == (
        "GPU 1 Mock is in use by a group of another program",
        "GPU 2 Mock has 1.0 GB free of the 2 GB that a rank may take",
    )


def test_two_of_the_cpus_places_are_taken_and_those_of_a_group_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    places = cpu_devices()
    monkeypatch.setattr(examine, "GROUPS", Groups(*places[:2]))
    assert examine._free(places, MACHINE) == (places[2:4], ())


def test_ranks_of_others_are_known_by_what_they_run(monkeypatch: pytest.MonkeyPatch) -> None:
    class Process:
        def __init__(self, pid: int):
            self.pid = pid

        def cmdline(self) -> list[str]:
            return ["python", "-m", "runtime.worker" if self.pid < 10 else "something.else"]

        def parents(self) -> list[Process]:
            return [Process(os.getpid())] if self.pid == 2 else [Process(1)]

    monkeypatch.setattr(facts.psutil, "Process", Process)
    assert facts._is_foreign_rank(1)
    assert not facts._is_foreign_rank(2), "a rank of our own"
    assert not facts._is_foreign_rank(11)


def test_devices_that_do_not_exist_are_refused() -> None:
    with pytest.raises(Refusal, match="no GPU 55"):
        examine.examine("55")


@pytest.mark.parametrize("platform_name", ["win32", "darwin"])
def test_where_groups_cannot_run_the_machine_is_still_described(
    monkeypatch: pytest.MonkeyPatch, platform_name: str
) -> None:
    monkeypatch.setattr(sys, "platform", platform_name)
    found = examine.examine("cpu")
    assert found.status == NOT_EXAMINED
    assert "Linux only" in found.verdict
    assert report(found).rstrip().endswith(found.verdict)


@pytest.mark.parametrize("count", range(1, 9))
def test_layouts_are_ones_that_the_demo_model_takes(count: int) -> None:
    model = planner.check_pipeline(examine.DEMO)
    chosen = examine.layouts(count, model.units)
    assert len(chosen) == len(set(chosen))
    for spec in chosen:
        planner.plan(model, ParallelConfig(strategy="manual", degrees=spec, devices="cpu"), cards=())
        assert 2 <= spec.world_size <= count
    for axis in ("tensor", "ulysses", "ring") if count > 1 else ():
        assert any(getattr(spec, axis) > 1 for spec in chosen), axis
    assert count == 1 or any(spec.world_size == count for spec in chosen), "no layout takes all devices"


# ---- what a rank computes


def test_a_device_is_held_against_double_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Backend(torch.device("cpu"), RankEnvironment(0, 0, 1))
    told: list[Progress] = []
    request = Measure(sizes=(4 << 10,))
    found = measure(request, backend, told.append, lambda: False)
    assert not found.exchanges, "one rank has nobody to exchange anything with"
    assert 0 < found.arithmetic < 1e-5
    assert told == [Progress(phase="measuring", done=0, total=len(EXCHANGES))]
    exact = torch.matmul

    def coarse(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return exact(one.half(), other.half()) if one.dtype == torch.float32 else exact(one, other)

    monkeypatch.setattr(torch, "matmul", coarse)
    assert measure(request, backend, told.append, lambda: False).arithmetic > EQUAL
    with pytest.raises(Cancelled):
        measure(request, backend, told.append, lambda: True)


# ---- what it concludes


def measured(
    ranks: int, *, wrong: tuple[int, str] | None = None, arithmetic: float = 1e-7
) -> dict[int, Measured]:
    """Every exchange in a millisecond, twice as long on the last rank."""
    return {
        rank: Measured(
            exchanges=tuple(
                Exchange(
                    kind=kind,
                    nbytes=nbytes,
                    seconds=2e-3 if rank == ranks - 1 else 1e-3,
                    right=wrong != (rank, kind),
                )
                for kind in EXCHANGES
                for nbytes in (4 << 10, 8 << 20)
            ),
            arithmetic=arithmetic if rank == ranks - 1 else 1e-7,
            libraries={"NCCL": "2.30.7"},
        )
        for rank in range(ranks)
    }


def test_rates_are_those_of_the_slowest_rank_and_of_one_link() -> None:
    """The factors of nccl-tests' doc/PERFORMANCE.md."""
    found = {rate.kind: rate for rate in rates(measured(4, wrong=(2, "ring"))) if rate.nbytes == 8 << 20}
    assert {rate.seconds for rate in found.values()} == {2e-3}
    plain = (8 << 20) / 2e-3
    factors = {kind: rate.bytes_per_second / plain for kind, rate in found.items()}
    assert factors == pytest.approx({"all_reduce": 1.5, "all_gather": 0.75, "all_to_all": 0.75, "ring": 1.0})
    assert {kind: rate.wrong_ranks for kind, rate in found.items() if rate.wrong_ranks} == {"ring": (2,)}


CARDS = mock_cards(24, 24)
GOOD = Findings(
    machine=MACHINE,
    used=CARDS,
    start_seconds=4.0,
    measured=measured(2),
    reference_seconds=0.2,
    comparisons=(Comparison("tensor 2", 2, 2e-6, 0.3), Comparison("ring 2", 2, 5e-4, 0.3)),
)


def changed(**fields: object) -> Findings:
    return dataclasses.replace(GOOD, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("found", "status", "verdict"),
    [
        (
            GOOD,
            WORKS,
            "Everything that was tried works: 2 cards exchange data correctly, and 2 layouts give the picture that one "
            "rank gives.",
        ),
        (
            changed(
                used=CARDS[:1],
                measured={0: Measured(exchanges=(), arithmetic=0, libraries={})},
                comparisons=(),
            ),
            WORKS,
            "A rank works on GPU 0; with one device there is nothing to divide.",
        ),
        (
            changed(measured=measured(2, wrong=(1, "ring"))),
            WRONG,
            "Something is wrong: ring brings wrong data to GPU 1.",
        ),
        (
            changed(measured=measured(2, arithmetic=float("nan"))),
            WRONG,
            "Something is wrong: GPU 1 computes wrong (max_rel nan against the CPU).",
        ),
        (
            changed(
                comparisons=(Comparison("tensor 2", 2, float("nan"), 0.3), Comparison("ring 2", 2, 0.4, 0.3))
            ),
            WRONG,
            "Something is wrong: tensor 2 gives another picture than one rank (max_rel nan), and 1 more.",
        ),
        (
            changed(problems=("The group: it did not start.\nmore",), measured={}, comparisons=()),
            WRONG,
            "Something is wrong: The group: it did not start.",
        ),
        (
            Findings(machine=MACHINE, left_out=("GPU 0 is in use by a group",)),
            NOT_EXAMINED,
            "Not examined: GPU 0 is in use by a group.",
        ),
    ],
)
def test_the_verdict(found: Findings, status: int, verdict: str) -> None:
    assert (found.status, found.verdict) == (status, verdict)
    assert " ".join(report(found).split()).endswith(f"Verdict: {verdict}")


def test_a_picture_that_is_close_is_pointed_out_and_works() -> None:
    text = report(GOOD)
    assert "max_rel 5.0e-04: close" in text
    assert "ring 2: more apart than rounding mostly is" in text
    assert "max_rel 2.0e-06: equal" in text


@pytest.mark.usefixtures("person")
def test_a_report_full_of_errors_holds_no_private_data() -> None:
    error = (
        "The group: Rank 1 (GPU 1 Mock, pid 77) failed while starting: OSError: "
        f"{HOME}/ComfyUI/models/secret.safetensors\n"
        f'  File "{HOME}/ComfyUI/custom_nodes/x.py", line 7, in <module>\n'
        f"[{HOST}]:29500 (errno: 97 - Address family not supported), 192.168.0.17, GPU-4b1d5c6e-0000\n"
    )
    cards = tuple(msgspec.structs.replace(card, uuid="GPU-4b1d5c6e-0000") for card in CARDS)
    seen = dataclasses.replace(MACHINE, cards=tuple(Card(card) for card in cards), system=f"Linux 6.1-{USER}")
    found = changed(machine=seen, used=cards, problems=(error + "line\n" * 100,))
    text, plain = report(found), msgspec.json.encode(as_plain_data(found)).decode()
    for told in (text, plain):
        assert not [word for word in PRIVATE if word in told], told
        assert "failed while starting: OSError" in told
    assert text.count("line\n") < 50
    assert msgspec.json.decode(plain)["status"] == WRONG


def test_notes_say_what_a_machine_could_have_better() -> None:
    cards = mock_cards(24, 16, linked=False)
    seen = dataclasses.replace(
        MACHINE,
        cards=(Card(cards[0], display=True), Card(cards[1], narrow=True)),
        links=(Link(cards=(0, 1), way="PHB", peers=False),),
    )
    text = report(changed(machine=seen))
    for note in ("prefer context", "GPU 1: fewer PCIe lanes", "GPU 0: the display's", "unequal memory"):
        assert note in text
    assert not [
        note for note in ("prefer context", "fewer PCIe", "display's", "unequal") if note in report(GOOD)
    ]
