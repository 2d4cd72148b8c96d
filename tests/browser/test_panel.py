"""The panel by itself: a short run on the installed frontend, and on every one what takes GPUs or bad luck to be seen.

Where a `Stand` answers in the server's stead, the page, its frontend and its websocket are still the real ones.
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from playwright.sync_api import Page, expect

from tests.browser import states
from tests.browser.audit import axe_violations, overflow, overlaps, texts, weak_contrast
from tests.browser.editor import SHOTS
from tests.browser.panel import Panel, Stand
from tests.browser.stage import Stage
from tests.browser.states import PHASES, Phase
from tests.support.browser import executable, load_workflow, queued_prompt, saved_workflow
from tests.support.workflows import saved_demo
from tools import page_parts
from tools.client import ComfyClient

pytestmark = pytest.mark.skipif(
    executable() is None, reason="no Chromium here: install chromium to run the tests of the panel"
)
slow = pytest.mark.slow

# ComfyUI's own that both frontends have; two of them are light.
PALETTES = ("dark", "light", "solarized", "arc", "nord", "github")
WIDTHS = (230, 320, 480)
LOOKED_AT = ("none", "sampling", "idle", "parked", "failed")
ARIA = Path(__file__).parent / "aria"
FOR_SCREEN_READERS = ("none", "sampling", "failed")
CHOOSE = "([name, value]) => app.extensionManager.setting.set(name, value)"
COMMANDS = """() => app.extensionManager.command.commands.filter(one => one.id.startsWith('Sharded.'))
    .map(one => ({id: one.id, label: typeof one.label === 'function' ? one.label() : one.label,
        bound: Boolean(one.keybinding)}))"""
# Taken inside the module that the page runs; its address has a part that is new with each page.
TIME_UPDATES = """async address => {
    const {Panel} = await import(address)
    const draw = Panel.prototype.draw
    window.updates = []
    Panel.prototype.draw = function () {
        const began = performance.now()
        draw.call(this)
        window.updates.push(performance.now() - began)
    }
}"""
NASTY = "<b>&\"'`</b><img src=x onerror=alert(1)> " + "x" * 158
TWO_ENGLISH_WORDS = re.compile(r"[A-Za-z]{2,}[ ,;:]+[A-Za-z]{2,}")
# What is called the same in every language; the rest of a sentence is not.
NAMES = re.compile(
    r"NVIDIA|GeForce|RTX|A5000|GPU|CPU|RAM|GB|MB|ComfyUI|Sharded|flux2-dev-bf16|firefox|rank|tensor|ulysses|ring|"
    r"replica|stage|auto",
    re.IGNORECASE,
)


# ---- the one that every run of the tests includes


def test_open_run_see_close(default_stage: Stage, client: ComfyClient) -> None:
    default_stage.end_groups()  # other suites may have left some on this server
    panel = default_stage.open()
    assert panel.heard.routes == [], "the panel is closed"
    panel.open()
    expect(panel.root.locator("[data-phase]").first).to_be_visible()
    panel.follow()
    panel.run(saved_demo(steps=200, seed=4))
    expect(panel.card("idle")).to_be_visible()
    seen = [one["text"] for one in panel.shown()["phases"]]
    assert "sampling" in seen, seen
    expect(panel.part("last-run")).to_contain_text("200 steps")
    expect(panel.part("gpu-0")).to_be_visible()
    made_up = states.state(states.group(), incidents=[])
    assert shape(default_stage.state()) == shape(made_up), "the made-up states are of another shape"
    panel.editor.screenshot("panel-after-a-run")
    panel.close()
    with panel.requests(3) as asked:
        pass
    assert asked == []


def shape(state: dict[str, Any]) -> dict[str, set[str]]:
    """The names in an answer, of each kind of thing in it once."""
    group = next(one for one in state["groups"] if one["state"] not in ("stopped", "broken"))
    parts = {
        "state": state,
        "device": state["devices"][0],
        "group": group,
        "rank": group["ranks"][0],
        "memory": group["ranks"][0]["memory"],
        "slot": group["slots"][0],
        "last run": state["last_run"],
    }
    return {name: set(part) for name, part in parts.items()}


# ---- phases


@slow
def test_every_phase_is_shown_in_its_words(stage: Stage) -> None:
    panel, stand = stage.open_with_stand(PHASES["idle"].answer)
    panel.open()
    for name, phase in PHASES.items():
        print(name)  # which one it was, if it fails
        show(panel, stand, phase)
        expect(panel.state).to_have_text(phase.line)
        if phase.more:
            expect(panel.part("more")).to_have_text(phase.more)
        for button in phase.buttons:
            expect(panel.part(button)).to_be_visible()
        for elsewhere in {"examples", "reload", "incident"} - set(phase.buttons):
            expect(panel.part(elsewhere)).to_be_hidden()


@slow
def test_every_phase_is_photographed(stage: Stage) -> None:
    """dark and light, narrow and wide, for people to look at: test_output/browser/panel-<setting>/."""
    if stage.setting.renderer != "classic":
        pytest.skip("the nodes are not in these pictures")
    panel, stand = stage.open_with_stand(PHASES["idle"].answer)
    panel.open()
    panel.make_room()
    folder = f"panel-{stage.setting}"
    try:
        for palette, width in itertools.product(("dark", "light"), (230, 480)):
            panel.set_palette(palette)
            panel.set_width(width)
            shots = []
            for name, phase in PHASES.items():
                show(panel, stand, phase)
                panel.unfold()
                shots.append(panel.shoot(folder, f"{file_name(name)}-{palette}-{width}"))
            contact_sheet(shots).save(SHOTS / folder / f"all-{palette}-{width}.png")
    finally:
        stage.choose(ColorPalette="dark")


def show(panel: Panel, stand: Stand, phase: Phase) -> None:
    """Bring the panel into a phase, from a group that is idle."""
    for one in (PHASES["idle"], phase):
        stand.bring(one.answer)
        expect(panel.card(one.phase)).to_be_visible()


def file_name(phase: str) -> str:
    return re.sub(r"\W+", "-", phase)


def contact_sheet(files: list[Path], columns: int = 6) -> Image.Image:
    pictures = [Image.open(file).convert("RGB") for file in files]
    width, height = (max(getattr(one, side) for one in pictures) + 8 for side in ("width", "height"))
    sheet = Image.new("RGB", (width * columns, height * -(-len(pictures) // columns)), "grey")
    for number, picture in enumerate(pictures):
        sheet.paste(picture, (number % columns * width, number // columns * height))
    return sheet


@slow
def test_a_machine_with_one_gpu_or_none_says_what_that_means(stage: Stage) -> None:
    panel, stand = stage.open_with_stand(states.state(devices=[states.device(0)]))
    panel.open()
    expect(panel.part("note")).to_have_text("One GPU here: the workflow runs with one rank.")
    cpu = states.device(0, key="cpu:0", label="CPU 0", kind="cpu", display=False, others=[], peers=None)
    stand.show(states.state(devices=[cpu]))
    expect(panel.part("note")).to_have_text("No GPU: ranks run on the CPU, for tests only.")
    stand.show(states.state())
    expect(panel.part("note")).to_be_hidden()


@slow
def test_memory_is_told_card_by_card(stage: Stage) -> None:
    unknown = states.device(2, total=None, used=None, weights=None, work=None, others=[], age=None)
    old = states.device(3, age=12.0)
    cards = [states.device(0), states.device(1), unknown, old]
    panel, _stand = stage.open_with_stand(states.state(states.group(idle=5.0), devices=cards))
    panel.open()
    panel.unfold()
    expect(panel.part("gpu-1")).to_contain_text("GPU 1 RTX 3090 (display)")
    expect(panel.part("gpu-1")).to_contain_text(re.compile(r"16\.4( GB)? of 24\.0 GB"))
    expect(panel.part("gpu-1")).to_contain_text("firefox")
    label = panel.part("gpu-1").get_by_role("img")
    expect(label).to_have_accessible_name(re.compile(r"weights: 12\.4 GB, work: 2\.5 GB, others: 1\.5 GB"))
    # A driver that does not tell is no empty card.
    expect(panel.part("gpu-2")).to_contain_text("unknown")
    assert not re.search(r"\b0([.,]0)? [GM]B", panel.part("gpu-2").inner_text())
    expect(panel.part("gpu-3")).to_contain_text("12 s old")


# ---- buttons


@slow
def test_a_button_answers_at_once_and_a_refusal_says_why(stage: Stage) -> None:
    panel, stand = stage.open_with_stand(PHASES["idle"].answer)
    panel.open()
    panel.part("park").click()
    expect(panel.part("park")).to_have_text("Parking...", timeout=100)
    stand.show(states.state(states.group("parking")))
    stand.show(PHASES["parked"].answer)
    expect(panel.part("restore")).to_have_text("Restore")
    stand.refusal = {"error": "There is no room for it now. The next run that needs it makes room."}
    panel.part("restore").click()
    expect(panel.part("refusal")).to_have_text(stand.refusal["error"])
    expect(panel.part("restore")).to_have_text("Restore")
    group = states.group()["id"]
    assert stand.posted == [{"action": "park", "group": group}, {"action": "restore", "group": group}]
    expect(panel.part("refusal")).to_be_hidden(timeout=12_000)


@slow
def test_stop_asks_only_while_a_run_is_on(stage: Stage) -> None:
    panel, stand = stage.open_with_stand(PHASES["sampling"].answer)
    panel.open()
    panel.part("stop").click()
    question = panel.editor.dialog
    expect(question).to_contain_text("Stop this group?")
    expect(question).to_contain_text("The run on it ends with an error.")
    # Newer frontends' buttons have an icon of a font before the word, which counts as a letter.
    question.get_by_role("button", name=re.compile("Cancel$")).click()
    expect(question).to_have_count(0)
    assert stand.posted == []
    panel.part("stop").click()
    question.get_by_role("button", name=re.compile("Confirm$")).click()
    expect(question).to_have_count(0)
    panel.page.wait_for_timeout(500)
    assert [one["action"] for one in stand.posted] == ["stop"]
    show(panel, stand, PHASES["parked"])
    panel.part("stop").click()
    panel.page.wait_for_timeout(500)
    expect(question).to_have_count(0)
    assert [one["action"] for one in stand.posted] == ["stop", "stop"]


@slow
def test_what_may_not_be_pressed_stays_within_reach_and_says_why(stage: Stage) -> None:
    panel, stand = stage.open_with_stand(PHASES["sampling"].answer)
    panel.open()
    park = panel.part("park")
    expect(park).to_have_attribute("aria-disabled", "true")
    expect(park).to_have_attribute("title", re.compile("run"))
    park.focus()
    expect(park).to_be_focused()
    for key in ("Enter", "Space"):
        panel.page.keyboard.press(key)
    panel.page.wait_for_timeout(500)
    assert stand.posted == []


# ---- updates


@slow
def test_keyboard_focus_stays_over_a_hundred_updates_that_add_nothing(stage: Stage) -> None:
    """Of story 8; and what an update costs: less than a millisecond."""
    steps = 100
    panel, stand = stage.open_with_stand(states.state(states.sampling(1, steps)))
    panel.open()
    expect(panel.state).to_have_text(f"Sampling step 1 of {steps}")
    panel.part("stop").focus()
    panel.watch_nodes()
    panel.follow()
    (module,) = {address for address in panel.heard.files if "/panel.mjs" in address}
    panel.page.evaluate(TIME_UPDATES, module)
    for step in range(2, steps + 1):
        stand.show(states.state(states.sampling(step, steps)))
        expect(panel.state).to_have_text(f"Sampling step {step} of {steps}")
    assert panel.keeps_focus()
    assert panel.added() == []
    assert [one["text"] for one in panel.shown()["said"]] == ["Sampling"]
    costs = sorted(panel.page.evaluate("window.updates"))
    assert len(costs) >= steps - 1
    median = costs[len(costs) // 2]
    print(f"an update: median {median:.2f} ms, longest {costs[-1]:.2f} ms")
    assert median < 1


@slow
def test_an_older_answer_and_another_version_do_no_harm(stage: Stage) -> None:
    panel, stand = stage.open_with_stand(PHASES["idle"].answer)
    panel.open()
    stand.show(states.state(states.sampling(5)))
    expect(panel.state).to_have_text("Sampling step 5 of 20")
    event = {"api": 1, "version": states.version(), "server": states.SERVER}
    stand.send("sharded.state", {**event, "seq": 3, "groups": []})
    panel.page.wait_for_timeout(300)
    expect(panel.state).to_have_text("Sampling step 5 of 20")
    # What a page of another time would get: shown as what it is, by whatever way it comes.
    for changes in ({"api": 0}, {"api": 2}, {"version": "99.0"}):
        stand.show({**states.state(states.group()), **changes})
        expect(panel.card("mismatch")).to_be_visible()
        expect(panel.part("reload")).to_be_visible()
        stand.show(PHASES["idle"].answer)
        expect(panel.card("idle")).to_be_visible()
    shown = panel.toasts.count()  # ComfyUI may have something to say too
    for strange in ({}, {"api": 0}, {"api": 2, "seq": 10_000, "groups": "none"}):
        stand.send("sharded.state", strange)
        stand.send("sharded.incident", strange)
    panel.page.wait_for_timeout(300)
    assert panel.toasts.count() <= shown


@slow
def test_names_are_text_whatever_is_in_them(stage: Stage) -> None:
    group = states.group(
        "loading",
        slot=f"{NASTY}-1a2b3c4d",
        slots=[states.slot(f"{NASTY}-1a2b3c4d")],
        ranks=[states.rank(number, label=f"GPU {number} {NASTY}") for number in range(2)],
    )
    cards = [
        states.device(0, label=f"GPU 0 {NASTY}", others=[{"name": NASTY, "bytes": 5}]),
        states.device(1),
    ]
    told = states.incident("died", rank=1, device=f"GPU 1 {NASTY}", title=NASTY, text=NASTY, detail=NASTY)
    panel, stand = stage.open_with_stand(states.state(group, devices=cards))
    panel.open()
    panel.make_room()
    panel.set_width(230)
    panel.unfold()
    expect(panel.state).to_contain_text(NASTY)
    expect(panel.part("gpu-0")).to_contain_text(NASTY)
    expect(panel.part("slot-0")).to_contain_text(NASTY)
    wrong = overflow(panel.root)
    stand.show(states.state(states.broken(), devices=cards, incidents=[told]))
    stand.tell(told)
    expect(panel.part("incident")).to_contain_text(NASTY)
    message = panel.toasts.filter(has_text="onerror=")
    expect(message).to_contain_text(NASTY)
    assert panel.root.locator("b, img, script").count() == 0
    assert message.locator("b, img, script").count() == 0
    assert wrong + overflow(panel.root) == []
    panel.shoot(f"panel-{stage.setting}", "nasty-names")


# ---- messages


@slow
def test_a_problem_is_told_once_and_only_if_wanted(stage: Stage) -> None:
    panel, stand = stage.open_with_stand(PHASES["idle"].answer)
    page = panel.page
    problems: tuple[tuple[str, str, dict[str, Any]], ...] = (
        ("died", "Rank 1 stopped", {"rank": 1, "device": "GPU 1 A", "text": "GPU 1 A died while sampling."}),
        ("layout", "Ran with tensor 4 instead", {"text": "tensor 2 x ulysses 2 did not fit."}),
        ("restarted", "The group was started again", {"rank": 2, "text": "Rank 2 had stopped."}),
        ("action", "Park failed", {"rank": None, "text": "Rank 2 did not answer."}),
    )
    for number, (kind, title, changes) in enumerate(problems):
        told = states.incident(kind, number=10 + number, title=title, **changes)
        stand.tell(told)
        stand.tell(told)
        message = panel.toasts.filter(has_text=title)
        expect(message).to_have_count(1)
        expect(message).to_contain_text(changes["text"])
    expect(panel.badge).to_be_visible()
    panel.open()
    expect(panel.badge).to_have_count(0)
    panel.close()
    shown = panel.toasts.count()
    try:
        page.evaluate(CHOOSE, ["Sharded.Notify.Problems", False])
        stand.tell(states.incident("died", number=7000, rank=3, title="Rank 3 stopped"))
        page.wait_for_timeout(500)
        assert panel.toasts.filter(has_text="Rank 3 stopped").count() == 0 and panel.toasts.count() <= shown
        expect(panel.root).to_have_count(0)
        page.evaluate(CHOOSE, ["Sharded.Panel.OpenOnProblem", True])
        stand.tell(states.incident("died", number=7001, rank=3, title="Rank 3 stopped"))
        expect(panel.root).to_be_visible()
    finally:
        page.evaluate(CHOOSE, ["Sharded.Notify.Problems", True])
        page.evaluate(CHOOSE, ["Sharded.Panel.OpenOnProblem", False])


# ---- what a screen reader is given


@slow
@pytest.mark.parametrize("name", FOR_SCREEN_READERS)
def test_screen_reader_is_given_what_was_recorded(stage: Stage, name: str) -> None:
    """Of story 8. As recorded in aria/<phase>.yml; a missing record is written, and has to be read before it counts."""
    panel, stand = stage.open_with_stand(PHASES["idle"].answer)
    panel.open()
    panel.unfold()
    show(panel, stand, PHASES[name])
    assert axe_violations(panel.root) == []
    record = ARIA / f"{name}.yml"
    if not record.exists():
        record.parent.mkdir(exist_ok=True)
        record.write_text(recorded(panel), encoding="utf-8")
        pytest.fail(f"{record} was missing: written now. Read it, then run this again.")
    expect(panel.root).to_match_aria_snapshot(record.read_text(encoding="utf-8"))


def recorded(panel: Panel) -> str:
    """The panel's tree with every child, so that one more or less is noticed; the version is any."""
    tree = panel.root.aria_snapshot()
    first, _, rest = tree.partition("\n")
    rest = rest.replace(states.version(), r"/\d+\.\d+\.\d+/")
    return f"{first}\n  - /children: deep-equal\n{rest}\n"


# ---- how it looks


@slow
def test_looks_right_everywhere_in_every_palette_and_width(stage: Stage) -> None:
    """Of story 9."""
    panel, stand = stage.open_with_stand(PHASES["idle"].answer)
    panel.open()
    wrong: list[str] = []
    try:
        for palette in PALETTES:
            panel.set_palette(palette)
            for name, width in itertools.product(LOOKED_AT, WIDTHS):
                panel.set_width(width)
                show(panel, stand, PHASES[name])
                panel.unfold()
                for fault in (weak_contrast, overflow, overlaps):
                    wrong += [f"{palette}, {width} px, {name}: {one}" for one in fault(panel.root)]
    finally:
        stage.choose(ColorPalette="dark")
    assert wrong == [], "\n".join(wrong)


@slow
def test_looks_right_everywhere_with_forced_colours_and_less_motion(stage: Stage) -> None:
    """Of story 9."""
    panel, stand = stage.open_with_stand(PHASES["idle"].answer)
    panel.open()
    panel.make_room()
    panel.page.emulate_media(forced_colors="active", reduced_motion="reduce")
    for name in LOOKED_AT:
        show(panel, stand, PHASES[name])
        panel.unfold()
        assert overflow(panel.root) + overlaps(panel.root) == []
        assert panel.root.evaluate("root => root.getAnimations({subtree: true}).length") == 0
        panel.shoot(f"panel-{stage.setting}", f"{name}-forced-colours")
    # The parts of a bar have to differ by more than their colour.
    show(panel, stand, PHASES["idle"])
    drawn = (
        panel.part("gpu-0")
        .get_by_role("img")
        .evaluate(
            "bar => [...bar.children].map(part => JSON.stringify([getComputedStyle(part).backgroundImage,"
            " getComputedStyle(part).borderTopStyle, getComputedStyle(part).backgroundColor]))"
        )
    )
    assert len(set(drawn)) == len(drawn) == 3, drawn


@slow
@pytest.mark.parametrize("language", ["zh", "ja"])
def test_looks_right_everywhere_in_the_language_of_the_page(stage: Stage, language: str) -> None:
    """Of story 9."""
    stage.choose(Locale=language)
    english: list[str] = []
    try:
        panel, stand = stage.open_with_stand(PHASES["idle"].answer)
        panel.open()
        panel.make_room()
        for name, phase in PHASES.items():
            show(panel, stand, phase)
            panel.unfold()
            # What a rank has written to its log is as it wrote it.
            own = [one for one in texts(panel.root) if one != " ".join(states.incident()["detail"].split())]
            english += [f"{name}: {one}" for one in own if TWO_ENGLISH_WORDS.search(NAMES.sub("", one))]
            panel.shoot(f"panel-{stage.setting}", f"{file_name(name)}-{language}")
        show(panel, stand, PHASES["sampling"])
        expect(panel.part("more")).to_contain_text("1.42")
        button = panel.tab_button.get_attribute("aria-label") or ""
        english += [f"tab: {button}"] if TWO_ENGLISH_WORDS.search(NAMES.sub("", button)) else []
    finally:
        stage.choose(Locale="en")
    assert english == [], "\n".join(english)


# ---- beside the panel


@slow
def test_the_layout_line_follows_the_values_and_is_saved_nowhere(stage: Stage) -> None:
    panel, _stand = stage.open_with_stand(states.state())
    page = panel.page
    load_workflow(page, saved_demo(tensor=2, ulysses=2, devices="auto"))
    line = page.get_by_test_id("sharded-node-layout")
    expect(line).to_have_text("tensor 2 x ulysses 2 on GPU 0, 1, 2, 3")
    with panel.requests(5) as asked:
        set_values(page, tensor=4)
        expect(line).to_have_text(re.compile("^4 devices here: 8 ranks do not fit, use "))
        set_values(page, strategy="auto")
        expect(line).to_have_text(re.compile("^auto: .*GPU 0, 1, 2, 3"))
        set_values(page, devices="77")
        expect(line).to_have_text("There is no GPU 77 here.")
        set_values(page, devices="1,3", strategy="prefer tensor")
        expect(line).to_have_text(re.compile("^prefer tensor: .*GPU 1, 3"))
    assert asked == [], "it asks once for the devices, and the panel is closed"
    (node,) = (one for one in saved_workflow(page)["nodes"] if one["type"] == "ShardedParallelConfig")
    assert node["widgets_values"] == ["prefer tensor", 4, 2, 1, 1, 1, "1,3", "auto"]
    (config,) = (one for one in queued_prompt(page).values() if one["class_type"] == "ShardedParallelConfig")
    names = {"strategy", "tensor", "ulysses", "ring", "stage", "replica", "devices", "attention"}
    assert set(config["inputs"]) == names
    panel.editor.screenshot(f"layout-line-{stage.setting}")


def set_values(page: Page, **values: Any) -> None:
    """Change values of the Parallel Config, as the editor's own inputs do."""
    page.evaluate(
        """values => {
            const [node] = app.graph.findNodesByType('ShardedParallelConfig')
            for (const [name, value] of Object.entries(values)) {
                const widget = node.widgets.find(one => one.name === name)
                widget.value = value
                widget.callback?.(value)
            }
        }""",
        values,
    )


@slow
def test_commands_have_names_and_no_keys(stage: Stage) -> None:
    panel, stand = stage.open_with_stand(PHASES["idle"].answer)
    commands = {one["id"]: one for one in panel.page.evaluate(COMMANDS)}
    assert set(commands) == {f"Sharded.{name}" for name in ("Park", "Restore", "Stop", "CopyDiagnostics")}
    assert all(one["label"] for one in commands.values())
    assert not [one["id"] for one in commands.values() if one["bound"]]
    execute = "id => app.extensionManager.command.execute(id)"
    panel.page.evaluate(execute, "Sharded.Park")
    panel.page.wait_for_timeout(500)
    assert [one["action"] for one in stand.posted] == ["park"]
    panel.page.evaluate(execute, "Sharded.CopyDiagnostics")
    panel.page.wait_for_timeout(500)
    copied = panel.clipboard()
    assert "ComfyUI-Sharded" in copied and "RTX 3090" in copied
    assert str(Path.home()) not in copied


@slow
def test_the_help_of_the_panel_opens(stage: Stage) -> None:
    panel, _stand = stage.open_with_stand(PHASES["idle"].answer)
    panel.open()
    panel.part("help").click()
    page = panel.part("dialog")
    expect(page).to_be_visible()
    expect(page).to_contain_text("Park")
    if stage.setting.frontend == page_parts.NEWEST_FRONTEND:
        expect(page.get_by_role("heading").first).to_be_visible()
    panel.editor.screenshot(f"panel-help-{stage.setting}")
    panel.page.keyboard.press("Escape")
    expect(page).to_be_hidden()
