"""The pictures the demo model learns from, the words that describe them, and the judge of its results.

Every picture is one coloured shape on a coloured background. Because a picture is fully described by three
words, a machine can tell whether the model painted what was asked: see `Judge`.
"""

import functools
import itertools
import math
import random
import re
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw

SIDE = 96
OVERSAMPLING = 4

COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (225, 45, 45),
    "yellow": (250, 210, 50),
    "green": (35, 150, 70),
    "blue": (40, 85, 225),
    "purple": (160, 50, 190),
    "white": (245, 245, 245),
    "black": (25, 25, 25),
}
SHAPES = ("circle", "square", "triangle", "diamond", "star")

GRAMMAR = re.compile(r"^(?:an? )?(\w+) (\w+) on (?:an? )?(\w+)(?: background)?\.?$")


@dataclass(frozen=True)
class Variation:
    """How much shapes differ in place and size, in pixels: `shift` either way, and a range of radii."""

    shift: float
    radii: tuple[float, float]


# The autoencoder learns from the wide variation, to draw an outline anywhere; the transformer from the mild
# one, which it learns to paint crisply in far fewer steps.
WIDE = Variation(shift=5.0, radii=(27.0, 32.0))
MILD = Variation(shift=2.5, radii=(28.0, 31.5))


@dataclass(frozen=True)
class Scene:
    """What a picture shows: a shape of one colour on a background of another."""

    colour: str
    shape: str
    background: str

    @property
    def prompt(self) -> str:
        """The plainest sentence that describes the scene."""
        return f"a {self.colour} {self.shape} on {self.background}"


def all_scenes() -> list[Scene]:
    """Every scene the vocabulary can describe, always in the same order."""
    combinations = itertools.product(COLOURS, SHAPES, COLOURS)
    return [Scene(*words) for words in combinations if words[0] != words[2]]


def parse_prompt(prompt: str) -> Scene:
    """Read a prompt back into a scene; raise ValueError for anything outside the grammar."""
    match = GRAMMAR.match(prompt.strip().lower())
    if match is None:
        raise ValueError(f"not of the form 'a red circle on blue': {prompt!r}")
    colour, shape, background = match.groups()
    if colour not in COLOURS or background not in COLOURS or shape not in SHAPES:
        raise ValueError(f"unknown colour or shape in {prompt!r}")
    return Scene(colour, shape, background)


def _corners(angles: list[float], radii: list[float], x: float, y: float) -> list[tuple[float, float]]:
    """Turn corners given as angle (clockwise from the top) and distance into picture coordinates."""
    return [(x + r * math.sin(a), y - r * math.cos(a)) for a, r in zip(angles, radii, strict=True)]


def _outline(shape: str, x: float, y: float, radius: float) -> list[tuple[float, float]]:
    """The corners of a shape with straight sides; sizes are chosen so that the areas look alike."""
    quarter = [i * math.pi / 2 for i in range(4)]
    if shape == "square":
        return _corners([a + math.pi / 4 for a in quarter], [radius * 1.2] * 4, x, y)
    if shape == "diamond":
        return _corners(quarter, [radius * 1.2, radius * 0.85] * 2, x, y)
    if shape == "triangle":
        return _corners([i * math.tau / 3 for i in range(3)], [radius * 1.3] * 3, x, y + radius * 0.2)
    if shape == "star":
        return _corners([i * math.pi / 5 for i in range(10)], [radius * 1.3, radius * 0.58] * 5, x, y)
    raise ValueError(f"no such shape: {shape}")


def draw_coverage(shape: str, x: float, y: float, radius: float) -> np.ndarray:
    """How much of each pixel the shape covers, 0..1, antialiased by drawing large and averaging."""
    scale = OVERSAMPLING
    canvas = Image.new("L", (SIDE * scale, SIDE * scale), 0)
    brush = ImageDraw.Draw(canvas)
    if shape == "circle":
        brush.ellipse([(c + d) * scale for d in (-radius, radius) for c in (x, y)], fill=255)
    else:
        brush.polygon([(px * scale, py * scale) for px, py in _outline(shape, x, y, radius)], fill=255)
    return np.asarray(canvas.reduce(scale), dtype=np.float32) / 255.0


def random_coverage(shape: str, variation: Variation, rng: random.Random) -> np.ndarray:
    """A shape near the middle, its place and size a little different every time."""
    x, y = (SIDE / 2 + rng.uniform(-variation.shift, variation.shift) for _ in range(2))
    return draw_coverage(shape, x, y, rng.uniform(*variation.radii))


def paint(coverage: np.ndarray, colour: str, background: str) -> np.ndarray:
    """Colour a coverage mask: an (SIDE, SIDE, 3) picture with values 0..255."""
    front, back = (np.array(COLOURS[name], dtype=np.float32) for name in (colour, background))
    return coverage[..., None] * front + (1.0 - coverage[..., None]) * back


@dataclass(frozen=True)
class Verdict:
    """Which of the three words of a scene a picture gets right."""

    colour: bool
    shape: bool
    background: bool


class Judge:
    """Tells from the pixels alone whether a picture shows a scene.

    The background colour is read from the rim of the picture and the shape colour from its middle, both by
    their median. The outline is the set of pixels nearer to the middle's colour than to the rim's; it is
    compared with drawn templates of every shape at several places and sizes, and the best overlap wins.
    """

    RIM = 6
    CORE = 8
    COLOUR_TOLERANCE = 80.0
    CONTRAST_NEEDED = 40.0
    OVERLAP_NEEDED = 0.7

    def __init__(self) -> None:
        self._templates = {shape: _templates(shape) for shape in SHAPES}

    def judge(self, picture: np.ndarray, scene: Scene) -> Verdict:
        """Compare an (SIDE, SIDE, 3) picture with values 0..255 with a scene."""
        pixels = np.asarray(picture, dtype=np.float32)
        middle, rim = _median_colours(pixels, self.CORE, self.RIM)
        return Verdict(
            colour=self._colour_name(middle) == scene.colour,
            shape=self._shape_name(pixels, middle, rim) == scene.shape,
            background=self._colour_name(rim) == scene.background,
        )

    def _colour_name(self, colour: np.ndarray) -> str | None:
        """The nearest colour of the vocabulary, or None where even that one is far off."""
        distances = {name: float(np.linalg.norm(colour - np.array(rgb))) for name, rgb in COLOURS.items()}
        nearest = min(distances, key=distances.__getitem__)
        return nearest if distances[nearest] <= self.COLOUR_TOLERANCE else None

    def _shape_name(self, pixels: np.ndarray, middle: np.ndarray, rim: np.ndarray) -> str | None:
        """The shape whose template overlaps the outline best, or None where none overlaps well."""
        if np.linalg.norm(middle - rim) < self.CONTRAST_NEEDED:
            return None
        inside = np.linalg.norm(pixels - middle, axis=-1) < np.linalg.norm(pixels - rim, axis=-1)
        overlaps = {name: _best_overlap(inside.ravel(), bank) for name, bank in self._templates.items()}
        best = max(overlaps, key=overlaps.__getitem__)
        return best if overlaps[best] >= self.OVERLAP_NEEDED else None


def _median_colours(pixels: np.ndarray, core: int, rim: int) -> tuple[np.ndarray, np.ndarray]:
    """The typical colour in the middle of a picture and along its rim."""
    half = SIDE // 2
    middle = pixels[half - core : half + core, half - core : half + core].reshape(-1, 3)
    on_rim: np.ndarray = np.ones((SIDE, SIDE), dtype=bool)
    on_rim[rim:-rim, rim:-rim] = False
    return np.median(middle, axis=0), np.median(pixels[on_rim], axis=0)


@functools.cache
def _templates(shape: str) -> np.ndarray:
    """Flattened masks of a shape at every place and size the judge considers."""
    shifts = range(-9, 10, 3)
    masks = []
    for radius in range(25, 36, 2):
        centred = draw_coverage(shape, SIDE / 2, SIDE / 2, radius) > 0.5
        masks += [np.roll(centred, (dy, dx), axis=(0, 1)).ravel() for dy in shifts for dx in shifts]
    return np.array(masks, dtype=np.float32)


def _best_overlap(inside: np.ndarray, templates: np.ndarray) -> float:
    """The best intersection over union of a mask with any of the templates."""
    common = templates @ inside.astype(np.float32)
    union = templates.sum(axis=1) + inside.sum() - common
    return float((common / np.maximum(union, 1.0)).max())
