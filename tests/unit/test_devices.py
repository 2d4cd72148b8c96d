"""Devices are found without touching them, and what the user writes stands for exactly the cards it names."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from runtime import devices
from runtime.devices import choose_devices, cpu_devices, physical_cards
from runtime.spec import Device
from tests.support.mocks import GIB, MockNVML, mock_cards
from tests.support.refusals import refused

CARDS = mock_cards(24, 24, 16, 8)


def indices(chosen: tuple[Device, ...]) -> list[int]:
    return [device.index for device in chosen]


# ---- what the user writes


@pytest.mark.parametrize("text", ["auto", "", "  ", "AUTO", " auto\n"])
def test_auto_is_every_card(text: str) -> None:
    assert choose_devices(text, CARDS) == CARDS


@pytest.mark.parametrize("text", ["auto", "", "cpu", " CPU "])
def test_without_cards_auto_is_the_cpu(text: str) -> None:
    assert choose_devices(text, ()) == cpu_devices()


def test_the_cpu_can_be_chosen_beside_cards() -> None:
    chosen = choose_devices("cpu", CARDS)
    assert {device.kind for device in chosen} == {"cpu"}
    assert len({device.key for device in chosen}) == len(chosen) == devices.CPU_SLOTS


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", [0]),
        ("0,1", [0, 1]),
        ("1,0", [1, 0]),
        ("3,0,2", [3, 0, 2]),
        (" 0 , 1 ", [0, 1]),
        ("02", [2]),
        ("0,1,2,3", [0, 1, 2, 3]),
    ],
)
def test_numbers_are_physical_cards_in_the_order_written(text: str, expected: list[int]) -> None:
    assert indices(choose_devices(text, CARDS)) == expected


def test_a_card_is_named_by_its_number_not_its_place() -> None:
    """A card that the driver has lost leaves a gap."""
    with_gap = (CARDS[0], CARDS[2])
    assert choose_devices("2", with_gap) == (CARDS[2],)
    with refused("no GPU 1", "0 (Mock), 2 (Mock)"):
        choose_devices("1", with_gap)


@pytest.mark.parametrize("text", ["7", "0,7", "7,0", "7,7", "4", "999999999"])
def test_cards_that_do_not_exist_are_refused_by_number(text: str) -> None:
    with refused(
        f"no GPU {max(text.split(','), key=int)}", f"'{text}'", "0 (Mock), 1 (Mock), 2 (Mock), 3 (Mock)"
    ):
        choose_devices(text, CARDS)


@pytest.mark.parametrize(("visible", "said"), [(None, False), ("", False), ("3", True)])
def test_who_was_given_other_numbers_by_comfyui_is_told(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, said: bool
) -> None:
    """As `--cuda-device 3` does. Cards that exist are found by their own numbers all the same."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert choose_devices("0,1", CARDS) == CARDS[:2]
    with refused("no GPU 7") as caught:
        choose_devices("7", CARDS)
    assert ("CUDA_VISIBLE_DEVICES (3) renumbers them for ComfyUI only" in str(caught.value)) == said


@pytest.mark.parametrize(("text", "works"), [("0,0", "0"), ("1,0,1", "0,1"), ("2,02", "2")])
def test_a_card_named_twice_is_refused(text: str, works: str) -> None:
    with refused(f"'{text}'", "twice", f"Works here: {works}."):
        choose_devices(text, CARDS)


@pytest.mark.parametrize(
    "text",
    [
        "x",
        "-1",
        "0,",
        ",",
        "0;1",
        "0 1",
        "0-2",
        "1.0",
        "cuda:0",
        "auto,0",
        "cpu,cpu",
        "²",
        "GPU-0000",
        "9" * 5000,
    ],
)
def test_text_that_is_neither_is_refused_with_what_can_be_written(text: str) -> None:
    with refused(f"'{text}'", "auto, cpu", "0,1,3", "0 (Mock)"):
        choose_devices(text, CARDS)


def test_text_of_several_lines_is_refused_in_three() -> None:
    with refused("'0, x'"):
        choose_devices("0,\nx\n", CARDS)


@pytest.mark.parametrize("text", ["0", "x"])
def test_without_cards_numbers_are_refused_with_what_works(text: str) -> None:
    with refused("none, so only auto or cpu work here"):
        choose_devices(text, ())


# ---- what the driver says


def with_driver(monkeypatch: pytest.MonkeyPatch, driver: MockNVML) -> tuple[Device, ...]:
    """The cards that a mock of NVIDIA's management library makes us see."""
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    cards = physical_cards()
    assert driver.open == 0, "the library was left open"
    return cards


def test_cards_carry_what_the_driver_says(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = MockNVML([("GPU-a", "RTX 3090"), ("GPU-b", "RTX 4090")])
    assert with_driver(monkeypatch, driver) == (
        Device(
            kind="cuda", index=0, uuid="GPU-a", name="RTX 3090", total_bytes=GIB, free_bytes=0, peers=(1,)
        ),
        Device(
            kind="cuda",
            index=1,
            uuid="GPU-b",
            name="RTX 4090",
            total_bytes=2 * GIB,
            free_bytes=GIB,
            peers=(0,),
        ),
    )


def test_old_libraries_answer_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    text = with_driver(monkeypatch, MockNVML([("GPU-a", "RTX 3090")]))
    assert with_driver(monkeypatch, MockNVML([(b"GPU-a", b"RTX 3090")])) == text


def test_a_name_that_is_no_text_does_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    (card,) = with_driver(monkeypatch, MockNVML([(b"GPU-a", b"RTX \xff")]))
    assert card.name.startswith("RTX ")


@pytest.mark.parametrize("call", ["nvmlDeviceGetHandleByIndex", "nvmlDeviceGetUUID", "nvmlDeviceGetName"])
def test_a_card_the_driver_has_lost_is_left_out_and_the_others_keep_their_numbers(
    monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    driver = MockNVML([("GPU-a", "A"), ("GPU-b", "B"), ("GPU-c", "C")], failing={call: [1]})
    assert [(card.index, card.uuid) for card in with_driver(monkeypatch, driver)] == [
        (0, "GPU-a"),
        (2, "GPU-c"),
    ]


def test_a_card_that_does_not_tell_its_memory_is_still_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = MockNVML([("GPU-a", "A"), ("GPU-b", "B")], failing={"nvmlDeviceGetMemoryInfo": [0]})
    assert [card.total_bytes for card in with_driver(monkeypatch, driver)] == [0, 2 * GIB]


# ---- what other programs hold

OURS, RANK = os.getpid(), 4_000_001
OTHER, DISPLAY, FOREIGN = 4_000_002, 4_000_003, 4_000_004  # no process has such an id here


def taken(
    monkeypatch: pytest.MonkeyPatch,
    computing: dict[int, int | None],
    drawing: dict[int, int | None] | None = None,
    *,
    in_container: bool = False,
) -> int:
    """Bytes that other programs hold of a card with 8 GiB, of which 1 is free."""
    driver = MockNVML([("GPU-a", "A")], computing=computing, drawing=drawing)
    driver.nvmlDeviceGetMemoryInfo = lambda handle: SimpleNamespace(total=8 * GIB, free=GIB)
    monkeypatch.setattr(devices, "descendants", lambda pid: [RANK] if pid == OURS else [])
    monkeypatch.setattr(devices, "sees_all_processes", lambda: not in_container)
    (card,) = with_driver(monkeypatch, driver)
    return card.taken_bytes


def test_what_this_host_and_its_ranks_hold_is_not_other_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert taken(monkeypatch, {OURS: 2 * GIB, RANK: 3 * GIB}) == 0
    assert taken(monkeypatch, {OURS: GIB, RANK: GIB, OTHER: 4 * GIB}, {DISPLAY: GIB}) == 5 * GIB


def test_a_program_that_computes_and_draws_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert taken(monkeypatch, {OTHER: 2 * GIB}, {OTHER: 3 * GIB}) == 3 * GIB


def test_a_program_whose_size_the_driver_keeps_to_itself_counts_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert taken(monkeypatch, {OTHER: None, FOREIGN: GIB}) == GIB


def test_more_than_is_used_cannot_be_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    assert taken(monkeypatch, {OTHER: 100 * GIB}) == 7 * GIB


def test_in_a_container_the_drivers_ids_count_only_if_ours_are_among_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert taken(monkeypatch, {FOREIGN: 4 * GIB}, in_container=True) == 0
    assert taken(monkeypatch, {FOREIGN: 4 * GIB, OURS: GIB}, in_container=True) == 4 * GIB


# ---- which cards reach each other

FOUR = [("GPU-a", "A"), ("GPU-b", "B"), ("GPU-c", "C"), ("GPU-d", "D")]


def peers(monkeypatch: pytest.MonkeyPatch, driver: MockNVML) -> list[tuple[int, ...] | None]:
    return [card.peers for card in with_driver(monkeypatch, driver)]


def test_cards_that_read_each_other_are_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert peers(monkeypatch, MockNVML(FOUR)) == [(1, 2, 3), (0, 2, 3), (0, 1, 3), (0, 1, 2)]


def test_cards_in_two_linked_pairs_have_one_peer_each(monkeypatch: pytest.MonkeyPatch) -> None:
    across = [(a, b) for a in range(4) for b in range(4) if a // 2 != b // 2]
    assert peers(monkeypatch, MockNVML(FOUR, unlinked=across)) == [(1,), (0,), (3,), (2,)]


def test_a_link_counts_only_if_both_ends_can_read(monkeypatch: pytest.MonkeyPatch) -> None:
    assert peers(monkeypatch, MockNVML(FOUR[:3], unlinked=[(0, 2)])) == [(1,), (0, 2), (1,)]


def test_cards_without_any_link_have_no_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert peers(monkeypatch, MockNVML(FOUR[:2], unlinked=[(0, 1), (1, 0)])) == [(), ()]


def test_a_single_card_has_no_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert peers(monkeypatch, MockNVML(FOUR[:1])) == [()]


def test_a_driver_that_does_not_tell_leaves_links_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = MockNVML(FOUR[:2], failing={"nvmlDeviceGetP2PStatus": [0, 1]})
    assert peers(monkeypatch, driver) == [None, None]


def test_one_card_that_does_not_tell_leaves_the_links_to_it_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = MockNVML(FOUR[:3], failing={"nvmlDeviceGetP2PStatus": [2]})
    assert peers(monkeypatch, driver) == [None, None, None]


def test_an_old_library_lacks_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = MockNVML(FOUR[:2])
    monkeypatch.delattr(MockNVML, "nvmlDeviceGetP2PStatus")
    assert peers(monkeypatch, driver) == [None, None]


def test_a_lost_card_is_nobodys_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = MockNVML(FOUR[:3], failing={"nvmlDeviceGetUUID": [1]})
    assert [(card.index, card.peers) for card in with_driver(monkeypatch, driver)] == [(0, (2,)), (2, (0,))]


# ---- drivers that fail


@pytest.mark.parametrize("call", ["nvmlInit", "nvmlDeviceGetCount"])
def test_a_driver_that_fails_has_no_cards(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    assert with_driver(monkeypatch, MockNVML([("GPU-a", "A")], failing={call: [None]})) == ()


def test_a_shutdown_that_fails_does_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = MockNVML([("GPU-a", "A")], failing={"nvmlShutdown": [None]})
    assert len(with_driver(monkeypatch, driver)) == 1


def test_without_the_library_there_are_no_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)  # import raises ImportError
    assert physical_cards() == ()


@pytest.mark.skipif(Path("/proc/driver/nvidia/version").exists(), reason="this machine has a driver")
def test_without_a_driver_there_are_no_cards() -> None:
    assert physical_cards() == ()
