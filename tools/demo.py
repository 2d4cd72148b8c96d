"""`make demo`: a real ComfyUI server runs shipped workflows, and their pictures land in demo_output/.

By default two that ask for the same picture: one through the pipeline nodes, one through ComfyUI's own sampler. Ends
with 0 only if the pictures are there, both latents agree, and nothing that the server started is left.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools import ROOT, comfy_source, latents, workflow
from tools.base_directory import BaseDirectory
from tools.client import ComfyClient, Event, PromptError, Run
from tools.comfy import Server, ServerError

# The same picture twice: by diffusers' loop in the ranks, and by ComfyUI's sampler in front of them.
PIPELINE_NODES = ROOT / "workflows" / "flux_prefer_tensor.json"
STOCK_NODES = ROOT / "workflows" / "flux_stock_ksampler.json"
MOST_APART = 1e-3  # max_rel of their latents, float32
OUTPUT = ROOT / "demo_output"
PROMPT_SECONDS = 300.0


@dataclass(frozen=True)
class Done:
    """A workflow that has run: its pictures here, the seconds of each node, and the latent if it was asked for."""

    stem: str
    pictures: list[Path]
    seconds: dict[str, float]
    latent: Any = None


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
    parser.add_argument("workflow", nargs="?", type=Path, help="run this one only")
    one = parser.parse_args().workflow
    paths = [one] if one else [PIPELINE_NODES, STOCK_NODES]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    began = time.monotonic()
    try:
        with tempfile.TemporaryDirectory(prefix="comfyui-base-") as folder:
            server = Server(BaseDirectory.create(Path(folder)), arguments=["--preview-method", "latent2rgb"])
            version = comfy_source.version(comfy_source.obtain())
            print(f"starting ComfyUI {version} ...", flush=True)
            with server:
                print(f"{server.url} is up", flush=True)
                done = [_run(server, path, compare=len(paths) > 1) for path in paths]
                held = len(server.offspring())
    except (
        comfy_source.SourceError,
        latents.LatentError,
        OSError,
        PromptError,
        ServerError,
        workflow.WorkflowError,
    ) as error:
        print(f"demo failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("demo: stopped", file=sys.stderr)
        return 130
    agree = len(done) == 1 or _compare(*done)
    gone = _report(done, server, time.monotonic() - began, held)
    return 0 if agree and gone else 1


def _run(server: Server, path: Path, *, compare: bool) -> Done:
    """Queue the very file that ComfyUI lists as a template, and fetch its pictures as a client would.

    To be compared, its latent is saved as well.
    """
    print(f"running {path.name}", flush=True)
    with ComfyClient(server.url) as client:
        api = workflow.to_api(workflow.load(path), client.object_info)
        if compare:
            api = latents.save_too(api)
        progress = Progress(workflow.titles(api))
        try:
            run = client.run(api, PROMPT_SECONDS, progress)
        except PromptError:
            print(server.log_tail(40), file=sys.stderr)
            raise
        pictures = _save(client, run, path.stem)
    latent = latents.saved(run, server.base.output) if compare else None
    return Done(path.stem, pictures, progress.seconds, latent)


def _save(client: ComfyClient, run: Run, stem: str) -> list[Path]:
    if not run.images:
        raise PromptError("the workflow succeeded, but saved no picture")
    OUTPUT.mkdir(exist_ok=True)
    pictures = []
    for index, image in enumerate(run.images):
        picture = OUTPUT / (f"{stem}.png" if index == 0 else f"{stem}_{index}.png")
        picture.write_bytes(client.get_image(image.filename, image.subfolder, image.type))
        pictures.append(picture)
    return pictures


def _compare(first: Done, second: Done) -> bool:
    """Say how far the latents are apart, and whether that is rounding."""
    apart = latents.max_rel(second.latent, first.latent)
    agree = apart <= MOST_APART
    print(
        f"latents of {first.stem} and {second.stem}: max_rel {apart:.1e} ({MOST_APART:.0e} allowed)",
        file=sys.stdout if agree else sys.stderr,
    )
    return agree


def _report(done: list[Done], server: Server, total: float, held: int) -> bool:
    """Print times and files; whether every process that the server had started is gone."""
    stages = {"server start": server.start_seconds}
    for one in done:
        stages |= {f"{one.stem}: {title}": seconds for title, seconds in one.seconds.items()}
    for stage, seconds in {**stages, "everything": total}.items():
        print(f"{seconds:7.2f} s  {stage}")
    for picture in (picture for one in done for picture in one.pictures):
        print(f"wrote {picture.relative_to(ROOT)} ({picture.stat().st_size} bytes)")
    if server.left_behind:
        print("these processes outlived the server:", *server.left_behind, sep="\n  ", file=sys.stderr)
        return False
    print(f"server stopped; all {held} processes it had started are gone")
    return True


if __name__ == "__main__":
    sys.exit(main())
