"""The state that the panel shows: what each device holds, what a group does, and at most 8 KB whatever happens."""

from __future__ import annotations

import json
import os
import random
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from runtime import incidents, shown
from runtime.cards import Cards, Seen
from runtime.devices import cpu_devices, default_cpu_ranks
from runtime.group import WorkerGroup
from runtime.holders import Card, Holder
from runtime.journal import INCIDENTS_KEPT, Journal
from runtime.registry import Registry
from runtime.spec import Device, Heartbeat, Layout, Memory, ModelSpec, ParallelSpec, Progress, SlotInfo
from runtime.supervision import Suspicion
from tests.support.mocks import GIB, mock_cards

WALL = 1.7e9
NASTY = '<img src=x onerror=alert(1)> & "quotes" \' `ticks` \\ ' + "ü" * 150


class MockSession(SimpleNamespace):
    """Mock of a life of a group: alive, and no processes."""

    def __init__(self) -> None:
        super().__init__(dead=None, processes=SimpleNamespace(agent_pid=1))

    def close(self) -> None: ...


def running(devices: tuple[Device, ...], journal: Journal | None = None) -> WorkerGroup:
    """A group on these devices that says it runs."""
    group = WorkerGroup(devices, journal)
    group._session = MockSession()  # type: ignore[assignment]
    group.state.starting()
    for rank in range(len(devices)):
        group.state.rank_joined(rank, 4000 + rank)
        group.state.rank_ready(rank)
    group.settle()
    return group


def holding(group: WorkerGroup, name: str = "flux-12345678", gib: int = 3, *, parked: bool = False) -> None:
    count = len(group.devices)
    group.layouts[name] = Layout(spec=ParallelSpec(tensor=count), devices=group.devices, reason="")
    info = SlotInfo(weight_bytes=gib * GIB, seconds=1.234)
    (group.parked if parked else group.slots)[name] = info
    group.sizes[name] = tuple((gib + rank) * GIB for rank in range(count))
    group.settle()


def beat(group: WorkerGroup, rank: int, doing: str = "", slowest: float = 1.0, **memory: int) -> None:
    heartbeat = Heartbeat(
        memory=Memory(**memory), beat=1, doing=doing, progress=0, collectives=0, slowest=slowest
    )
    group.state.rank_heard(rank, heartbeat, group.state.current.since + 0.001)


def seen(devices: tuple[Device, ...], **more: Any) -> Cards:
    cards = Cards(cards=lambda: devices)
    cards.seen = tuple(
        Seen(device=device, when=0.0, **{"total": 24 * GIB, "used": 10 * GIB, **more}) for device in devices
    )
    return cards


def state(groups: list[WorkerGroup], cards: Cards, journal: Journal | None = None) -> dict[str, Any]:
    return shown.state(journal or Journal(), groups, cards, WALL)


# ---- devices


def test_a_machine_with_cards_shows_them_without_any_group() -> None:
    told = state([], seen(mock_cards(24, 24, linked=True), others=(Holder(pid=1, name=NASTY, nbytes=GIB),)))
    assert [one["label"] for one in told["devices"]] == ["GPU 0 Mock", "GPU 1 Mock"]
    first = told["devices"][0]
    assert (first["total"], first["used"], first["weights"], first["work"]) == (24 * GIB, 10 * GIB, 0, 0)
    assert first["others"] == [{"name": NASTY, "bytes": GIB}]
    assert (first["group"], first["rank"], first["peers"]) == (None, None, [1])
    assert told["auto_ranks"] == 2 and told["groups"] == [] and told["last_run"] is None


def test_what_is_not_known_is_never_zero() -> None:
    """A driver that does not tell, and a rank that has not told yet."""
    cards = mock_cards(24)
    group = running(cards)
    holding(group)
    (row,) = state([group], seen(cards, total=None, used=None))["devices"]
    assert (row["total"], row["used"], row["weights"], row["work"], row["display"], row["age"]) == (None,) * 6
    assert (row["group"], row["rank"]) == (group.id, 0)


def test_weights_and_work_of_a_rank_are_told_apart() -> None:
    """Its allocator counts what is being computed with the weights."""
    cards = mock_cards(24, 24)
    group = running(cards)
    holding(group, gib=3)
    beat(group, 0, weights=5 * GIB, reserved=8 * GIB)
    beat(group, 1, weights=2 * GIB, reserved=2 * GIB)  # still loading
    rows = state([group], seen(cards))["devices"]
    assert [(one["weights"], one["work"]) for one in rows] == [(3 * GIB, 5 * GIB), (2 * GIB, 0)]
    group.parked, group.slots = group.slots, {}
    beat(group, 0, weights=0, reserved=0)
    assert [one["weights"] for one in state([group], seen(cards))["devices"]] == [0, 0]


@pytest.mark.parametrize("doing", ["loading", "restoring", "parking", "unloading"])
def test_what_is_on_its_way_are_weights(doing: str) -> None:
    """Slots tell their sizes when they are there, and no more when they go."""
    cards = mock_cards(24)
    group = running(cards)
    group.state.busy("load", doing)
    beat(group, 0, weights=5 * GIB, reserved=6 * GIB)
    (row,) = state([group], seen(cards))["devices"]
    assert (row["weights"], row["work"]) == (5 * GIB, GIB)


def test_a_group_that_has_ended_holds_nothing() -> None:
    cards = mock_cards(24)
    group = running(cards)
    holding(group)
    group.close()
    (row,) = state([group], seen(cards))["devices"]
    assert (row["group"], row["weights"], row["work"]) == (None, 0, 0)


def test_a_machine_without_cards_shows_what_ranks_would_run_on() -> None:
    told = state([], seen(()))
    assert [one["key"] for one in told["devices"]] == [f"cpu:{n}" for n in range(default_cpu_ranks())]
    assert all(one["total"] > 0 and one["used"] > 0 for one in told["devices"])
    assert (told["cpu_ranks"], told["auto_ranks"]) == (8, default_cpu_ranks())


def test_a_group_on_the_cpu_of_a_machine_with_cards_shows_both() -> None:
    group = running(cpu_devices(3))
    holding(group, gib=1)
    told = state([group], seen(mock_cards(24)))
    assert [one["key"] for one in told["devices"]] == ["cuda:GPU-0000", "cpu:0", "cpu:1", "cpu:2"]
    assert [one["weights"] for one in told["devices"]] == [0, GIB, 2 * GIB, 3 * GIB]


def test_a_group_on_the_cpu_that_has_ended_takes_its_rows_with_it() -> None:
    group = running(cpu_devices(3))
    group.close()
    assert [one["key"] for one in state([group], seen(mock_cards(24)))["devices"]] == ["cuda:GPU-0000"]
    assert len(state([group], seen(()))["devices"]) == default_cpu_ranks()


# ---- a group


def test_an_idle_group_tells_what_it_holds() -> None:
    group = running(cpu_devices(2))
    holding(group, "flux-12345678", 3)
    group.used_at -= 180
    (told,) = state([group], seen(()))["groups"]
    assert (told["state"], told["stage"], told["progress"], told["step_seconds"]) == (
        "ready",
        "ready",
        None,
        None,
    )
    assert 180 <= told["idle"] < 190
    (slot,) = told["slots"]
    assert (slot["name"], slot["state"], slot["layout"]) == ("flux-12345678", "loaded", "tensor 2")
    assert (slot["weight_bytes"], slot["total_bytes"]) == (3 * GIB, 7 * GIB)
    assert (slot["load_seconds"], slot["restore_seconds"]) == (1.23, None)
    assert told["degrees"]["tensor"] == 2


def test_a_parked_group_says_who_parked_it() -> None:
    group = running(cpu_devices(2))
    holding(group, parked=True)
    group.parked_by = "idle"
    (told,) = state([group], seen(()))["groups"]
    assert (told["state"], told["stage"], told["parked_by"]) == ("parked", "parked", "idle")
    assert told["idle"] is not None


def test_a_busy_group_says_how_far_it_is() -> None:
    group = running(cpu_devices(2))
    holding(group)
    group.activity.begin("load", "loading", "flux-12345678")
    group.state.busy("load", "loading", "flux-12345678")
    group.activity.told(Progress(phase="loading", done=1, total=4))
    (told,) = state([group], seen(()))["groups"]
    assert (told["state"], told["stage"], told["doing"]) == ("busy", "loading", "loading")
    assert (told["progress"]["done"], told["progress"]["total"], told["idle"]) == (1, 4, None)


def test_between_two_steps_of_a_stock_sampler_a_group_shows_that_it_samples() -> None:
    group = running(cpu_devices(1))
    holding(group)
    group.activity.begin("forward", "sampling", "flux-12345678")
    group.state.busy("forward", "sampling", "flux-12345678")
    group.activity.end(well=True)
    group.settle()
    (told,) = state([group], seen(()))["groups"]
    assert (told["state"], told["stage"], told["idle"]) == ("ready", "sampling", None)
    news, stays_for = shown.news(Journal(), [group])
    assert 0 < stays_for <= 1
    group.state.busy("forward", "sampling", "flux-12345678")
    assert shown.news(Journal(), [group])[0]["groups"] == news["groups"]  # the next step is no news


def test_the_first_step_of_a_size_is_warming_up() -> None:
    group = running(cpu_devices(2))
    beat(group, 0, "", 0.0)  # from before
    group.state.busy("sample", "sampling")
    (told,) = state([group], seen(()))["groups"]
    assert not told["warming"]
    heard: list[bool] = []
    group.state.listen(lambda now: heard.append(now.warming))
    for slowest in (0.0, 0.0, 0.5, 0.5):
        beat(group, 0, "sampling", slowest)
    assert heard == [True, False]


def test_a_rank_that_is_late_is_named() -> None:
    group = running(cpu_devices(2))
    beat(group, 1, "sampling")
    group.state.busy("sample", "sampling")
    group.state.suspected(Suspicion("silent", 1, 6.04, 10.0))
    (told,) = state([group], seen(()))["groups"]
    assert told["stalled"] == {
        "rank": 1,
        "kind": "silent",
        "seconds": 6.0,
        "limit": 10.0,
        "doing": "sampling",
        "done": None,
    }
    group.state.suspected(None)
    assert state([group], seen(()))["groups"][0]["stalled"] is None


def test_what_changes_while_it_is_told_has_a_higher_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a page that gets two answers in the wrong order would keep the older."""
    group = running(cpu_devices(1))
    before = group.journal.seq

    def stage(one: WorkerGroup) -> str:
        one.journal.touch()
        return "ready"

    monkeypatch.setattr(WorkerGroup, "stage", property(stage))
    assert shown.news(group.journal, [group])[0]["seq"] == before
    assert state([group], seen(()), group.journal)["seq"] == before + 1 < group.journal.seq


def test_the_last_run_is_that_of_the_group_that_began_last() -> None:
    first, second = running(cpu_devices(1)), running(mock_cards(24))
    for group in (first, second):
        group.activity.begin("sample", "sampling", f"on-{group.id}")
        group.activity.end(well=True)
    told = state([first, second], seen(()))["last_run"]
    assert (told["slot"], told["group"]) == (f"on-{second.id}", second.id)
    assert told["time"] > WALL


# ---- incidents


def test_the_newest_three_incidents_are_told() -> None:
    journal = Journal(lambda: 5.0)
    for rank in range(5):
        journal.note(incidents.lost("g", "died", rank, f"CPU {rank}"))
    told = state([], seen(()), journal)["incidents"]
    assert [one["rank"] for one in told] == [4, 3, 2] and len(told) == INCIDENTS_KEPT
    assert [one["id"] for one in told] == [f"{journal.server}-{number}" for number in (5, 4, 3)]
    assert told[0]["time"] == WALL + 5


def test_a_run_that_needed_a_smaller_layout_says_so() -> None:
    groups = Registry(WorkerGroup)
    devices = cpu_devices(2)
    wanted, ran = (
        Layout(spec=spec, devices=devices, reason="")
        for spec in (ParallelSpec(ulysses=2), ParallelSpec(tensor=2))
    )
    slot = groups.slot(ran, ModelSpec(path="/models/a", pipeline_class="", dtype="float32"))
    group = groups.group(devices)
    groups.note_smaller(wanted, slot)
    (told,) = groups.journal.incidents
    assert (told.kind, told.group, told.rank) == ("layout", group.id, None)
    assert (told.title, told.text) == ("Ran with tensor 2 instead", "ulysses 2 did not fit.")
    assert (told.params.before, told.params.after, told.params.slot) == ("ulysses 2", "tensor 2", slot.name)


def test_incidents_say_step_and_cause() -> None:
    params = incidents.Params(doing="sampling", step=7, steps=20, wanted=GIB, seconds=31.0)
    lost = {kind: incidents.lost("g", kind, 2, "GPU 2", params).text for kind in ("died", "memory", "stuck")}
    assert lost == {
        "died": "GPU 2 died while sampling, at step 7.",
        "memory": "GPU 2 wanted 1.0 GB more while sampling, at step 7.",
        "stuck": "GPU 2 made no progress for 31 s while sampling, at step 7.",
    }


def test_a_detail_keeps_its_end_and_no_private_data() -> None:
    detail = "\n".join(f"line {number}" for number in range(5000)) + "\nat /home/somebody/secret.txt"
    short = incidents.short(detail)
    assert len(short) <= incidents.DETAIL_CHARACTERS
    assert short.startswith("line 0\n") and short.endswith("<path>") and "line 4999" in short


def test_a_failing_listener_keeps_nobody_from_hearing() -> None:
    journal, heard = Journal(), []

    def fails(*_: object) -> None:
        raise ValueError

    journal.listen(fails, fails)
    journal.listen(lambda: heard.append("change"), lambda _: heard.append("incident"))
    journal.note(incidents.lost("g", "died", 0, "CPU 0"))
    assert heard == ["change", "incident"]


# ---- at most 8 KB


def worst(count: int, slots: int, length: int, detail: int, text: str) -> dict[str, Any]:
    """A state with long names everywhere."""
    name = (text * (length // len(text) + 1))[:length]
    journal = Journal()
    cards = tuple(
        Device(kind="cuda", index=n, uuid=f"GPU-{n:08d}-1111-2222-3333-444455556666", name=name, peers=(0, 1))
        for n in range(count)
    )
    group = running(cards, journal)
    for number in range(slots):
        holding(group, f"{name}-{number:08d}")
    group.state.busy("sample", "sampling", f"{name}-{0:08d}")
    for rank in range(count):
        beat(group, rank, "sampling", weights=2**36, reserved=2**36, device_used=2**36, device_total=2**36)
    group.activity.begin("sample", "sampling", f"{name}-{0:08d}")
    for done in range(60):
        group.activity.told(Progress(phase="sampling", done=done + 1, total=60))
    others = tuple(Holder(pid=n, name=name, nbytes=2**33) for n in range(4))
    for rank in range(3):
        incident = incidents.lost(group.id, "died", rank % count, cards[rank % count].label)
        incident = msgspec.structs.replace(incident, detail=(text * detail)[:1500])
        journal.note(incident)
    told = shown.state(journal, [group], seen(cards, others=others), WALL)
    return {"api": 1, "version": "0.1.0", "comfyui": "0.3.75", "time": WALL, **told}


@pytest.mark.parametrize("text", ["a", "<&\"'>", "ü", "\x00", "漢字"])
@pytest.mark.parametrize(
    ("count", "slots", "length", "detail"),
    [
        (1, 1, 20, 10),
        (4, 2, 40, 1500),
        (8, 2, 30, 1500),
        (8, 6, 200, 1500),
        (8, 40, 250, 1500),
        (2, 1, 200, 0),
    ],
)
def test_it_never_has_more_than_8_kilobytes(
    text: str, count: int, slots: int, length: int, detail: int
) -> None:
    data = worst(count, slots, length, detail, text)
    told = shown.fitted(data)
    assert len(told) <= shown.LIMIT_BYTES
    short = json.loads(told)
    # What the page needs to work with is there whole.
    assert set(short) == set(data)
    assert [one["key"] for one in short["devices"]] == [one["key"] for one in data["devices"]]
    assert short["groups"][0]["id"] == data["groups"][0]["id"]
    assert len(short["groups"][0]["ranks"]) == count


def test_what_fits_is_told_whole() -> None:
    data = worst(2, 1, 20, 10, "a")
    assert json.loads(shown.fitted(data)) == json.loads(json.dumps(data))


def test_of_details_the_end_of_the_newest_stays_the_longest() -> None:
    data = worst(8, 2, 30, 1500, "abcdefghij")
    for one in data["incidents"]:
        one["detail"] += "the last line"
    short = json.loads(shown.fitted(data))
    assert short["incidents"][0]["detail"].endswith("the last line")
    assert len(short["incidents"]) == 3
    assert [one["detail"] for one in short["incidents"][1:]] == ["", ""]
    assert [one["label"] for one in short["devices"]] == [one["label"] for one in data["devices"]]
    assert len(shown.fitted(data)) > shown.LIMIT_BYTES - 10  # and it is cut no more than it must


@pytest.mark.parametrize("length", [30, 200])
def test_four_groups_are_all_told(length: int) -> None:
    """Whose buttons are gone cannot be stopped."""
    parts = [worst(8, 2, length, 1500, "a") for _ in range(4)]
    data = {**parts[0], "groups": [part["groups"][0] for part in parts]}
    for number, group in enumerate(data["groups"]):
        group["ranks"], group["id"] = group["ranks"][2 * number :][:2], f"cuda:2-{number:016d}"
    told = shown.fitted(data)
    assert len(told) <= shown.LIMIT_BYTES
    short = json.loads(told)
    assert [one["id"] for one in short["groups"]] == [one["id"] for one in data["groups"]]
    assert all(one["slots"] and len(one["ranks"]) == 2 for one in short["groups"])
    assert len(short["devices"]) == 8


def test_short_names_leave_the_words_of_the_page_alone() -> None:
    data = worst(8, 6, 200, 1500, "\x00")
    for one in data["groups"]:
        one["stage"] = one["progress"]["phase"] = one["progress"]["unit"] = "measurements"
    (group,) = json.loads(shown.fitted(data))["groups"]
    assert {group["stage"], group["progress"]["phase"], group["progress"]["unit"]} == {"measurements"}


def test_no_limit_is_missed_by_a_byte() -> None:
    dice = random.Random(5)
    for _ in range(20):
        data = worst(dice.randint(1, 8), dice.randint(1, 5), dice.randint(9, 120), 1500, dice.choice("aü<\n"))
        assert len(shown.fitted(data)) <= shown.LIMIT_BYTES


# ---- the cards


class FakeDriver:
    """Cards and their memory, and how often it was asked, on a clock of its own."""

    def __init__(self, *holders: Holder) -> None:
        self.now, self.lists, self.asks = 100.0, 0, 0
        self.cards, self.holders, self.lost = mock_cards(24, 24), holders, False
        self.watched = Cards(self._list, self._memory, lambda: self.now)

    def _list(self) -> tuple[Device, ...]:
        self.lists += 1
        return self.cards

    def _memory(self, device: Device, own: Any) -> Card | None:
        self.asks += 1
        if self.lost:
            return None
        return Card(total_bytes=24 * GIB, free_bytes=4 * GIB, holders=self.holders, display=device.index == 0)


def test_the_driver_is_not_asked_again_within_two_seconds() -> None:
    driver = FakeDriver()
    assert driver.watched.stale
    driver.watched.look(frozenset())
    assert (driver.asks, driver.lists, driver.watched.stale) == (2, 1, False)
    driver.now += 1.9
    assert not driver.watched.stale
    driver.now += 0.1
    assert driver.watched.stale
    driver.watched.look(frozenset())
    assert (driver.asks, driver.lists) == (4, 1)  # what cards there are is asked once a minute
    driver.now += 60
    driver.watched.look(frozenset())
    assert driver.lists == 2


def test_programs_that_are_no_ranks_are_named() -> None:
    driver = FakeDriver(
        Holder(pid=11, name="rank", nbytes=8 * GIB),
        Holder(pid=os.getpid(), name="ComfyUI", nbytes=2 * GIB),
        Holder(pid=77, name="firefox", nbytes=None),
    )
    driver.watched.look(frozenset({11}))
    one = driver.watched.seen[0]
    assert [(other.name, other.nbytes) for other in one.others] == [("ComfyUI", 2 * GIB), ("firefox", None)]
    assert (one.total, one.used, one.display) == (24 * GIB, 20 * GIB, True)


def test_a_card_that_the_driver_has_lost_is_unknown_and_looked_for() -> None:
    driver = FakeDriver()
    driver.watched.look(frozenset())
    driver.lost = True
    driver.now += 2
    driver.watched.look(frozenset())
    assert [(one.total, one.used) for one in driver.watched.seen] == [(None, None)] * 2
    driver.cards = driver.cards[:1]
    driver.now += 2
    driver.watched.look(frozenset())
    assert len(driver.watched.seen) == 1


def test_in_a_container_nobody_can_say_which_programs_are_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver tells pids of the machine outside."""
    monkeypatch.setattr("runtime.cards.sees_all_processes", lambda: False)
    driver = FakeDriver(Holder(pid=90001, name="", nbytes=8 * GIB))
    driver.watched.look(frozenset({11}))
    assert driver.watched.seen[0].others == ()
    driver.watched.look(frozenset())  # no group runs: then it is somebody else
    assert [one.nbytes for one in driver.watched.seen[0].others] == [8 * GIB]
