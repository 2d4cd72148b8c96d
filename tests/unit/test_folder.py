"""A pipeline folder is read exactly or refused in three lines, whatever its files hold, before any weight is read."""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runtime.component import folder_version
from runtime.folder import inspect_pipeline
from runtime.room import held_dtype, rank_bytes
from runtime.safetensors_header import read_header
from runtime.spec import ModelFacts, ParallelSpec, Refusal
from tests.support.folders import (
    INDEX,
    WEIGHTS,
    change_json,
    entries,
    safetensors,
    write_index,
    write_json,
    write_pipeline,
    write_weights,
)
from tests.support.refusals import check_lines, refused

TRANSFORMER = f"transformer/{WEIGHTS['transformer']}"
TINY = 8 * 8 * 2  # bytes of every component of the folder under test


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_pipeline(tmp_path / "tiny-flux")


# ---- folders that are accepted


def test_a_good_folder_is_read(folder: Path) -> None:
    assert inspect_pipeline(folder) == ModelFacts(
        path=str(folder),
        pipeline_class="FluxPipeline",
        transformer_class="FluxTransformer2DModel",
        heads=4,
        head_groups=0,
        tokens=4096 + 512,
        transformer_bytes=TINY,
        split_bytes=0,
        encoder_bytes=2 * TINY,
        vae_bytes=TINY,
        stored_dtype="bfloat16",
        version=folder_version(folder),
    )


@pytest.mark.parametrize(("stored", "dtype"), [("BF16", "bfloat16"), ("F16", "float16"), ("F32", "float32")])
def test_the_stored_dtype_is_told(folder: Path, stored: str, dtype: str) -> None:
    write_weights(folder / TRANSFORMER, stored)
    assert inspect_pipeline(folder).stored_dtype == dtype


def test_of_two_dtypes_the_one_with_more_bytes_counts(folder: Path) -> None:
    header = entries({"a": ("BF16", (10, 10)), "b": ("F32", (2,)), "c": ("F32", (2,)), "d": ("F32", (2,))})
    (folder / TRANSFORMER).write_bytes(safetensors(header))
    assert inspect_pipeline(folder).stored_dtype == "bfloat16"


def test_bytes_the_tensor_axis_divides_are_the_matrices_of_the_blocks(folder: Path) -> None:
    divided = {
        "transformer_blocks.0.attn.to_q.weight": ("BF16", (16, 16)),
        "transformer_blocks.11.norm1.linear.weight": ("BF16", (96, 16)),
        "single_transformer_blocks.3.norm.linear.weight": ("BF16", (48, 16)),
        "single_transformer_blocks.3.proj_out.weight": ("BF16", (16, 64)),
        "layers.7.conv.weight": ("BF16", (8, 8, 1, 1)),
    }
    whole = {
        "x_embedder.weight": ("BF16", (16, 8)),
        "time_text_embed.timestep_embedder.linear_1.weight": ("BF16", (16, 256)),
        "norm_out.linear.weight": ("BF16", (32, 16)),
        "transformer_blocks.0.attn.to_q.bias": ("BF16", (16,)),
        "transformer_blocks.0.norm1.linear.bias": ("BF16", (96,)),
        "block7.weight": ("BF16", (16, 16)),
        "block.7b.weight": ("BF16", (16, 16)),
    }
    (folder / TRANSFORMER).write_bytes(safetensors(entries(divided | whole)))
    expected = 2 * (16 * 16 + 96 * 16 + 48 * 16 + 16 * 64 + 8 * 8)
    assert inspect_pipeline(folder).split_bytes == expected
    plan = {
        "transformer_blocks.*.norm1.linear": "colwise_gathered",
        "single_transformer_blocks.3.proj_out": "rowwise",
        "x_embedder": "colwise_gathered",
    }
    expected = 2 * (96 * 16 + 16 * 64 + 16 * 8)
    assert inspect_pipeline(folder, json.dumps(plan)).split_bytes == expected


def test_heads_default_to_those_of_diffusers(folder: Path) -> None:
    """test_pipelines.py compares the number with diffusers' own."""
    change_json(folder / "transformer/config.json", remove=("num_attention_heads",))
    assert inspect_pipeline(folder).heads == 24


@pytest.mark.parametrize("key", ["num_key_value_heads", "num_kv_heads", "n_kv_heads"])
@pytest.mark.parametrize(("said", "groups", "units"), [(8, 8, 8), (1, 1, 1), (24, 0, 24), (None, 0, 24)])
def test_heads_that_share_keys_and_values_are_divided_in_groups(
    folder: Path, key: str, said: int | None, groups: int, units: int
) -> None:
    change_json(folder / "transformer/config.json", num_attention_heads=24, **{key: said})
    facts = inspect_pipeline(folder)
    assert (facts.heads, facts.head_groups, facts.units) == (24, groups, units)


@pytest.mark.parametrize("said", [0, -1, 5, 48, 2.0, True, "8", [8]], ids=repr)
def test_groups_that_do_not_divide_the_heads_are_refused(folder: Path, said: Any) -> None:
    change_json(folder / "transformer/config.json", num_attention_heads=24, num_kv_heads=said)
    with refused("attention heads", "num_kv_heads"):
        inspect_pipeline(folder)


@pytest.mark.parametrize("component", WEIGHTS)
def test_weights_in_several_files_are_added_up(folder: Path, component: str) -> None:
    single = folder / component / WEIGHTS[component]
    stem = single.name.removesuffix(".safetensors")
    single.unlink()
    names = [f"{stem}-0000{part}-of-00002.safetensors" for part in (1, 2)]
    for name in names:
        write_weights(single.with_name(name))
    write_index(single.parent, stem, {"a": names[0], "b": names[1], "c": names[0]})
    facts = inspect_pipeline(folder)
    sizes = {
        "transformer": facts.transformer_bytes,
        "vae": facts.vae_bytes,
        "text_encoder": facts.encoder_bytes - TINY,
        "text_encoder_2": facts.encoder_bytes - TINY,
    }
    assert sizes[component] == 2 * TINY


@pytest.mark.parametrize("name", ["CLIPTokenizer", "CLIPTokenizerFast"])
def test_both_kinds_of_a_tokenizer_are_accepted(folder: Path, name: str) -> None:
    change_json(folder / "model_index.json", tokenizer=["transformers", name])
    inspect_pipeline(folder)


def test_what_a_folder_holds_besides_does_not_matter(folder: Path) -> None:
    change_json(
        folder / "model_index.json", remove=("image_encoder",), safety=[None, None], requires_aesthetics=True
    )
    (folder / "README.md").write_text("a model card")
    (folder / "flux1-dev.safetensors").write_bytes(b"the same weights in one file")
    (folder / "transformer/diffusion_pytorch_model.bin").write_bytes(b"\x80\x02")
    inspect_pipeline(folder)


def test_metadata_of_a_file_is_no_tensor(folder: Path) -> None:
    header = {"__metadata__": {"format": "pt"}, **entries({"weight": ("BF16", (8, 8))})}
    (folder / TRANSFORMER).write_bytes(safetensors(header))
    assert inspect_pipeline(folder).transformer_bytes == TINY


def test_components_and_files_may_be_links(folder: Path, tmp_path: Path) -> None:
    """The Hub's cache links every file, and people move large components to another disk."""
    (folder / "transformer").rename(tmp_path / "elsewhere")
    (folder / "transformer").symlink_to(tmp_path / "elsewhere")
    weights = folder / "vae" / WEIGHTS["vae"]
    weights.rename(tmp_path / "blob")
    weights.symlink_to(tmp_path / "blob")
    assert inspect_pipeline(folder).transformer_bytes == TINY


# ---- classes


def test_another_pipeline_is_refused_by_name(folder: Path) -> None:
    change_json(folder / "model_index.json", _class_name="EvilPipeline")
    with refused("'tiny-flux' is a EvilPipeline", "FluxPipeline"):
        inspect_pipeline(folder)


@pytest.mark.parametrize("component", [name for name, value in INDEX.items() if isinstance(value, list)])
@pytest.mark.parametrize(
    "wanted", [["os", "system"], ["diffusers", "UNet2DModel"], ["my_code", "Flux"]], ids=".".join
)
def test_classes_that_are_not_on_the_list_are_refused(
    folder: Path, component: str, wanted: list[str]
) -> None:
    change_json(folder / "model_index.json", **{component: wanted})
    with refused(f"wants {'.'.join(wanted)} as its {component}", "known classes"):
        inspect_pipeline(folder)


def test_a_class_of_another_component_is_refused(folder: Path) -> None:
    change_json(folder / "model_index.json", vae=INDEX["transformer"])
    with refused("wants diffusers.FluxTransformer2DModel as its vae"):
        inspect_pipeline(folder)


def test_a_class_of_the_right_name_from_another_library_is_refused(folder: Path) -> None:
    change_json(folder / "model_index.json", transformer=["my_code", "FluxTransformer2DModel"])
    with refused("wants my_code.FluxTransformer2DModel as its transformer"):
        inspect_pipeline(folder)


def test_a_component_nobody_knows_is_refused(folder: Path) -> None:
    change_json(folder / "model_index.json", controlnet=["diffusers", "FluxControlNetModel"])
    with refused("wants diffusers.FluxControlNetModel as its controlnet"):
        inspect_pipeline(folder)


@pytest.mark.parametrize("component", ["transformer", "text_encoder_2", "scheduler"])
@pytest.mark.parametrize("value", [[None, None], "missing", "diffusers.Class"])
def test_a_component_that_is_needed_must_be_named(folder: Path, component: str, value: object) -> None:
    if value == "missing":
        change_json(folder / "model_index.json", remove=(component,))
    else:
        change_json(folder / "model_index.json", **{component: value})
    with refused(component):
        inspect_pipeline(folder)


@pytest.mark.parametrize("component", ["transformer", "vae"])
@pytest.mark.parametrize("found", ["EvilModel", None, ["FluxTransformer2DModel"], {}, 3], ids=str)
def test_a_config_must_name_the_same_class(folder: Path, component: str, found: object) -> None:
    change_json(folder / component / "config.json", _class_name=found)
    with refused(f"The {component} of 'tiny-flux' is a", f"{component}/config.json"):
        inspect_pipeline(folder)


# ---- files that are missing or in another form


@pytest.mark.parametrize(
    "file",
    [
        "model_index.json",
        *(f"{component}/config.json" for component in WEIGHTS),
        "scheduler/scheduler_config.json",
    ],
)
def test_a_missing_file_is_named(folder: Path, file: str) -> None:
    (folder / file).unlink()
    with refused(f"no {'tiny-flux/' if '/' not in file else ''}{file}"):
        inspect_pipeline(folder)


@pytest.mark.parametrize("component", sorted({*WEIGHTS, "scheduler", "tokenizer", "tokenizer_2"}))
def test_a_missing_component_is_named(folder: Path, component: str) -> None:
    shutil.rmtree(folder / component)
    with refused(f"The {component} of 'tiny-flux' is not complete"):
        inspect_pipeline(folder)


@pytest.mark.parametrize("path", ["nowhere", "a-file"])
def test_what_is_no_folder_is_refused(tmp_path: Path, path: str) -> None:
    (tmp_path / "a-file").write_text("text")
    with refused(f"'{path}' is not a diffusers pipeline folder"):
        inspect_pipeline(tmp_path / path)


@pytest.mark.parametrize("component", WEIGHTS)
def test_a_renamed_file_is_refused_with_its_name(folder: Path, component: str) -> None:
    file = folder / component / WEIGHTS[component]
    file.rename(file.with_name("my-finetune.safetensors"))
    with refused(f"The {component} has no file {file.name}", "there is only my-finetune.safetensors"):
        inspect_pipeline(folder)


@pytest.mark.parametrize("suffix", [".bin", ".pt", ".pth", ".ckpt", ".gguf", ".flashpack"])
def test_weights_that_can_run_code_are_not_read(folder: Path, suffix: str) -> None:
    file = folder / TRANSFORMER
    file.rename(file.with_suffix(suffix))
    with refused(f"there is only {file.stem}{suffix}", "safetensors"):
        inspect_pipeline(folder)


def test_a_component_without_weights_is_refused(folder: Path) -> None:
    (folder / TRANSFORMER).unlink()
    with refused("there are no weights at all"):
        inspect_pipeline(folder)


def test_a_folder_in_the_place_of_a_file_is_refused(folder: Path) -> None:
    (folder / TRANSFORMER).unlink()
    (folder / TRANSFORMER).mkdir()
    with refused("has no file"):
        inspect_pipeline(folder)


@pytest.mark.parametrize("component", WEIGHTS)
@pytest.mark.parametrize("config", [{"quant_method": "bitsandbytes"}, {}], ids=["bitsandbytes", "empty"])
def test_quantized_components_are_refused(folder: Path, component: str, config: dict[str, str]) -> None:
    change_json(folder / component / "config.json", quantization_config=config)
    with refused(f"The {component} of 'tiny-flux' is quantized", "bf16"):
        inspect_pipeline(folder)


@pytest.mark.parametrize("dtype", ["I8", "U8", "F64"])
def test_other_dtypes_are_refused_by_name(folder: Path, dtype: str) -> None:
    write_weights(folder / TRANSFORMER, dtype)
    with refused(f"is stored as {dtype}", "bf16"):
        inspect_pipeline(folder)


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2"])
def test_fp8_weights_are_held_as_the_numbers_they_stand_for(folder: Path, dtype: str) -> None:
    write_weights(folder / TRANSFORMER, dtype)
    facts = inspect_pipeline(folder)
    assert facts.stored_dtype == "float8"
    assert held_dtype(facts, "auto") == "bfloat16"
    assert rank_bytes(facts, "auto", ParallelSpec()) == 2 * facts.transformer_bytes


def test_a_few_integers_are_enough_to_refuse(folder: Path) -> None:
    header = entries({"a": ("BF16", (100, 100)), "b": ("I8", (8, 8)), "b.scale": ("F32", (1,))})
    (folder / TRANSFORMER).write_bytes(safetensors(header))
    with refused("is partly stored as I8"):
        inspect_pipeline(folder)


@pytest.mark.parametrize("header", [{}, {"__metadata__": {"format": "pt"}}], ids=["empty", "metadata only"])
def test_a_transformer_without_tensors_is_refused(folder: Path, header: dict[str, Any]) -> None:
    (folder / TRANSFORMER).write_bytes(safetensors(header, data=0))
    with refused("holds no weights"):
        inspect_pipeline(folder)


# ---- files that are damaged


def _cut(file: Path, size: int) -> None:
    os.truncate(file, size)


@pytest.mark.parametrize("component", WEIGHTS)
@pytest.mark.parametrize("missing", [1, TINY])
def test_a_file_that_is_cut_short_is_named_with_both_sizes(
    folder: Path, component: str, missing: int
) -> None:
    file = folder / component / WEIGHTS[component]
    size = file.stat().st_size
    _cut(file, size - missing)
    with refused(f"{component}/{file.name} is cut short", f"{size} bytes and has {size - missing}"):
        inspect_pipeline(folder)


def test_a_file_that_is_too_long_is_refused(folder: Path) -> None:
    """safetensors itself would refuse it, in the middle of the load."""
    with (folder / TRANSFORMER).open("ab") as file:
        file.write(b"\x00")
    with refused("is too long"):
        inspect_pipeline(folder)


NOT_SAFETENSORS: dict[str, bytes] = {
    "nothing": b"",
    "seven bytes": b"\x02" + bytes(6),
    "a length and no more": struct.pack("<Q", 100),
    "a header cut short": safetensors(entries({"a": ("F32", (4,))}))[:40],
    "a pickle": b"\x80\x02}q\x00(X\x06\x00\x00\x00weightq\x01K\x01u.",
    "a zip, as torch saves": b"PK\x03\x04" + bytes(200),
    "a web page": b"<!DOCTYPE html><html><body>Not found</body></html>",
    "a git-lfs pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 123\n",
    "the longest header": struct.pack("<Q", 2**64 - 1) + b"{}",
    "a header longer than allowed": struct.pack("<Q", (100 << 20) + 1) + b"{}",
    "bytes that are no text": safetensors(b"\xff\xfe\xfa\xfb", data=0),
    "text that is no JSON": safetensors(b"{'a': 1}", data=0),
    "a list": safetensors(b"[]", data=0),
    "a number": safetensors(b"12", data=0),
    "nested without end": safetensors(b"[" * 100_000, data=0),
}
GOOD_ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
BAD_ENTRIES: dict[str, Any] = {
    "none": None,
    "a list": [],
    "text": "F32",
    "empty": {},
    "no data_offsets": {"dtype": "F32", "shape": [2]},
    "no dtype": {"shape": [2], "data_offsets": [0, 8]},
    "no shape": {"dtype": "F32", "data_offsets": [0, 8]},
    "a dtype that is a list": GOOD_ENTRY | {"dtype": ["F32"]},
    "a shape that is a number": GOOD_ENTRY | {"shape": 2},
    "a shape of text": GOOD_ENTRY | {"shape": ["2"]},
    "a negative shape": GOOD_ENTRY | {"shape": [-2]},
    "one offset": GOOD_ENTRY | {"data_offsets": [8]},
    "three offsets": GOOD_ENTRY | {"data_offsets": [0, 4, 8]},
    "offsets that are text": GOOD_ENTRY | {"data_offsets": ["0", "8"]},
    "offsets that are none": GOOD_ENTRY | {"data_offsets": [None, None]},
    "offsets that are floats": GOOD_ENTRY | {"data_offsets": [0.0, 8.0]},
    "offsets the wrong way round": GOOD_ENTRY | {"data_offsets": [8, 0]},
    "a negative offset": GOOD_ENTRY | {"data_offsets": [-8, 0]},
    "an offset beyond all files": GOOD_ENTRY | {"data_offsets": [0, 10**4000]},
}
NOT_SAFETENSORS |= {
    f"an entry: {name}": safetensors(json.dumps({"good": GOOD_ENTRY, "bad": entry}).encode(), data=8)
    for name, entry in BAD_ENTRIES.items()
}


@pytest.mark.parametrize("content", NOT_SAFETENSORS)
def test_what_is_no_safetensors_is_refused_whatever_its_name_says(folder: Path, content: str) -> None:
    (folder / TRANSFORMER).write_bytes(NOT_SAFETENSORS[content])
    damaged = content.startswith("an entry")
    said = ("is damaged", "again") if damaged else ("is not a safetensors file", "not read")
    with refused(f"{TRANSFORMER} {said[0]}", said[1]):
        inspect_pipeline(folder)


def test_a_header_read_alone_is_checked_as_well(tmp_path: Path) -> None:
    file = tmp_path / "one.safetensors"
    file.write_bytes(safetensors({"a": GOOD_ENTRY}))
    assert [entry.key for entry in read_header(file).entries] == ["a"]
    file.write_bytes(safetensors({"a": {}}, data=0))
    with refused("one.safetensors"):
        read_header(file)


JSON_FILES = (
    "model_index.json",
    "transformer/config.json",
    "vae/config.json",
    "text_encoder/config.json",
    "text_encoder_2/config.json",
    "scheduler/scheduler_config.json",
)
NOT_AN_OBJECT: dict[str, bytes] = {
    "empty": b"",
    "cut short": b'{"_class_name": "Flux',
    "a list": b"[1, 2]",
    "null": b"null",
    "a number": b"17",
    "text": b'"FluxPipeline"',
    "bytes that are no text": b'{"_class_name": "\xff\xfe"}',
    "nested without end": b"[" * 100_000,
    "a number without end": b'{"a": ' + b"9" * 10_000 + b"}",
}


@pytest.mark.parametrize("file", JSON_FILES)
@pytest.mark.parametrize("content", NOT_AN_OBJECT)
def test_json_that_is_no_object_is_refused_with_the_file(folder: Path, file: str, content: str) -> None:
    (folder / file).write_bytes(NOT_AN_OBJECT[content])
    with refused(Path(file).name):
        inspect_pipeline(folder)


@pytest.mark.parametrize("file", JSON_FILES)
def test_a_folder_in_the_place_of_json_is_refused(folder: Path, file: str) -> None:
    (folder / file).unlink()
    (folder / file).mkdir()
    with refused(Path(file).name):
        inspect_pipeline(folder)


STRANGE: list[Any] = [
    None,
    True,
    0,
    -1,
    2.5,
    "",
    "text",
    [],
    {},
    ["a"],
    [["a"], {}],
    [None],
    {"a": 1},
    [1, 2, 3],
]


@pytest.mark.parametrize("value", STRANGE, ids=repr)
@pytest.mark.parametrize(
    "key", ["_class_name", "transformer", "vae", "tokenizer", "image_encoder", "unknown"]
)
def test_any_value_in_the_index_is_read_or_refused(folder: Path, key: str, value: Any) -> None:
    change_json(folder / "model_index.json", **{key: value})
    _read_or_refused(folder)


@pytest.mark.parametrize(
    "heads", [None, True, 0, -4, 2.5, "24", [24], {}, 10**9, 10**4000], ids=lambda v: repr(v)[:9]
)
def test_a_number_of_heads_that_is_none_is_refused(folder: Path, heads: Any) -> None:
    change_json(folder / "transformer/config.json", num_attention_heads=heads)
    with refused("attention heads", "num_attention_heads"):
        inspect_pipeline(folder)


# ---- indices of several files

OUTSIDE = [
    "../x.safetensors",
    "../vae/diffusion_pytorch_model.safetensors",
    "sub/x.safetensors",
    "./x.safetensors",
    "..",
]


def _split_transformer(folder: Path, weight_map: Any) -> None:
    write_index(folder / "transformer", "diffusion_pytorch_model", weight_map)


@pytest.mark.parametrize("name", [*OUTSIDE, "ABSOLUTE"])
def test_an_index_that_names_files_outside_its_folder_is_refused(
    folder: Path, tmp_path: Path, name: str
) -> None:
    write_weights(tmp_path / "x.safetensors")
    write_weights(folder / "x.safetensors")
    (folder / "transformer/sub").mkdir()
    write_weights(folder / "transformer/sub/x.safetensors")
    _split_transformer(folder, {"a": str(tmp_path / "x.safetensors") if name == "ABSOLUTE" else name})
    with refused("files outside its folder"):
        inspect_pipeline(folder)


def test_an_index_may_only_name_safetensors(folder: Path) -> None:
    """A file can be a valid safetensors header and a pickle at once; other loaders go by the name."""
    write_weights(folder / "transformer/weights.bin")
    _split_transformer(folder, {"a": "weights.bin"})
    with refused("weights.bin", "can run code"):
        inspect_pipeline(folder)


def test_a_file_the_index_names_must_exist(folder: Path) -> None:
    _split_transformer(folder, {"a": WEIGHTS["transformer"], "b": "part-2.safetensors"})
    with refused("has no file part-2.safetensors"):
        inspect_pipeline(folder)


@pytest.mark.parametrize(
    "name", ["x" * 300 + ".safetensors", "a\0b.safetensors", "a\nb.safetensors", "\ud800.safetensors"]
)
def test_names_no_file_can_have_are_refused(folder: Path, name: str) -> None:
    _split_transformer(folder, {"a": name})
    with refused("tiny-flux" if len(name) > 255 else "has no file"):
        inspect_pipeline(folder)


@pytest.mark.parametrize("weight_map", STRANGE, ids=repr)
def test_an_index_that_maps_nothing_is_refused(folder: Path, weight_map: Any) -> None:
    _split_transformer(folder, weight_map)
    with refused("transformer", "index.json"):
        inspect_pipeline(folder)


@pytest.mark.parametrize("content", ["missing", *NOT_AN_OBJECT])
def test_a_damaged_index_is_refused(folder: Path, content: str) -> None:
    file = folder / "transformer/diffusion_pytorch_model.safetensors.index.json"
    if content == "missing":
        write_json(file, {"metadata": {}})
    else:
        file.write_bytes(NOT_AN_OBJECT[content])
    with refused("The transformer is damaged", "index.json"):
        inspect_pipeline(folder)


# ---- messages


@pytest.mark.parametrize("name", ["two\nlines", "tab\there", "a'quote", "ünïcödé 🦊", "right\u202eleft"])
def test_strange_folder_names_do_not_break_the_three_lines(tmp_path: Path, name: str) -> None:
    folder = write_pipeline(tmp_path / name)
    (folder / "model_index.json").unlink()
    with refused("is not a diffusers pipeline folder"):
        inspect_pipeline(folder)


@pytest.mark.parametrize(
    "text", ["two\nlines", "x" * 10_000, "\x1b[31mred", "\u2028"], ids=["lines", "long", "colour", "u2028"]
)
def test_strange_class_names_do_not_break_the_three_lines(folder: Path, text: str) -> None:
    change_json(folder / "model_index.json", vae=[text, text])
    with refused("as its vae") as caught:
        inspect_pipeline(folder)
    assert len(str(caught.value)) < 1000
    assert "\x1b" not in str(caught.value)


# ---- versions


@pytest.mark.parametrize("file", ["model_index.json", TRANSFORMER, "tokenizer/tokenizer_config.json"])
def test_the_version_changes_with_every_file(folder: Path, file: str) -> None:
    before = folder_version(folder)
    assert folder_version(folder) == before
    status = (folder / file).stat()
    os.utime(folder / file, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    touched = folder_version(folder)
    (folder / file).rename((folder / file).with_name("renamed"))
    renamed = folder_version(folder)
    (folder / file).with_name("renamed").unlink()
    assert len({before, touched, renamed, folder_version(folder)}) == 4


def test_the_version_changes_with_a_size_alone(folder: Path) -> None:
    before, file = folder_version(folder), folder / TRANSFORMER
    stamp = file.stat().st_mtime_ns
    _cut(file, 10)
    os.utime(file, ns=(stamp, stamp))
    assert folder_version(folder) != before


def test_the_version_sees_through_links(folder: Path, tmp_path: Path) -> None:
    (folder / "transformer").rename(tmp_path / "elsewhere")
    (folder / "transformer").symlink_to(tmp_path / "elsewhere")
    before = folder_version(folder)
    write_weights(tmp_path / "elsewhere" / WEIGHTS["transformer"], "F32")
    assert folder_version(folder) != before


def test_the_version_survives_names_and_links_that_lead_nowhere(folder: Path) -> None:
    before = folder_version(folder)
    (folder / "dangling").symlink_to("nowhere")
    (folder / "loop").symlink_to(folder)
    assert folder_version(folder)
    with open(os.fsencode(folder) + b"/\xff\xfe", "wb"):
        pass
    assert folder_version(folder) != before


# ---- whatever is in the files


def _read_or_refused(folder: Path) -> None:
    try:
        inspect_pipeline(folder)
    except Refusal as refusal:
        check_lines(refusal)


MUTATIONS: tuple[Callable[[random.Random, bytes], bytes], ...] = (
    lambda rng, content: content[: rng.randrange(len(content) + 1)],
    lambda rng, content: _with_byte(content, rng.randrange(len(content)), rng.randrange(256)),
    lambda rng, content: _with_byte(content, rng.randrange(len(content)), ord(rng.choice('{}[]",:0-enl\\'))),
    lambda rng, content: content + bytes(rng.randrange(256) for _ in range(rng.randrange(20))),
    lambda rng, content: rng.randbytes(rng.randrange(64)),
)


def _with_byte(content: bytes, place: int, byte: int) -> bytes:
    return content[:place] + bytes([byte]) + content[place + 1 :]


def test_random_damage_is_read_or_refused(folder: Path) -> None:
    """A fixed seed, so that a failure can be seen again; a change of the seed is a new search."""
    _split_transformer(folder, {"weight": WEIGHTS["transformer"]})
    files = sorted(file for file in folder.rglob("*") if file.is_file() and file.stat().st_size)
    rng = random.Random(20)
    for _ in range(200):
        file = rng.choice(files)
        content = file.read_bytes()
        file.write_bytes(rng.choice(MUTATIONS)(rng, content))
        _read_or_refused(folder)
        file.write_bytes(content)
    inspect_pipeline(folder)
