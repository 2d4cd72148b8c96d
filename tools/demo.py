"""`make demo`: a real ComfyUI server runs a shipped workflow, and the picture lands in demo_output/.

Ends with 0 only if the picture is there and nothing that the server started is left.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from pathlib import Path

from tools import ROOT, comfy_source, workflow
from tools.base_directory import BaseDirectory
from tools.client import ComfyClient, Event, PromptError, Run
from tools.comfy import Server, ServerError

DEFAULT_WORKFLOW = ROOT / "workflows" / "flux_prefer_tensor.json"
OUTPUT = ROOT / "demo_output"
PROMPT_SECONDS = 300.0


class Progress:
    """Prints one line per node and step as the events arrive, and keeps how long each node took."""

    def __init__(self, titles: dict[str, str]) -> None:
        self.seconds: dict[str, float] = {}
        self._titles = titles
        self._node: str | None = None
        self._since = 0.0

    def __call__(self, event: Event) -> None:
        if event.kind == "executing":
            self._leave(event.at)
            self._node, self._since = event.data.get("node"), event.at
            if self._node:
                print(f"  {self._title(self._node)}", flush=True)
        elif event.kind == "progress":
            self._say(str(event.data["node"]), _counted(event.data["value"], event.data["max"]))
        elif event.kind == "text":
            self._say(event.data["node"], event.data["text"])
        elif event.kind.startswith("execution_") and event.kind not in (
            "execution_start",
            "execution_cached",
        ):
            self._leave(event.at)
            self._node = None

    def _say(self, node: str, text: str) -> None:
        print(f"  {self._title(node)}: {text}", flush=True)

    def _leave(self, now: float) -> None:
        if self._node:
            title = self._title(self._node)
            self.seconds[title] = self.seconds.get(title, 0.0) + now - self._since

    def _title(self, node: str) -> str:
        return self._titles.get(node, f"node {node}")


def _counted(value: float, total: float) -> str:
    """Steps as they are; large numbers are bytes, and better read in percent."""
    return f"{value:g} of {total:g}" if total < 10_000 else f"{value / total:.0%}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workflow", nargs="?", type=Path, default=DEFAULT_WORKFLOW)
    path = parser.parse_args().workflow
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    began = time.monotonic()
    try:
        with tempfile.TemporaryDirectory(prefix="comfyui-base-") as folder:
            server = Server(BaseDirectory.create(Path(folder)), arguments=["--preview-method", "latent2rgb"])
            version = comfy_source.version(comfy_source.obtain())
            print(f"starting ComfyUI {version} ...", flush=True)
            with server:
                run, stages = _run(server, path)
                pictures = _save(server, run, path.stem)
                held = len(server.offspring())
            stages = {"server start": server.start_seconds, **stages}
    except (comfy_source.SourceError, ServerError, PromptError, workflow.WorkflowError, OSError) as error:
        print(f"demo failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("demo: stopped", file=sys.stderr)
        return 130
    return _report(pictures, stages, time.monotonic() - began, held, server.left_behind)


def _run(server: Server, path: Path) -> tuple[Run, dict[str, float]]:
    """Queue the very file that ComfyUI lists as a template; return the run and the seconds of each node."""
    print(f"{server.url} is up; running {path.name}", flush=True)
    with ComfyClient(server.url) as client:
        api = workflow.to_api(workflow.load(path), client.object_info)
        progress = Progress(workflow.titles(api))
        try:
            run = client.run(api, PROMPT_SECONDS, progress)
        except PromptError:
            print(server.log_tail(40), file=sys.stderr)
            raise
    return run, progress.seconds


def _save(server: Server, run: Run, stem: str) -> list[Path]:
    """Fetch the pictures as a client would, before the server and its folders go."""
    if not run.images:
        raise PromptError("the workflow succeeded, but saved no picture")
    OUTPUT.mkdir(exist_ok=True)
    pictures = []
    with ComfyClient(server.url) as client:
        for index, image in enumerate(run.images):
            picture = OUTPUT / (f"{stem}.png" if index == 0 else f"{stem}_{index}.png")
            picture.write_bytes(client.get_image(image.filename, image.subfolder, image.type))
            pictures.append(picture)
    return pictures


def _report(
    pictures: list[Path], stages: dict[str, float], total: float, held: int, left_behind: list[str]
) -> int:
    for stage, seconds in {**stages, "everything": total}.items():
        print(f"{seconds:7.2f} s  {stage}")
    for picture in pictures:
        print(f"wrote {picture.relative_to(ROOT)} ({picture.stat().st_size} bytes)")
    if left_behind:
        print("these processes outlived the server:", *left_behind, sep="\n  ", file=sys.stderr)
        return 1
    print(f"server stopped; all {held} processes it had started are gone")
    return 0


if __name__ == "__main__":
    sys.exit(main())
