"""The page's files without a page: what they may touch, their texts, and what the panel says about a state.

The last is asked of web/view.mjs itself, by node where there is one, and so is when web/panel.mjs asks and believes.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from typing import Any

import pytest

from tests.browser import states
from tests.browser.states import GB, PHASES
from tools import ROOT

WEB = ROOT / "web"
MOST_LINES = 700
SCRIPTS = {file.name: file.read_text(encoding="utf-8") for file in sorted(WEB.glob("*.*js"))}
TEXTS: dict[str, list[str]] = json.loads((WEB / "strings.json").read_text(encoding="utf-8"))
DECLARED = json.loads((WEB / "declared.json").read_text(encoding="utf-8"))
MARKUP = (WEB / "panel.html").read_text(encoding="utf-8")
SAME_IN_EVERY_LANGUAGE = {"cpu"}
# Texts that are asked for by a name that is put together, and the endings of such names.
PUT_TOGETHER = re.compile(r"^(what|toast)_\w+$|_(1|live)$")
PHASE_NAMES = {
    *re.findall(r'"(\w+)"', re.search(r"RUNNING = \[(.*?)\]", SCRIPTS["view.mjs"], re.DOTALL)[1]),  # type: ignore[index]
    "offline",
}
# Why the server refuses, by its codes; other languages than English say it by these.
OF_THE_SERVER = ("busy", "in_use", "not_running", "nothing_parked", "no_room", "taken", "no_group")
ASK = """
import { words } from "%(web)s/strings.mjs";
import * as view from "%(web)s/view.mjs";
import fs from "fs";
const { texts, locale, calls } = JSON.parse(fs.readFileSync(0));
const w = words(texts, locale);
console.log(JSON.stringify(calls.map(([name, ...given]) => view[name](...given, w) ?? null)));
"""
# A panel that is open, with a mock of the seam and no document. `answer` ends the last request.
PLAY = """
import { words } from "%(web)s/strings.mjs";
import * as view from "%(web)s/view.mjs";
import { Panel } from "%(web)s/panel.mjs";
import fs from "fs";
const { texts, version, given } = JSON.parse(fs.readFileSync(0));
globalThis.DOMParser = class { parseFromString() { return {}; } };
globalThis.document = { hidden: false };
let answer, mark = "", asked = 0, toasts = 0;
const request = () => { asked += 1; return new Promise((resolve) => {
  answer = async (status, body) => {
    resolve({ ok: status < 300, status, json: async () => body });
    await new Promise((done) => setTimeout(done, 5));
  };
}); };
const mockSeam = { request, badge: (text) => { mark = text; }, toast: () => { toasts += 1; }, locale: () => "en",
  setting: (id) => id === "Sharded.Notify.Problems", tabIsOpen: () => true, confirm: async () => true };
const panel = new Panel(mockSeam, view, (locale) => words(texts, locale), "", version);
Object.assign(panel, { timer: 1, root: { isConnected: true, checkVisibility: () => true }, draw() {} });
console.log(JSON.stringify(await (async () => { %(script)s })()));
"""
ROOT_HOME = "/" + "root"  # in pieces, for no file names a machine
needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="no node here to run the page's modules")


def ask(*calls: list[Any], locale: str = "en") -> list[Any]:
    """What functions of view.mjs answer; each call is a name and arguments, without the words, which come last."""
    given = json.dumps({"texts": TEXTS, "locale": locale, "calls": calls})
    command = ["node", "--input-type=module", "--eval", ASK % {"web": WEB.as_posix()}]
    done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout))


def play(script: str, **given: Any) -> Any:
    """What a scene with the panel returns; `given` are its data."""
    told = json.dumps({"texts": TEXTS, "version": states.version(), "given": given})
    command = ["node", "--input-type=module", "--eval", PLAY % {"web": WEB.as_posix(), "script": script}]
    done = subprocess.run(command, input=told, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return json.loads(done.stdout)


# ---- what the files may do


def test_the_javascript_stays_small() -> None:
    lines = {name: len(text.splitlines()) for name, text in SCRIPTS.items()}
    assert sum(lines.values()) < MOST_LINES, lines


def test_comfyui_runs_one_file_only() -> None:
    """It imports every .js file of a pack by itself."""
    assert [file.name for file in WEB.rglob("*.js")] == ["sharded.js"]


def test_only_the_seam_touches_comfyui() -> None:
    touches = re.compile(r"\b(?:app|api)\.|comfyAPI|\bwindow\b|scripts/|LiteGraph|extensionManager")
    assert touches.search(SCRIPTS["seam.mjs"])
    assert {name for name, text in SCRIPTS.items() if touches.search(text)} == {"seam.mjs"}


def test_no_file_names_an_address() -> None:
    """ComfyUI may live behind a path, and nothing is asked of another host."""
    addresses = re.compile(r"https?://|fetch\([\"'`]/|\.innerHTML = (?!html\b)")
    assert not {name for name, text in SCRIPTS.items() if addresses.search(text)}
    assert "http" not in MARKUP and "http" not in (WEB / "panel.css").read_text(encoding="utf-8")


def test_the_page_has_the_version_of_the_pack() -> None:
    assert DECLARED["version"] == states.version()


def test_nothing_is_declared_twice_and_no_command_has_a_key() -> None:
    settings, commands = ([one["id"] for one in DECLARED[kind]] for kind in ("settings", "commands"))
    assert len(settings) == len(set(settings)) == 5
    assert commands == [f"Sharded.{name}" for name in ("Park", "Restore", "Stop", "CopyDiagnostics")]
    assert not any("keybinding" in text for text in SCRIPTS.values())


@pytest.mark.parametrize(("kind", "file"), [("settings", "settings.json"), ("commands", "commands.json")])
def test_what_is_declared_has_the_texts_of_the_locales(kind: str, file: str) -> None:
    texts = json.loads((ROOT / "locales" / "en" / file).read_text(encoding="utf-8"))
    for one in DECLARED[kind]:
        told = texts[one["id"].replace(".", "_")]
        assert {name: one[name] for name in told if name != "options"} == {
            name: text for name, text in told.items() if name != "options"
        }


# ---- texts


def test_every_text_is_there_in_every_language() -> None:
    for key, spoken in TEXTS.items():
        assert len(spoken) == 3 and all(text.strip() for text in spoken), key
        places = [sorted(re.findall(r"\{\w+\}", text)) for text in spoken]
        assert [set(one) for one in places] == [set(places[0])] * 3, f"{key}: other figures than in English"
        letters = re.compile("[a-zA-Z]{3,}")
        if key not in SAME_IN_EVERY_LANGUAGE and letters.search(re.sub(r"\{\w+\}", "", spoken[0])):
            assert spoken[0] not in spoken[1:], f"{key} is left in English"


def test_every_text_is_used_and_none_is_missing() -> None:
    code = "\n".join(SCRIPTS.values())
    in_markup = set(re.findall(r'data-(?:text|label)="(\w+)"', MARKUP))
    named = {*re.findall(r'"(\w+)"', code), *in_markup, *PHASE_NAMES, *OF_THE_SERVER}
    assert {key for key in TEXTS if key not in named and not PUT_TOGETHER.search(key)} == set()
    asked = {*re.findall(r'\bt\("(\w+)"', code), *in_markup, *PHASE_NAMES}
    assert asked - set(TEXTS) == set()
    kinds = re.search(r"FAILURES = \[(.*?)\]", SCRIPTS["view.mjs"])
    assert kinds and {f"what_{kind}" for kind in re.findall(r'"(\w+)"', kinds[1])} <= set(TEXTS)


def test_the_servers_refusals_are_known_by_their_codes() -> None:
    files = (ROOT / "nodes" / "routes.py", ROOT / "runtime" / "registry.py")
    code = "\n".join(file.read_text(encoding="utf-8") for file in files)
    assert [one for one in OF_THE_SERVER if f'"{one}"' not in code or one not in TEXTS] == []


# ---- what is said about a state

SHOWN = {
    name: one for name, one in PHASES.items() if isinstance(one.answer, dict) and one.phase != "mismatch"
}
NONE = {"id": "", "state": "stopped", "stage": "stopped", "ranks": [], "slots": []}


@needs_node
def test_every_phase_is_said_in_its_words() -> None:
    def group(state: dict[str, Any]) -> dict[str, Any]:
        return dict((state["groups"] or [NONE])[0])

    cards = ask(
        *(["card", group(one.answer), one.answer] for one in SHOWN.values() if isinstance(one.answer, dict))
    )
    for (name, phase), card in zip(SHOWN.items(), cards, strict=True):
        assert card["phase"] == phase.phase, name
        for said, wanted in ((card["line"], phase.line), (card["more"], phase.more)):
            assert wanted.search(said) if isinstance(wanted, re.Pattern) else wanted in ("", said), name
        assert not re.search(r"\d+ (%|s\b|of)", card["spoken"]), (
            f"{name}: a screen reader would never be silent"
        )
        may = {button for button in phase.buttons if button in ("park", "restore", "stop", "examples")}
        assert may <= set(card["buttons"]), name


@needs_node
def test_a_run_keeps_the_group_and_says_why() -> None:
    (sampling, idle, parked, cancelling) = ask(
        *(
            ["card", PHASES[name].answer["groups"][0], PHASES[name].answer]
            for name in ("sampling", "idle", "parked", "cancelling")
        )  # type: ignore[index]
    )
    assert "run" in sampling["buttons"]["park"] and sampling["buttons"]["stop"] == ""
    assert idle["buttons"] == {"park": "", "stop": ""}
    assert parked["buttons"] == {"restore": "", "stop": ""}
    assert all(cancelling["buttons"].values())


@needs_node
def test_a_problem_is_history_once_a_later_run_has_ended() -> None:
    told = states.incident()
    answers = [states.state(states.group(idle=idle), incidents=[told]) for idle in (98.0, 50.0)]
    shown = ask(*(["card", one["groups"][0], one] for one in answers))
    assert [one["phase"] for one in shown] == ["failed", "idle"]
    assert not any(cell["gone"] for cell in shown[0]["cells"]), "its ranks live"
    other = states.incident(group="cpu:0")
    (shown_other,) = ask(["card", answers[0]["groups"][0], {**answers[0], "incidents": [other]}])
    assert shown_other["phase"] == "idle"


@needs_node
@pytest.mark.parametrize("locale", ["zh", "ja"])
def test_other_languages_say_no_english_sentence(locale: str) -> None:
    names = re.compile(
        r"GPU|RAM|GB|MB|ComfyUI|Sharded|flux2-dev-bf16|rank|tensor|ulysses|RTX|A5000|firefox", re.IGNORECASE
    )
    sentence = re.compile(r"[A-Za-z]{2,}[ ,;:]+[A-Za-z]{2,}")
    calls = [
        call
        for one in SHOWN.values()
        if isinstance(one.answer, dict)
        for call in (
            *(["card", group, one.answer] for group in one.answer["groups"] or [NONE]),
            *(["memoryRow", device, one.answer["groups"]] for device in one.answer["devices"]),
            ["lastRun", one.answer["last_run"]],
        )
    ]
    calls += [
        ["toastOf", states.incident(kind)] for kind in ("died", "memory", "start", "layout", "restarted")
    ]
    for call, answer in zip(calls, ask(*calls, locale=locale), strict=True):
        answer.pop("failure", None)  # what the server has found, quoted
        told = names.sub("", json.dumps(answer, ensure_ascii=False))
        assert not sentence.search(re.sub(r'"\w+":', "", told)), (call[0], told)


@needs_node
def test_a_first_run_that_is_on_is_not_called_none() -> None:
    none, sampling = ask(["lastRun", None], ["lastRun", {"step_seconds": [0.1, 0.2], "unit": "steps"}])
    assert (none["last"], none["median"]) == ("Nothing has run yet.", "")
    assert (sampling["last"], sampling["median"]) == ("", "median 0.20 s per step")


@needs_node
def test_what_is_unknown_is_never_zero() -> None:
    unknown = states.device(2, total=None, used=None, weights=None, work=None, others=[], age=None)
    no_rank = states.device(0, weights=None, work=None)
    rows = ask(
        ["memoryRow", unknown, []], ["memoryRow", no_rank, []], ["memoryRow", states.device(1, age=12.0), []]
    )
    assert rows[0]["text"] == "unknown"
    assert rows[0]["label"] == "weights: unknown, work: unknown, others: unknown"
    assert rows[1]["text"] == "16.3 of 24.0 GB" and rows[1]["shares"] == [0, 0, 0]
    assert rows[2]["name"] == "GPU 1 RTX 3090 (display)" and rows[2]["text"] == "16.4 of 24.0 GB, 12 s old"
    (run,) = ask(
        ["lastRun", states.last_run(load=None, decode=None, encode=None, peak=None, step_seconds=[])]
    )
    assert run == {"last": "20 steps 28.4 s", "steps": [], "median": "", "peak": ""}


@needs_node
def test_a_message_says_what_happened_and_stays_as_long() -> None:
    kinds = ("died", "layout", "restarted", "action", "of another version")
    told = [states.incident(kind, title="Title", text="Text.") for kind in kinds]
    messages = ask(*(["toastOf", one] for one in told))
    assert [(one["severity"], one["seconds"]) for one in messages] == [
        ("error", 15),
        ("warning", 10),
        ("info", 6),
        ("error", 10),
        ("error", 10),
    ]
    assert [one["text"] for one in messages] == ["Text. Details are in the Sharded panel.", *["Text."] * 4]
    assert ask(["toastOf", told[-1]], locale="ja")[0]["title"] == "Title"


@needs_node
def test_diagnostics_hold_nothing_private() -> None:
    serial = "GPU-12345678-1234-1234-1234-123456789abc"
    detail = (
        f'File "/home/somebody/ComfyUI/x.py"\n{ROOT_HOME}/models/flux and /Users/some.body/y: /roots stay'
    )
    device = states.device(0, key=f"cuda:{serial}")
    state = states.state(states.broken(), devices=[device], incidents=[states.incident(detail=detail)])
    (text,) = ask(["diagnostics", state, "0.1.0", "browser"])
    assert (
        "somebody" not in text
        and "some.body" not in text
        and f"{ROOT_HOME}/" not in text
        and serial not in text
    )
    assert (
        "~/ComfyUI/x.py" in text and "~/models/flux" in text and "/roots stay" in text and "GPU-1234" in text
    )


# ---- when it asks, and what it believes

IDLE = states.state(states.group(idle=5.0), seq=1000)


@needs_node
def test_news_during_a_request_are_no_silence_of_the_server() -> None:
    """They are asked for when that request has ended."""
    seen = play(
        "panel.tick(); panel.heard(given.event); panel.tick(); const first = [asked, panel.trouble];"
        " await answer(200, given.state); const then = panel.trouble; panel.tick(); panel.tick();"
        " return [...first, then, asked];",
        event=states.event(IDLE),
        state=IDLE,
    )
    assert seen == [1, "asking", "", 2]


@needs_node
def test_one_request_until_the_next_is_due() -> None:
    seen = play(
        "panel.tick(); await answer(200, given.state);"
        " for (let at = 0; at < 9; at += 1) { panel.heard({ ...given.event, seq: 2000 + at }); panel.tick(); }"
        " const open = asked; panel.wake(); document.hidden = true; panel.tick(); const hidden = asked;"
        " document.hidden = false; panel.root.checkVisibility = () => false; panel.tick();"
        " return [open, hidden, asked];",
        state=IDLE,
        event=states.event(IDLE),
    )
    assert seen == [1, 1, 1], "nothing is new, and then nobody sees it"


@needs_node
def test_what_an_event_does_not_tell_is_asked_for_at_once() -> None:
    """A group at rest, one that is new, and one with a rank that is late."""
    stalled = {"rank": 1, "kind": "silent", "seconds": 6.0, "limit": 10.0, "doing": "sampling", "done": 7}
    sampling = states.state(states.sampling(), seq=1000)
    for before, after in (
        (sampling, states.state(states.group(idle=0.0))),
        (states.state(seq=1000), states.state(states.group("starting"))),
        (sampling, states.state(states.sampling(stalled=stalled))),
    ):
        assert play(
            "panel.accept(given.state); panel.due = Infinity; panel.heard(given.event); panel.tick();"
            " return asked;",
            state=before,
            event={**states.event(after), "seq": 1001},
        ), after["groups"][0]["stage"]


@needs_node
def test_a_server_that_restarts_is_believed() -> None:
    """Its numbers begin again, and nothing that was asked of the old one is under way."""
    other = {**IDLE, "server": "ffffffff", "seq": 1}
    seen = play(
        "panel.accept(given.state); panel.accept({ ...given.state, seq: 999, groups: [] });"
        " const older = panel.state.groups.length; panel.act(panel.state.groups[0], 'park');"
        " const asked = panel.pending.size; panel.heard(given.event);"
        " panel.accept(given.other); return [older, asked, panel.seq, panel.pending.size];",
        state=IDLE,
        event=states.event(other),
        other=other,
    )
    assert seen == [1, 1, 1, 0]


@needs_node
def test_what_is_of_another_version_does_no_harm() -> None:
    seen = play(
        "panel.accept(given.state); const tell = (one) => { panel.heard(one); panel.incident(one); };"
        " for (const one of [{}, { api: 0 }, { api: 2, seq: 1e6, groups: 'none' }]) tell(one);"
        " const kept = panel.state.groups.length; panel.accept({ api: 2 }); const api = panel.trouble;"
        " panel.accept(given.state); panel.accept({ ...given.state, version: '99.0' });"
        " return [kept, api, panel.trouble, toasts];",
        state=IDLE,
    )
    assert seen == [1, "mismatch", "mismatch", 0]


@needs_node
@pytest.mark.parametrize(
    ("status", "body", "reason"),
    [
        (202, {}, ""),
        (409, {"error": "There is no room.", "code": "no_room"}, "There is no room."),
        (500, {}, "ComfyUI does not answer."),
        (502, None, "ComfyUI does not answer."),
    ],
)
def test_what_is_not_done_is_said(status: int, body: Any, reason: str) -> None:
    seen = play(
        "panel.accept(given.state); const done = panel.act(panel.state.groups[0], 'park');"
        " await answer(...given.answer); return [await done, panel.pending.size, panel.refusals.size];",
        state=IDLE,
        answer=[status, body],
    )
    assert seen == [reason, 0 if reason else 1, 1 if reason else 0]


@needs_node
def test_the_mark_stays_until_somebody_can_see_the_panel() -> None:
    told = {**states.incident(), "api": 1}
    seen = play(
        "const marks = []; document.hidden = true; panel.incident(given.incident); panel.tick(); marks.push(mark);"
        " document.hidden = false; panel.tick(); marks.push(mark);"
        " panel.timer = undefined; panel.heard(given.stalled); marks.push(mark);"
        " panel.fail('offline'); marks.push(mark); panel.incident(given.incident); return [...marks, toasts];",
        incident=told,
        stalled=states.event(
            states.state(states.sampling(stalled={"rank": 1, "kind": "stuck", "seconds": 9.0, "limit": 30.0}))
        ),
    )
    assert seen == ["!", "", "!", "", 1]


@needs_node
def test_it_goes_back_to_the_place_that_is_left_and_stops_when_there_is_none() -> None:
    """App Mode shows the tab in an element of its own, beside the one that is hidden meanwhile."""
    seen = play(
        "const place = (isConnected) => ({ isConnected, contains: () => false }), log = [];"
        " const hidden = place(true), own = { isConnected: true, contains: () => true };"
        " panel.show = (where) => log.push(where === hidden); panel.parents = new Set([place(false), own, hidden]);"
        " panel.others = { disconnect: () => log.push('deaf') }; panel.dialog = { close: () => log.push('closed') };"
        " panel.root.remove = () => log.push('gone'); panel.hide(); mockSeam.tabIsOpen = () => false; panel.tick();"
        " panel.hide(); return [...log, panel.open, panel.parents.size];"
    )
    assert seen == [True, "deaf", "closed", "gone", False, 0]


@needs_node
def test_a_group_of_which_only_an_event_has_told() -> None:
    new = {**NONE, "id": "cpu:0", "state": "starting", "stage": "starting", "progress": None}
    (card,) = ask(["card", new, states.state()])
    assert card["line"] == "Starting the ranks"


# ---- the layout line

VALUES = {
    "strategy": "manual",
    "tensor": 2,
    "ulysses": 2,
    "ring": 1,
    "stage": 1,
    "replica": 1,
    "devices": "auto",
}


@needs_node
@pytest.mark.parametrize(
    ("cards", "values", "line"),
    [
        (4, {}, "tensor 2 x ulysses 2 on GPU 0, 1, 2, 3"),
        (4, {"tensor": 1}, "ulysses 2 on GPU 0, 1"),
        (4, {"tensor": 1, "ulysses": 1}, "one rank on GPU 0"),
        (4, {"devices": " 1, 3 ", "ulysses": 1}, "tensor 2 on GPU 1, 3"),
        (4, {"tensor": 3}, "4 devices here: 6 ranks do not fit, use tensor 3"),
        (3, {"tensor": 1, "ulysses": 4}, "3 devices here: 4 ranks do not fit, use ulysses 2"),
        (2, {}, "2 devices here: 4 ranks do not fit, use tensor 2"),
        (1, {}, "One device here: 4 ranks do not fit, use auto"),
        (4, {"stage": 2}, "stage is not built yet: leave it at 1"),
        (4, {"strategy": "auto"}, "auto: up to 4 ranks on GPU 0, 1, 2, 3; the model decides"),
        (1, {"strategy": "prefer context"}, "prefer context: one rank on GPU 0"),
        (4, {"strategy": "prefer tensor", "devices": "2"}, "prefer tensor: one rank on GPU 2"),
        (4, {"devices": "1,7,9"}, "There is no GPU 7, 9 here."),
        (4, {"devices": "gpu0"}, "Devices are auto, cpu, or numbers such as 0,1,3."),
        (4, {"devices": ""}, "tensor 2 x ulysses 2 on GPU 0, 1, 2, 3"),
        (0, {"devices": "CPU"}, "tensor 2 x ulysses 2 on the CPU"),
        (0, {"strategy": "auto"}, "auto: up to 2 ranks on the CPU; the model decides"),
        (0, {"tensor": 16}, "8 devices here: 32 ranks do not fit, use tensor 8"),
    ],
)
def test_the_layout_line(cards: int, values: dict[str, Any], line: str) -> None:
    machine = states.state(devices=[states.device(index) for index in range(cards)], auto_ranks=cards or 2)
    assert ask(["layoutLine", {**VALUES, **values}, [], machine]) == [line]


@needs_node
def test_the_layout_line_says_what_another_node_sets() -> None:
    machine = states.state()
    adapts = {**VALUES, "strategy": "auto"}
    lines = ask(
        ["layoutLine", VALUES, ["tensor", "attention"], machine], ["layoutLine", adapts, ["tensor"], machine]
    )
    assert lines == [
        "Set by another node: tensor",
        "auto: up to 4 ranks on GPU 0, 1, 2, 3; the model decides",
    ]


@needs_node
def test_sizes_and_times_are_read_as_people_write_them() -> None:
    slots = [states.slot(total_bytes=nbytes) for nbytes in (int(39.2 * GB), 512 * 2**20)]
    said = ask(*(["slotLine", one] for one in slots))
    assert said == ["flux2-dev-bf16, loaded, 39.2 GB", "flux2-dev-bf16, loaded, 512 MB"]
    idle = [states.state(states.group(idle=seconds)) for seconds in (12.0, 180.2, 7300.0)]
    more = [card["more"] for card in ask(*(["card", one["groups"][0], one] for one in idle))]
    assert [one.rpartition("; ")[2] for one in more] == ["idle for 12 s", "idle for 3 min", "idle for 2 h"]
