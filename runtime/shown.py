"""What the panel shows, as plain data of at most 8 KB: devices, groups, the last incidents and the last run.

Made from what is known already: it waits for no rank, no driver and no lock. None is unknown, never zero. Bytes and
seconds; readings of the monotonic clock become unix time by adding `wall`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from .activity import rounded
from .cards import Cards, Seen
from .devices import CPU_SLOTS, cpu_devices, default_cpu_ranks
from .host_memory import host_memory
from .incidents import Incident
from .spec import Device
from .state import as_data

if TYPE_CHECKING:
    from .group import WorkerGroup
    from .journal import Journal

LIMIT_BYTES = 8192
_MOVING = ("loading", "restoring", "parking", "unloading")  # nothing is computed: all there is are weights
Data = dict[str, Any]


def state(journal: Journal, groups: Sequence[WorkerGroup], cards: Cards, wall: float) -> Data:
    """Everything but what only the host knows: its versions and the time."""
    return {
        "server": journal.server,
        "seq": journal.seq,
        "devices": devices_as_data(cards.seen, groups),
        "cpu_ranks": CPU_SLOTS,
        "auto_ranks": len(cards.seen) or default_cpu_ranks(),
        "groups": [group.snapshot() for group in groups],
        "incidents": [incident_as_data(one, wall) for one in journal.incidents],
        "last_run": last_run(groups, wall),
    }


def news(journal: Journal, groups: Sequence[WorkerGroup]) -> tuple[Data, float]:
    """What an event tells, and for how many seconds it stays so by itself: 0.0 is until something happens."""
    seq, told = journal.seq, []  # first: what changes meanwhile has another number
    for group in groups:
        current, stage = group.state.current, group.stage
        # Between two steps of a stock sampler it is ready for a moment: that is no news.
        busy = current.phase == "busy" or stage == "sampling"
        told.append(
            {
                "id": group.id,
                "state": "busy" if busy else current.phase,
                "stage": stage,
                "doing": stage if busy else "",
                "warming": current.warming,
                "cancelling": current.cancelling,
                "stalled": current.late is not None,
                "stopping": group.stopping,
                "progress": group.activity.progress(),
            }
        )
    open_for = max((group.activity.open_for for group in groups), default=0.0)
    return {"server": journal.server, "seq": seq, "groups": told}, open_for


def incident_as_data(incident: Incident, wall: float) -> Data:
    data: Data = msgspec.to_builtins(incident)
    data["time"] = round(data.pop("when") + wall, 3)
    return data


def last_run(groups: Iterable[WorkerGroup], wall: float) -> Data | None:
    """What the group did last that began last."""
    runs = [(group.activity.run, group) for group in groups if group.activity.run is not None]
    if not runs:
        return None
    run, group = max(runs, key=lambda one: one[0].began if one[0] else 0.0)
    assert run is not None
    data = run.as_data(running=group.activity.running)
    return {**data, "group": group.id, "time": round(run.began + wall, 3)}


# --------------------------------------------------------------------------------------------------------------
# A group


def group_as_data(group: WorkerGroup, agent_pid: int | None) -> Data:
    current, activity = group.state.current, group.activity
    data = as_data(current)
    stage, progress = group.stage, activity.progress()
    if data["stalled"] is not None:
        data["stalled"]["done"] = progress["done"] if progress else None
    return {
        "id": group.id,
        "agent_pid": agent_pid,
        **data,
        "stage": stage,
        "slots": list(_slots(group)) if group.alive else [],
        "degrees": _degrees(group, current.slot),
        "progress": progress,
        "step_seconds": rounded(activity.step_seconds, 4) if stage == "sampling" else None,
        "idle": round(time.monotonic() - group.used_at, 1) if stage in ("ready", "parked") else None,
        "parked_by": group.parked_by,
        "start_seconds": rounded(group.start_seconds, 2),
        "stopping": group.stopping,
    }


def _slots(group: WorkerGroup) -> Iterable[Data]:
    for state_, held in (("loaded", group.slots), ("parked", group.parked)):
        for name, info in list(held.items()):
            yield {
                "name": name,
                "state": state_,
                "layout": group.layouts[name].spec.describe(),
                "degrees": group.layouts[name].spec.degrees(),
                "weight_bytes": info.weight_bytes,
                "total_bytes": sum(group.sizes.get(name, (info.weight_bytes,))),
                "load_seconds": round(info.seconds, 2),
                "restore_seconds": rounded(group.restore_seconds.get(name), 2),
            }


def _degrees(group: WorkerGroup, at_work: str) -> dict[str, int]:
    """The layout of the slot at work, else of the first that is held, else of the last that was."""
    for name in (at_work, *list(group.slots), *list(group.parked), *reversed(list(group.layouts))):
        if name in group.layouts:
            return group.layouts[name].spec.degrees()
    return {}


# --------------------------------------------------------------------------------------------------------------
# The devices


def devices_as_data(seen: Sequence[Seen], groups: Sequence[WorkerGroup]) -> list[Data]:
    """The cards; and CPU "devices" where a group runs on them, or where there are no cards."""
    running = [group for group in groups if group.alive or group.state.current.phase == "starting"]
    owners = {device.key: (group, rank) for group in running for rank, device in enumerate(group.devices)}
    now = time.monotonic()
    rows = [_card(one, owners.get(one.device.key), now) for one in seen]
    on_cpu = {device for group in running for device in group.devices if device.kind == "cpu"}
    if not on_cpu and not seen:
        on_cpu = set(cpu_devices(default_cpu_ranks()))
    if on_cpu:
        total, available = host_memory().room
        for device in sorted(on_cpu, key=lambda one: one.index):
            row = _row(device, owners.get(device.key), total, total - available)
            rows.append(row | {"display": False, "age": 0.0})
    return rows


def _card(one: Seen, owner: tuple[WorkerGroup, int] | None, now: float) -> Data:
    row = _row(one.device, owner, one.total, one.used)
    others = [{"name": holder.name, "bytes": holder.nbytes} for holder in one.others]
    return row | {
        "display": one.display,
        "others": others,
        "peers": None if one.device.peers is None else list(one.device.peers),
        "age": round(now - one.when, 1) if one.used is not None else None,
    }


def _row(device: Device, owner: tuple[WorkerGroup, int] | None, total: int | None, used: int | None) -> Data:
    weights, work = _ours(*owner) if owner else (0, 0)
    return {
        "key": device.key,
        "label": device.label,
        "kind": device.kind,
        "total": total,
        "used": used,
        "display": None,
        "group": owner[0].id if owner else None,
        "rank": owner[1] if owner else None,
        "weights": weights,
        "work": work,
        "others": [],
        "peers": None,
    }


def _ours(group: WorkerGroup, rank: int) -> tuple[int | None, int | None]:
    """Bytes of a rank's weights, and what it has reserved beyond them. Its allocator also counts what is computed."""
    held = 0
    for name, info in list(group.slots.items()):
        sizes = group.sizes.get(name, ())
        held += sizes[rank] if rank < len(sizes) else info.weight_bytes
    memory = group.state.current.ranks[rank].memory
    if group.devices[rank].kind == "cpu":
        return held, None
    if memory.reserved is None:
        return (None, None) if group.slots else (held, None)
    weights = memory.weights if memory.weights is not None else held
    if group.state.current.doing not in _MOVING:
        weights = min(held, weights)
    return weights, max(0, memory.reserved - weights)


# --------------------------------------------------------------------------------------------------------------
# At most so many bytes


def fitted(data: Data, limit: int = LIMIT_BYTES) -> bytes:
    """`data` as JSON of at most `limit` bytes: what is the least needed goes first, and is cut no more than it must."""
    for cut in _CUTS:
        text = msgspec.json.encode(data)
        if len(text) <= limit:
            return text
        data = cut(data, len(text) - limit)
    return msgspec.json.encode(data)


def _without_old_details(data: Data, _excess: int) -> Data:
    newest, *older = data["incidents"] or [None]
    if newest is None:
        return data
    return {**data, "incidents": [newest, *({**one, "detail": ""} for one in older)]}


def _without_others(data: Data, _excess: int) -> Data:
    return {**data, "devices": [{**one, "others": one["others"][:1]} for one in data["devices"]]}


def _without_repeats(data: Data, _excess: int) -> Data:
    """A device's memory is told with the device too, and what lies in host RAM is for reports of errors only."""

    def cut(rank: Data) -> Data:
        return {**rank, "memory": {name: rank["memory"][name] for name in ("weights", "reserved")}}

    return _with_groups(data, lambda one: {**one, "ranks": [cut(rank) for rank in one["ranks"]]})


def _with_shorter_detail(data: Data, excess: int) -> Data:
    """Of the newest incident the end stays, which says what was last."""
    if not data["incidents"]:
        return data
    newest, *older = data["incidents"]
    detail = newest["detail"]
    enough = len(msgspec.json.encode(detail)) - excess
    while detail and (much := len(msgspec.json.encode(detail)) - enough) > 0:
        detail = detail[max(1, much // 6) :]  # a character takes six bytes at most: \u0000
    return {**data, "incidents": [{**newest, "detail": detail}, *older]}


def _with_short_names(most: int) -> Callable[[Data, int], Data]:
    """Cuts every text but those that the page sends back or compares: ids and keys. Its own words have 12 letters."""

    def cut(data: Data, _excess: int) -> Data:
        incidents = [{**one, "device": _mapped(one["device"], most)} for one in data["incidents"]]  # a label
        return _mapped({**data, "incidents": incidents}, most)

    return cut


_NEVER_CUT = {"id", "key", "device", "group", "server", "version", "comfyui"}


def _mapped(value: Any, most: int) -> Any:
    if isinstance(value, str):
        return value if len(value) <= most else f"{value[: most - 1]}…"
    if isinstance(value, Mapping):
        return {name: one if name in _NEVER_CUT else _mapped(one, most) for name, one in value.items()}
    if isinstance(value, list):
        return [_mapped(one, most) for one in value]
    return value


def _without_steps(data: Data, _excess: int) -> Data:
    run = data["last_run"]
    return {**data, "last_run": run and {**run, "step_seconds": []}, "incidents": data["incidents"][:1]}


def _without_figures(data: Data, _excess: int) -> Data:
    """Devices tell the memory of their ranks, and a slot's layout is there in words."""

    def cut(group: Data) -> Data:
        ranks = [{**one, "memory": {}} for one in group["ranks"]]
        return {**group, "ranks": ranks, "slots": [{**one, "degrees": {}} for one in group["slots"]]}

    devices = [{**one, "peers": None, "others": []} for one in data["devices"]]
    return {**_with_groups(data, cut), "devices": devices}


def _with_few_slots(most: int) -> Callable[[Data, int], Data]:
    """The groups that run, if any does, and of each so many slots."""

    def cut(data: Data, _excess: int) -> Data:
        running = [one for one in data["groups"] if one["state"] not in ("stopped", "broken")]
        data = {**data, "groups": running or data["groups"]}
        return _with_groups(data, lambda one: {**one, "slots": one["slots"][:most]})

    return cut


def _with_few_groups(data: Data, excess: int) -> Data:
    """As many groups as there is room for, and no incident: beyond any machine that is known."""
    groups = list(data["groups"])
    while len(groups) > 1 and excess > 0:
        excess -= len(msgspec.json.encode(groups.pop()))
    return {**data, "incidents": [], "groups": groups, "devices": data["devices"][:16]}


def _with_groups(data: Data, cut: Callable[[Data], Data]) -> Data:
    return {**data, "groups": [cut(one) for one in data["groups"]]}


_CUTS = (
    _without_old_details,
    _without_others,
    _without_repeats,
    _with_shorter_detail,
    _with_short_names(80),
    _without_steps,
    _without_figures,
    _with_few_slots(4),
    _with_short_names(40),
    _with_few_slots(1),
    _with_short_names(16),
    _with_few_groups,
)
