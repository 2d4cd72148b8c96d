"""The demo model's tokenizers and text encoders: FLUX.1's two kinds, with few words and tiny widths.

The encoders are trained first and on their own, which takes a minute: from CLIP's pooled vector and from
every position of T5's output a throw-away linear layer must tell colour, shape and background. After that
they stay as they are, so the transformer can learn from features computed once, by the very calls
`FluxPipeline` makes.
"""

import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5TokenizerFast,
)

from demo_model.pictures import COLOURS, SHAPES, Scene, all_scenes

T5_LENGTH = 16
CLIP_LENGTH = 32
WIDTH = 64

# A sentence of each kind is learned for every scene. The words in FILLERS are in no vocabulary: they come out
# as <unk> (T5) or as single letters (CLIP), and learning with them keeps an unknown adjective harmless.
SENTENCES = (
    "a {colour} {shape} on {background}",
    "a {colour} {shape} on a {background} background",
    "{colour} {shape} on {background}",
    "{colour} {shape} on a {background} background",
    "A {colour} {shape} on {background}.",
    "a {colour} {shape}, {background} background",
    "a {filler} {colour} {shape} on {background}",
    "a {filler} of a {colour} {shape} on a {filler} {background} background",
)
FILLERS = ("shiny", "big", "small", "nice", "photo", "picture", "drawing", "plain")
WORDS = ("a", "on", "of", "background", *SHAPES, *COLOURS)
MARKS = (",", ".")


@dataclass(frozen=True)
class TextParts:
    """The four text parts of a FluxPipeline."""

    tokenizer: CLIPTokenizer
    text_encoder: CLIPTextModel
    tokenizer_2: T5TokenizerFast
    text_encoder_2: T5EncoderModel


@dataclass(frozen=True)
class ReadPrompts:
    """What the trained encoders make of every sentence, by scene and kind of sentence.

    `pooled` is (scenes, kinds, width) and `tokens` is (scenes, kinds, T5_LENGTH, width).
    """

    pooled: torch.Tensor
    tokens: torch.Tensor


def learn_merges(words: tuple[str, ...]) -> list[tuple[str, str]]:
    """Byte-pair merges, most frequent pair first, until every word is a single piece."""
    spelled = [[*word[:-1], word[-1] + "</w>"] for word in words]
    merges: list[tuple[str, str]] = []
    while any(len(pieces) > 1 for pieces in spelled):
        pairs = Counter(pair for pieces in spelled for pair in itertools.pairwise(pieces))
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        spelled = [_merge(pieces, best) for pieces in spelled]
    return merges


def _merge(pieces: list[str], pair: tuple[str, str]) -> list[str]:
    """Join every neighbouring occurrence of the pair."""
    merged: list[str] = []
    for piece in pieces:
        if merged and (merged[-1], piece) == pair:
            merged[-1] += piece
        else:
            merged.append(piece)
    return merged


def new_clip_tokenizer() -> CLIPTokenizer:
    """Known words are one token each; other words fall apart into letters, and other signs into <unk>."""
    merges = learn_merges(WORDS)
    letters = sorted(set("".join(WORDS)))
    pieces = [
        "<|startoftext|>",
        "<|endoftext|>",
        "<unk>",
        *letters,
        *(c + "</w>" for c in (*letters, *MARKS)),
    ]
    pieces += dict.fromkeys("".join(pair) for pair in merges)
    vocabulary = {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}
    return CLIPTokenizer(vocab=vocabulary, merges=merges, unk_token="<unk>", model_max_length=CLIP_LENGTH)


def new_t5_tokenizer() -> T5TokenizerFast:
    """Every word is one piece, with and without a capital letter; whatever else there is becomes <unk>."""
    pieces = [(piece, 0.0) for piece in ("<pad>", "</s>", "<unk>")]
    pieces += [("\u2581" + spelling, -1.0) for word in WORDS for spelling in (word, word.capitalize())]
    pieces += [(mark, -2.0) for mark in MARKS]
    return T5TokenizerFast(vocab=pieces, extra_ids=0, model_max_length=T5_LENGTH)


def new_text_parts() -> TextParts:
    """Tokenizers and untrained encoders."""
    tokenizer, tokenizer_2 = new_clip_tokenizer(), new_t5_tokenizer()
    clip = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        projection_dim=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=CLIP_LENGTH,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    t5 = T5Config(
        vocab_size=len(tokenizer_2),
        d_model=WIDTH,
        d_kv=WIDTH // 4,
        d_ff=2 * WIDTH,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        feed_forward_proj="gated-gelu",
        pad_token_id=tokenizer_2.pad_token_id,
        eos_token_id=tokenizer_2.eos_token_id,
    )
    return TextParts(tokenizer, CLIPTextModel(clip), tokenizer_2, T5EncoderModel(t5))


def sentences_for(scene: Scene, rng: random.Random) -> list[str]:
    """One sentence of every kind that describes the scene."""
    words = {"colour": scene.colour, "shape": scene.shape, "background": scene.background}
    return [kind.format(**words, filler=rng.choice(FILLERS)) for kind in SENTENCES]


def tokenize(parts: TextParts, sentences: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """CLIP's and T5's token numbers, padded to full length as FluxPipeline does it."""
    both = ((parts.tokenizer, CLIP_LENGTH), (parts.tokenizer_2, T5_LENGTH))
    clip_ids, t5_ids = (
        tokenizer(
            sentences, padding="max_length", max_length=n, truncation=True, return_tensors="pt"
        ).input_ids
        for tokenizer, n in both
    )
    return clip_ids, t5_ids


def encode(
    parts: TextParts, clip_ids: torch.Tensor, t5_ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """CLIP's pooled vectors and T5's last states, without a padding mask, as FluxPipeline asks for them."""
    return parts.text_encoder(clip_ids).pooler_output, parts.text_encoder_2(t5_ids)[0]


def _scene_numbers(scenes: list[Scene]) -> torch.Tensor:
    """The scenes as rows of indices: colour, shape, background."""
    colours = list(COLOURS)
    rows = [[colours.index(s.colour), SHAPES.index(s.shape), colours.index(s.background)] for s in scenes]
    return torch.tensor(rows)


def _reading_loss(scores: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    """How badly linear scores, (count, places, classes), tell the three words of every scene."""
    parts = scores.split([len(COLOURS), len(SHAPES), len(COLOURS)], dim=-1)
    places = scores.shape[1]
    losses = [
        F.cross_entropy(part.flatten(0, 1), truth[:, i].repeat_interleave(places))
        for i, part in enumerate(parts)
    ]
    return sum(losses, start=torch.zeros(()))


def all_sentences(seed: int) -> list[str]:
    """One sentence of every kind for every scene, scene by scene."""
    rng = random.Random(seed)
    return [sentence for scene in all_scenes() for sentence in sentences_for(scene, rng)]


def train_text_encoders(seed: int, steps: int, report: Callable[..., None], batch: int = 64) -> TextParts:
    """Teach the encoders to read; `report` is called as `report(step, clip=..., t5=...)` with the losses."""
    torch.manual_seed(seed)
    parts = new_text_parts()
    clip_ids, t5_ids = tokenize(parts, all_sentences(seed))
    truth = _scene_numbers(all_scenes()).repeat_interleave(len(SENTENCES), dim=0)
    heads = nn.ModuleList(nn.Linear(WIDTH, 2 * len(COLOURS) + len(SHAPES)) for _ in range(2))
    learners = nn.ModuleList([parts.text_encoder, parts.text_encoder_2, heads]).train()
    optimiser = torch.optim.AdamW(learners.parameters(), lr=3e-3, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LinearLR(optimiser, 1.0, 0.02, total_iters=steps)
    for step in range(steps):
        chosen = torch.randint(len(truth), (batch,))
        pooled, tokens = encode(parts, clip_ids[chosen], t5_ids[chosen])
        clip_loss = _reading_loss(heads[0](pooled[:, None]), truth[chosen])
        t5_loss = _reading_loss(heads[1](tokens), truth[chosen])
        (clip_loss + t5_loss).backward()
        nn.utils.clip_grad_norm_(learners.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        schedule.step()
        report(step, clip=clip_loss.item(), t5=t5_loss.item())
    learners.eval()
    return parts


@torch.no_grad()
def read_all_sentences(parts: TextParts, seed: int) -> ReadPrompts:
    """Compute once what the transformer will be told about every scene."""
    pooled, tokens = encode(parts, *tokenize(parts, all_sentences(seed)))
    shape = (len(all_scenes()), len(SENTENCES))
    return ReadPrompts(pooled.unflatten(0, shape), tokens.unflatten(0, shape))


def save_text_parts(parts: TextParts, folder: Path) -> None:
    """Write the four parts where a diffusers folder has them."""
    for name in TextParts.__dataclass_fields__:
        getattr(parts, name).save_pretrained(folder / name)


def load_text_parts(folder: Path) -> TextParts:
    """Read back what `save_text_parts` wrote."""
    return TextParts(
        CLIPTokenizer.from_pretrained(folder / "tokenizer"),
        CLIPTextModel.from_pretrained(folder / "text_encoder").eval(),
        T5TokenizerFast.from_pretrained(folder / "tokenizer_2"),
        T5EncoderModel.from_pretrained(folder / "text_encoder_2").eval(),
    )
