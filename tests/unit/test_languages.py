"""The pack in English, Chinese and Japanese: nothing is missing, and nothing is left in English but names.

English texts of nodes come from their schemas (`python -m tools.locales`); everything else is written in locales/ and
in web/docs. The panel's own words are with the page, see web/.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.test_house import node_ids
from tools import ROOT

ENGLISH, OTHERS = "en", ("zh", "ja")
LANGUAGES = (ENGLISH, *OTHERS)
FILES = ("commands", "main", "nodeDefs", "settings")
# Names: of the pack, of types, and of what has no other name in the field.
NAMES = {"Sharded", "dtype", "tensor", "ulysses", "ring", "stage", "replica", "Latent"}
NATIVE = {"zh": re.compile(r"[\u4e00-\u9fff]"), "ja": re.compile(r"[\u3040-\u30ff\u4e00-\u9fff]")}
KANA = re.compile(r"[\u3040-\u30ff]")
# What a translation keeps as it is: names with a dot, an underscore or a slash, numbers, names of layouts.
KEPT = re.compile(r"[\w.-]*(?:[_/]|\w\.\w)[\w./-]*\w|\b\d[\d,]*\b|\b(?:auto|manual|cpu|ulysses|ring)\b")
MESSAGE_SYNTAX = re.compile(
    r"[{}@|]"
)  # ComfyUI compiles texts: these would be read as places, links and plurals
PLACE = re.compile(r"^```\w*\n.*?^```$", re.DOTALL | re.MULTILINE)
PICTURE = re.compile(r"!\[[^\]]+\]\(([^)]+)\)")
DOCS = ROOT / "web" / "docs"
PAGES = sorted(page.stem for page in DOCS.glob("*.md"))


def texts(language: str, name: str) -> dict[str, str]:
    """A file of locales/, flat: path of keys -> text."""
    return dict(_flat("", json.loads((ROOT / "locales" / language / f"{name}.json").read_text("utf-8"))))


def _flat(path: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for key, one in value.items():
            yield from _flat(f"{path}/{key}", one)
    else:
        yield path, value


# ---- locales/


@pytest.mark.parametrize("language", OTHERS)
@pytest.mark.parametrize("name", FILES)
def test_every_text_is_there_in_every_language(language: str, name: str) -> None:
    assert list(texts(language, name)) == list(texts(ENGLISH, name))


@pytest.mark.parametrize("language", OTHERS)
@pytest.mark.parametrize("name", FILES)
def test_nothing_is_left_in_english_but_names(language: str, name: str) -> None:
    left = {
        key: text
        for key, text in texts(language, name).items()
        if not NATIVE[language].search(text) and text not in NAMES
    }
    assert not left


def test_chinese_is_not_japanese() -> None:
    for name in FILES:
        assert not [text for text in texts("zh", name).values() if KANA.search(text)]


@pytest.mark.parametrize("language", OTHERS)
@pytest.mark.parametrize("name", FILES)
def test_numbers_and_names_are_the_same_in_every_language(language: str, name: str) -> None:
    translated = texts(language, name)
    for key, text in texts(ENGLISH, name).items():
        if key.startswith("/dataTypes/") or key.endswith("/name") and name == "nodeDefs":
            continue  # identifiers, which have words of their own
        missing = [kept for kept in KEPT.findall(text) if kept not in translated[key]]
        assert not missing, f"{key}: {translated[key]}"


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("name", FILES)
def test_comfyui_reads_every_text_as_it_is(language: str, name: str) -> None:
    assert not {key: text for key, text in texts(language, name).items() if MESSAGE_SYNTAX.search(text)}


def test_no_two_nodes_have_the_same_name() -> None:
    for language in LANGUAGES:
        names = [text for key, text in texts(language, "nodeDefs").items() if key.endswith("/display_name")]
        assert len(set(names)) == len(names) == len(node_ids())


# ---- help pages


def page_in(name: str, language: str) -> str:
    path = DOCS / f"{name}.md" if language == ENGLISH else DOCS / name / f"{language}.md"
    return path.read_text(encoding="utf-8")


def shape(page: str) -> list[str]:
    """What a translation keeps: the levels of its headings, its rows, its pictures and its examples."""
    examples = PLACE.findall(page)
    rest = PLACE.sub("", page)
    marks = [line.split(" ")[0] for line in rest.splitlines() if line.startswith(("#", "|"))]
    rows = [mark if mark.startswith("#") else "|" for mark in marks]
    return [*rows, *PICTURE.findall(rest), *examples]


@pytest.mark.parametrize("language", OTHERS)
@pytest.mark.parametrize("name", PAGES)
def test_a_help_page_says_the_same_in_every_language(name: str, language: str) -> None:
    assert shape(page_in(name, language)) == shape(page_in(name, ENGLISH))


@pytest.mark.parametrize("language", OTHERS)
@pytest.mark.parametrize("name", PAGES)
def test_no_sentence_of_a_help_page_is_left_in_english(name: str, language: str) -> None:
    prose = re.sub(r"`[^`\n]*`", "", PLACE.sub("", page_in(name, language)))
    lines = [line.strip("|-#> *") for line in prose.splitlines() if not PICTURE.search(line)]
    left = [line for line in lines if re.search(r"[a-z]{2,} [a-z]{2,} [a-z]{2,}", line)]
    # The doctor's report is in English: the page names its parts as they stand in it.
    parts = ("How the cards", "Exchanges between", "The demo model", "What to know", "What went wrong")
    assert not [line for line in left if not any(part in line for part in parts)]


@pytest.mark.parametrize("language", OTHERS)
@pytest.mark.parametrize("name", PAGES)
def test_emphasis_ends_where_it_should(name: str, language: str) -> None:
    """Behind punctuation and before a letter, ** and * end nothing, and are shown as they are (CommonMark 6.2)."""
    prose = re.sub(r"`[^`\n]*`", "x", PLACE.sub("", page_in(name, language)))
    for line in prose.splitlines():
        marks = list(re.finditer(r"\*+", line))
        assert len(marks) % 2 == 0, line
        for end in marks[1::2]:
            before, behind = line[end.start() - 1], line[end.end() :][:1]
            assert before.isalnum() or not behind.isalnum(), line


@pytest.mark.parametrize("name", PAGES)
def test_every_help_page_has_its_picture(name: str) -> None:
    pictures = PICTURE.findall(page_in(name, ENGLISH))
    assert pictures
    missing = [picture for picture in pictures if not (DOCS / picture).is_file()]
    assert not missing, "make them: python -m tests.browser.pictures"


def test_every_translated_page_has_an_english_one() -> None:
    folders = sorted(path.name for path in DOCS.iterdir() if path.is_dir())
    assert folders == PAGES
    for folder in folders:
        assert sorted(path.name for path in (DOCS / folder).iterdir()) == ["ja.md", "zh.md"]


# ---- the panel's own words


def panel_words() -> dict[str, list[str]]:
    """Key -> the text in each language."""
    return dict(json.loads((ROOT / "web" / "strings.json").read_text("utf-8")))


def test_the_panel_has_each_text_in_every_language_with_the_same_figures() -> None:
    for key, said in panel_words().items():
        assert len(said) == len(LANGUAGES), key
        figures = [sorted(set(re.findall(r"\{(\w+)\}", text))) for text in said]
        assert figures[1:] == figures[:-1], key


@pytest.mark.parametrize("key", ["park", "restore", "stop", "copy_all", "examples", "reload", "details"])
def test_the_help_page_calls_buttons_as_the_panel_does(key: str) -> None:
    for language, text in zip(LANGUAGES, panel_words()[key], strict=True):
        assert text in page_in("GroupPanel", language)


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_help_page_quotes_lines_as_the_panel_says_them(language: str) -> None:
    """In the table of its second section; some rows name several lines."""
    column = LANGUAGES.index(language)
    table = [row for row in page_in("GroupPanel", language).split("\n## ")[2].splitlines() if row[:1] == "|"]
    said = "|".join(re.sub(r"\\{\w+\\}", ".+", re.escape(one[column])) for one in panel_words().values())
    quoted = [row.split("|")[1].strip() for row in table[2:]]
    lines = [
        line for one in quoted for line in ([one] if re.fullmatch(said, one) else re.split(", |、", one))
    ]
    assert len(lines) > 15
    assert not [line for line in lines if not re.fullmatch(said, line)]


# ---- what the page declares


def declared(kind: str) -> set[str]:
    """The ids of the settings or commands in locales/en, as the page writes them: Sharded.Group.ParkAfter."""
    english = json.loads((ROOT / "locales" / ENGLISH / f"{kind}.json").read_text("utf-8"))
    return {key.replace("_", ".") for key in english}


@pytest.mark.parametrize("kind", ["settings", "commands"])
def test_every_setting_and_command_of_the_page_has_its_texts(kind: str) -> None:
    page = "\n".join(path.read_text("utf-8") for path in sorted(Path(ROOT / "web").glob("*.*")))
    assert all(f'"{one}"' in page for one in declared(kind)), "of texts that nothing shows"
    settings = (
        r'"(Sharded\.\w+\.\w+)"' if kind == "settings" else r'"(Sharded\.(?:Park|Restore|Stop|Copy\w*))"'
    )
    assert set(re.findall(settings, page)) <= declared(kind)
