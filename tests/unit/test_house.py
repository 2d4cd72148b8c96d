"""The rules of the house as tests: which room may import which, what no code may contain, what every node must have."""

from __future__ import annotations

import ast
import json
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.support.source import dotted, imports, sources
from tools import ROOT

PACK = ("", "nodes", "runtime")
COMFY = (
    "comfy",
    "comfy_execution",
    "comfy_extras",
    "execution",
    "folder_paths",
    "latent_preview",
    "node_helpers",
    "server",
)
HEAVY = ("diffusers", "torch.distributed", "transformers")
SEAM = ("nodes/comfy_host.py", "nodes/native/")
SCHEMA_RECORD = ROOT / "tests" / "unit" / "node_schema.json"


def none_of(offences: Iterable[object]) -> None:
    listed = sorted(map(str, offences))
    assert not listed, "\n" + "\n".join(listed)


# ---- which room may import which


def test_the_runtime_never_imports_comfyui() -> None:
    none_of(one for one in imports("runtime") if one.within(*COMFY, "comfy_api", "nodes"))


def test_the_nodes_never_import_what_belongs_in_a_rank() -> None:
    none_of(one for one in imports("", "nodes") if one.within(*HEAVY))


def test_the_nodes_know_three_modules_of_the_runtime() -> None:
    allowed = ("runtime.spec", "runtime.group", "runtime.planner")
    none_of(one for one in imports("", "nodes") if one.within("runtime") and not one.within(*allowed))


def test_only_the_seam_touches_comfyuis_internals() -> None:
    """Node files need comfy_api for their schema; everything else of ComfyUI changes between releases."""
    none_of(one for one in imports(*PACK) if one.within(*COMFY) and not one.file.startswith(SEAM))


def test_only_the_worker_imports_the_engine() -> None:
    outside = (one for one in imports(*PACK) if not one.file.startswith("runtime/engine/"))
    none_of(one for one in outside if one.within("runtime.engine") and one.file != "runtime/worker.py")


def test_the_engine_knows_only_the_vocabulary() -> None:
    allowed = ("runtime.engine", "runtime.spec", "runtime.environment", "runtime.plan_text")
    # What both sides read of files, without torch.
    allowed += ("runtime.safetensors_header", "runtime.recognise", "runtime.foreign", "runtime.families")
    allowed += ("runtime.component", "runtime.quantisation", "runtime.attention_backends")
    allowed += ("runtime.host_memory",)
    none_of(one for one in imports("runtime/engine") if one.within("runtime") and not one.within(*allowed))


def test_the_hosts_half_never_imports_what_belongs_in_a_rank() -> None:
    rank = ("runtime/engine/", "runtime/worker.py", "runtime/agent.py")
    none_of(one for one in imports("runtime") if one.within(*HEAVY) and not one.file.startswith(rank))


def test_neither_room_imports_the_developers_tools() -> None:
    none_of(one for one in imports(*PACK) if one.within("tools", "tests", "demo_model"))


# ---- what only one module may do

STARTS_A_PROCESS = re.compile(
    r"os\.(system|popen|fork|forkpty|exec\w+|spawn\w+|posix_spawnp?)|asyncio\.create_subprocess_\w+"
)
ENVIRONMENT = re.compile(r"os\.(environ|environb|getenv|putenv|unsetenv)\b")


def _uses(pattern: re.Pattern[str], home: str) -> list[str]:
    return [
        f"{source.file}:{getattr(node, 'lineno', 0)} uses {dotted(node)}"
        for source in sources(*PACK)
        if source.file != home
        for node in source.walk()
        if isinstance(node, ast.Attribute | ast.Name) and pattern.fullmatch(dotted(node))
    ]


def test_a_system_clock_that_jumps_changes_nothing() -> None:
    """All limits are on the monotonic clock; the route alone says what time it is."""
    assert not _uses(re.compile(r"time\.time(_ns)?|datetime\.datetime\.\w+"), "nodes/routes.py")


def test_only_launch_starts_processes() -> None:
    home = "runtime/launch.py"
    starters = (
        "subprocess",
        "multiprocessing",
        "concurrent.futures.ProcessPoolExecutor",
        "torch.multiprocessing",
        "pty",
    )
    harmless = ("multiprocessing.shared_memory", "multiprocessing.resource_tracker")
    found = [
        one
        for one in imports(*PACK)
        if one.within(*starters) and not one.within(*harmless) and one.file != home
    ]
    none_of([*found, *_uses(STARTS_A_PROCESS, home)])


def test_only_environment_reads_the_environment() -> None:
    names = {"environ", "environb", "getenv", "putenv"}
    found = [
        f"{source.file}:{node.lineno} imports {alias.name} from os"
        for source in sources(*PACK)
        for node in source.walk()
        if isinstance(node, ast.ImportFrom) and node.module == "os"
        for alias in node.names
        if alias.name in names and source.file != "runtime/environment.py"
    ]
    none_of([*found, *_uses(ENVIRONMENT, "runtime/environment.py")])


# ---- nothing on the wire or on disk can execute

FORBIDDEN_MODULES = ("cloudpickle", "dill", "joblib", "marshal", "pickle", "runpy", "shelve")
FORBIDDEN_BUILTINS = ("__import__", "compile", "eval", "exec")
FORBIDDEN_CALLS = ("importlib.import_module", "import_module", "torch.load", "torch.save")
# torch.distributed's collectives over Python objects pickle them.
OBJECT_COLLECTIVES = (
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "recv_object_list",
    "scatter_object_list",
    "send_object_list",
)


def _executes(node: ast.AST) -> str:
    """What is wrong with a node of the syntax tree, or ''."""
    if isinstance(node, ast.Call):
        name = dotted(node.func)
        if name in FORBIDDEN_BUILTINS or name in FORBIDDEN_CALLS or name.split(".")[-1] in OBJECT_COLLECTIVES:
            return f"calls {name}"
        if any(keyword.arg == "trust_remote_code" for keyword in node.keywords):
            return "passes trust_remote_code"
    if isinstance(node, ast.Constant) and node.value == "trust_remote_code":
        return "names trust_remote_code"
    return ""


def test_nothing_is_unpickled_evaluated_or_imported_by_name() -> None:
    found = [
        f"{source.file}:{getattr(node, 'lineno', 0)} {wrong}"
        for source in sources(*PACK)
        for node in source.walk()
        if (wrong := _executes(node))
    ]
    none_of([*found, *(one for one in imports(*PACK) if one.within(*FORBIDDEN_MODULES))])


# ---- every file and every node is complete


def test_every_module_opens_with_its_subject() -> None:
    none_of(
        source.file
        for source in sources("", "nodes", "runtime", "tools", "demo_model", "tests")
        if source.tree.body and not ast.get_docstring(source.tree)
    )


def node_ids() -> list[str]:
    """From the recorded schema where there is one, else from the `io.Schema(node_id=...)` calls in nodes/."""
    if SCHEMA_RECORD.is_file():
        return sorted(json.loads(SCHEMA_RECORD.read_text(encoding="utf-8")))
    return sorted(
        keyword.value.value
        for source in sources("nodes")
        for node in source.walk()
        if isinstance(node, ast.Call) and dotted(node.func).split(".")[-1] == "Schema"
        for keyword in node.keywords
        if keyword.arg == "node_id" and isinstance(keyword.value, ast.Constant)
    )


def test_there_are_nodes() -> None:
    assert node_ids()


def test_every_node_has_its_texts() -> None:
    texts = json.loads((ROOT / "locales" / "en" / "nodeDefs.json").read_text(encoding="utf-8"))
    assert sorted(texts) == node_ids()


def test_every_node_has_a_help_page() -> None:
    pages = {path.stem for path in (ROOT / "web" / "docs").glob("*.md")}
    pages |= {path.parent.name for path in (ROOT / "web" / "docs").glob("*/en.md")}
    assert sorted(pages) == sorted([*node_ids(), "GroupPanel"])


def test_every_shipped_workflow_has_its_picture() -> None:
    """ComfyUI lists workflows/*.json as templates, with the .jpg of the same name as the thumbnail."""
    stems = {path.stem for path in (ROOT / "workflows").glob("*.json")}
    assert stems
    assert {path.stem for path in (ROOT / "workflows").glob("*.jpg")} == stems


# ---- what is published


def test_the_registry_and_the_manager_install_the_same() -> None:
    """ComfyUI-Manager reads requirements.txt, the registry pyproject.toml: the second must point at the first."""
    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert re.search(r'^dynamic = \["dependencies"\]$', pyproject, re.MULTILINE)
    assert re.search(r'^dependencies = \{ file = \["requirements.txt"\] \}$', pyproject, re.MULTILINE)
    assert len(re.findall(r"^dependencies\s*=", pyproject, re.MULTILINE)) == 1


def test_requirements_suit_the_manager() -> None:
    """It reads line by line, knows no -r, and leaves the torch family alone."""
    text = (ROOT / "requirements.txt").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    none_of(line for line in lines if not re.fullmatch(r"[A-Za-z0-9._-]+([<>=!~]=?[A-Za-z0-9.*]+,?)*", line))
    none_of(line for line in lines if re.match(r"torch(vision|audio|sde)?\b", line))


def _published_files() -> list[Path]:
    """What git has, or would have after `git add`."""
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("this is no git checkout")
    return [path for name in done.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def test_no_file_names_this_machine_or_a_package_host() -> None:
    folders = "|".join(["work", "root"])
    hosts = [
        ("pypi", "org"),
        ("files", "pythonhosted", "org"),
        ("registry", "npmjs", "org"),
        ("deb", "debian", "org"),
    ]
    # In pieces, or this file would be the first to offend.
    pattern = re.compile(
        rf"(?<![\w./-])/(?:{folders})/|/tmp/{'horde'}|" + "|".join(r"\.".join(host) for host in hosts)
    )
    found = []
    for path in _published_files():
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError:
            continue  # a picture or weights
        found += [
            f"{path.relative_to(ROOT)}:{number} {line.strip()[:100]}"
            for number, line in enumerate(lines, 1)
            if pattern.search(line)
        ]
    none_of(found)


def test_the_test_tree_is_no_package() -> None:
    """With an __init__.py in tests/, pytest takes the root for a package and imports the pack outside ComfyUI."""
    assert not (ROOT / "tests" / "__init__.py").exists()
