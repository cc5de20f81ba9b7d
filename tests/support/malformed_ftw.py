"""A golden FTW folder, and what may be wrong with its index: where, the new values, and what is said of them."""

import json
from pathlib import Path
from typing import Any

INDEX = "freetoken_weight.json"

# Two shards of two and one blocks: `wide` spans them, `none` shares its offset with `wide`, `one` is a scalar.
GOLDEN_INDEX = b"""{
"format": "freetoken_weight", "version": 1, "align": 4096, "shard_limit": 8192, "total_bytes": 12288,
"quant_format": "bf16", "counts": {"weight": 3},
"tensors": [
 {"name": "one", "kind": "weight", "dtype": "float32", "shape": [], "global_off": 0, "nbytes": 4, "later": [1]},
 {"name": "none", "kind": "experts_bank", "dtype": "bfloat16", "shape": [0, 7], "global_off": 4096, "nbytes": 0},
 {"name": "wide", "kind": "weight", "dtype": "uint8", "shape": [2, 2050], "global_off": 4096, "nbytes": 4100,
  "ggml_type": "Q4_0", "logical_shape": [2, 3644], "role": "token_embedding", "placement": "host",
  "xxh3_64": "0123456789abcdef"}
],
"shards": [
 {"file": "freetoken-00000.ftw", "global_off": 0, "nbytes": 8192},
 {"file": "freetoken-00001.ftw", "global_off": 8192, "nbytes": 4096}
]}"""
WIDE = bytes(range(256)) * 16 + b"tail"
GOLDEN_REGION = b"\x00\x00\x80\x3f" + bytes(4092) + WIDE + bytes(4092)


def write_golden(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / INDEX).write_bytes(GOLDEN_INDEX)
    (folder / "freetoken-00000.ftw").write_bytes(GOLDEN_REGION[:8192])
    (folder / "freetoken-00001.ftw").write_bytes(GOLDEN_REGION[8192:])
    return folder


def nested(levels: int) -> list[Any]:
    """Return lists in lists."""
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    return value


HUGE = 10**300 // 4096 * 4096

# (what to change: () for the index itself, ("tensors", n) or ("shards", n) for an entry), (new values), problem
VARIANTS: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "format_other": ((), {"format": "gguf"}, "format: is 'gguf', 'freetoken_weight' is needed"),
    "format_missing": ((), {"format": ...}, "format: is None"),
    "format_long": ((), {"format": ["x"] * 9000}, r"format: is \['x', .*\.\.\., 'freetoken"),
    "version_missing": ((), {"version": ...}, "version: is None, 1 is needed"),
    "version_zero": ((), {"version": 0}, "version: is 0, 1 is needed"),
    "version_text": ((), {"version": "1"}, "version: is '1', 1 is needed"),
    "version_true": ((), {"version": True}, "version: is True, 1 is needed"),
    "align_other": ((), {"align": 512}, "align: is 512, 4096 is needed"),
    "align_missing": ((), {"align": ...}, "align: is None"),
    "shard_limit_missing": ((), {"shard_limit": ...}, "shard_limit: is None, a positive multiple of 4096"),
    "shard_limit_zero": ((), {"shard_limit": 0}, "shard_limit: is 0"),
    "shard_limit_odd": ((), {"shard_limit": 8193}, "shard_limit: is 8193"),
    "shard_limit_negative": ((), {"shard_limit": -4096}, "shard_limit: is -4096"),
    "total_bytes_missing": ((), {"total_bytes": ...}, "total_bytes: is None, a number of bytes"),
    "total_bytes_float": ((), {"total_bytes": 12288.0}, "total_bytes: is 12288.0"),
    "total_bytes_more": ((), {"total_bytes": 16384}, "total_bytes: is 16384, the shards hold 12288"),
    "total_bytes_huge": ((), {"total_bytes": HUGE}, "total_bytes: is .*, a number of bytes is needed"),
    "tensors_missing": ((), {"tensors": ...}, "tensors: .*a list of objects is needed"),
    "tensors_object": ((), {"tensors": {}}, "tensors: .*a list of objects is needed"),
    "tensors_of_numbers": ((), {"tensors": [1]}, "tensors: .*a list of objects is needed"),
    "shards_missing": ((), {"shards": ...}, "shards: .*a list of objects is needed"),
    "shards_of_text": ((), {"shards": ["freetoken-00000.ftw"]}, "shards: .*a list of objects is needed"),
    "shards_empty": ((), {"shards": []}, "total_bytes: is 12288, the shards hold 0"),
    "side_files_number": ((), {"side_files": 1}, "side_files: is .*, a list of file names"),
    "side_files_object": ((), {"side_files": {"a": "b"}}, "side_files: is .*, a list of file names"),
    "side_files_of_numbers": ((), {"side_files": [1]}, "side_files: is .*, a list of file names"),
    "side_files_outside": ((), {"side_files": ["../a.safetensors"]}, "side_files: is .*, a list of file names"),
    "side_files_twice": ((), {"side_files": ["s.safetensors"] * 2}, "side_files: 's.safetensors' occurs twice"),
    "shard_file_missing": (("shards", 0), {"file": ...}, "shard 0: file is None, the name of a file"),
    "shard_file_number": (("shards", 0), {"file": 7}, "shard 0: file is 7"),
    "shard_file_empty": (("shards", 0), {"file": ""}, "shard 0: file is ''"),
    "shard_file_outside": (("shards", 1), {"file": "../freetoken-00001.ftw"}, "shard 1: file is '../"),
    "shard_file_absolute": (("shards", 1), {"file": "/etc/passwd"}, "shard 1: file is '/etc/passwd'"),
    "shard_file_parent": (("shards", 1), {"file": ".."}, r"shard 1: file is '\.\.'"),
    "shard_file_nul": (("shards", 1), {"file": "a\0"}, r"shard 1: file is 'a\\x00'"),
    "shard_file_twice": (("shards", 1), {"file": "freetoken-00000.ftw", "nbytes": 8192}, "00000.ftw' occurs twice"),
    "shard_offset_missing": (("shards", 0), {"global_off": ...}, "shard 0: global_off is None, a number of bytes"),
    "shard_offset_false": (("shards", 0), {"global_off": False}, "shard 0: global_off is False, a number of bytes"),
    "shard_offset_gap": (("shards", 1), {"global_off": 12288}, "shard 1: global_off is 12288, 8192 is needed"),
    "shard_offset_overlap": (("shards", 1), {"global_off": 4096}, "shard 1: global_off is 4096, 8192 is needed"),
    "shard_nbytes_missing": (("shards", 0), {"nbytes": ...}, "shard 0: nbytes is None"),
    "shard_nbytes_negative": (("shards", 0), {"nbytes": -1}, "shard 0: nbytes is -1"),
    "shard_nbytes_past_limit": (("shards", 0), {"nbytes": 12288}, "shard 0: nbytes is 12288, at most shard_limit"),
    "tensor_name_missing": (("tensors", 0), {"name": ...}, "tensor 0: name is None, a string is needed"),
    "tensor_name_number": (("tensors", 0), {"name": 1}, "tensor 0: name is 1"),
    "tensor_name_twice": (("tensors", 0), {"name": "wide"}, "wide: occurs twice, names must be unique"),
    "tensor_name_lines": (("tensors", 0), {"name": "a\nb", "kind": 1}, r"a\\nb: kind is 1"),
    "tensor_kind_missing": (("tensors", 0), {"kind": ...}, "one: kind is None, allowed are weight, experts_bank"),
    "tensor_kind_list": (("tensors", 0), {"kind": ["weight"]}, "one: kind is "),
    "tensor_dtype_missing": (("tensors", 0), {"dtype": ...}, "one: dtype is None, allowed are bool"),
    "tensor_dtype_on_disk_name": (("tensors", 0), {"dtype": "F32"}, "one: dtype is 'F32'"),
    "tensor_dtype_list": (("tensors", 0), {"dtype": ["float32"]}, "one: dtype is "),
    "tensor_shape_missing": (("tensors", 0), {"shape": ...}, "one: shape is .*, a list of non-negative"),
    "tensor_shape_negative": (("tensors", 2), {"shape": [-2, -2050]}, "wide: shape is .*, a list of non-negative"),
    "tensor_shape_bool": (("tensors", 2), {"shape": [True, 4100]}, "wide: shape is .*, a list of non-negative"),
    "tensor_shape_overflow": (("tensors", 2), {"shape": [1 << 62, 4]}, "wide: shape .* has 2.63 elements or more"),
    "tensor_shape_huge": (("tensors", 2), {"shape": [10**300] * 2}, "wide: shape is .*, sizes below 2.63 are needed"),
    "tensor_nbytes_missing": (("tensors", 0), {"nbytes": ...}, r"one: nbytes is None, float32 \[\] takes 4"),
    "tensor_nbytes_less": (("tensors", 2), {"nbytes": 4099}, r"wide: nbytes is 4099, uint8 \[2, 2050\] takes 4100"),
    "tensor_nbytes_false": (("tensors", 1), {"nbytes": False}, "none: nbytes is False"),
    "tensor_offset_missing": (("tensors", 0), {"global_off": ...}, "one: global_off is None, a multiple of 4096"),
    "tensor_offset_odd": (("tensors", 0), {"global_off": 8}, "one: global_off is 8, a multiple of 4096"),
    "tensor_offset_negative": (("tensors", 0), {"global_off": -4096}, "one: global_off is -4096"),
    "tensor_offset_overlap": (("tensors", 0), {"global_off": 8192}, "one: begins at 8192 and overlaps"),
    "tensor_offset_alias": (("tensors", 0), {"global_off": 4096}, "wide: begins at 4096 and overlaps"),
    "tensor_end_past_region": (("tensors", 2), {"global_off": 8192}, "wide: ends at 16384 with its padding"),
    "tensor_offset_past_region": (("tensors", 0), {"global_off": 1 << 60}, "one: begins at 1152921504606846976, the"),
    "tensor_offset_huge": (("tensors", 0), {"global_off": HUGE}, "one: global_off is .*, a multiple of 4096"),
    "empty_tensor_past_region": (("tensors", 1), {"global_off": 16384}, "none: begins at 16384, the shards hold 12288"),
    "tensor_shape_of_65": (("tensors", 2), {"shape": [1] * 65}, "wide: shape has 65 dimensions, at most 64"),
    "tensor_narrow_scalar": (
        ("tensors", 0),
        {"dtype": "float4_e2m1fn_x2", "nbytes": 1},
        r"one: shape is \[\], float4_e2m1fn_x2 needs a dimension",
    ),
    "tensor_nested_deeply": (("tensors", 2), {"x": nested(200)}, "json: is nested too deeply, at most 127 levels"),
    "key_nested_deeply": ((), {"x": nested(200)}, "json: is nested too deeply, at most 127 levels are allowed"),
    "keys_of_3_mib": (
        (),
        {"x": "x" * (3 << 20)},
        "json: holds more than 2097152 characters beside tensors and shards",
    ),
    "logical_shape_text": (("tensors", 2), {"logical_shape": "x"}, "wide: logical_shape is .*, a list of non-"),
    "logical_shape_negative": (("tensors", 2), {"logical_shape": [-1]}, "wide: logical_shape is .*, a list of non-"),
    "role_number": (("tensors", 2), {"role": 1}, "wide: role is 1, a string is needed"),
    "placement_list": (("tensors", 2), {"placement": []}, r"wide: placement is \[\], a string is needed"),
    "ggml_type_number": (("tensors", 2), {"ggml_type": 2}, "wide: ggml_type is 2, a string is needed"),
    "xxh3_64_text": (("tensors", 2), {"xxh3_64": "\u009bq" * 99}, "wide: xxh3_64 is .*, 16 hexadecimal digits are"),
    "sha256_short": (("tensors", 2), {"sha256": "0" * 63}, "wide: sha256 is .*, 64 hexadecimal digits are"),
    "sha256_upper_case": (("tensors", 2), {"sha256": "A" * 64}, "wide: sha256 is .*, 64 hexadecimal digits are"),
    "sha256_number": (("tensors", 2), {"sha256": 5}, "wide: sha256 is 5, a string is needed"),
    "ggml_type_long": (("tensors", 2), {"ggml_type": "Q" * 65}, "wide: ggml_type is .*, the name of a GGUF type"),
    "ggml_type_control": (("tensors", 2), {"ggml_type": "Q\x1b[2J"}, "wide: ggml_type is .*, the name of a GGUF type"),
    "shard_nbytes_huge": (("shards", 0), {"nbytes": HUGE}, "shard 0: nbytes is .*, a number of bytes"),
    "shard_offset_huge": (("shards", 1), {"global_off": 1 << 63}, "shard 1: global_off is .*, a number of bytes"),
    "shard_limit_huge": ((), {"shard_limit": HUGE}, "shard_limit: is .*, a positive multiple of 4096"),
    "logical_shape_huge": (("tensors", 2), {"logical_shape": [1 << 63]}, "wide: logical_shape is .*, sizes below 2"),
    "xxh3_64_number": (("tensors", 2), {"xxh3_64": 5}, "wide: xxh3_64 is 5, a string is needed"),
}  # fmt: skip


def write_variant(folder: Path, place: tuple[Any, ...], values: dict[str, Any]) -> None:
    """Write the golden folder with other values at one place of its index; a key set to `...` is left out."""
    write_golden(folder)
    index = json.loads(GOLDEN_INDEX)
    entry = index[place[0]][place[1]] if place else index
    entry.update(values)
    for key in [key for key, value in entry.items() if value is ...]:
        del entry[key]
    (folder / INDEX).write_text(json.dumps(index))
