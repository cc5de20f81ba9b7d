"""Malformed safetensors files, indexes and config.json, by the numbers of the list that the reader is held to.

Each is its content and what the message has to say of it.
"""

import json
import os
import pickle
import struct
from pathlib import Path
from typing import Any

from builders import llama_config, safetensors_bytes, tensor_entry

LFS_POINTER = (
    b"version https://git-lfs.github.com/spec/v1\n"
    b"oid sha256:4665a5ea423c2713d436b5ee50593a9640e0018c1550b5a0002f74190d6caea8\nsize 12345\n"
)
ENTRY = tensor_entry("F32", [2], 0, 8)
GOOD = safetensors_bytes({"t": ENTRY}, bytes(8))


def _entry(**overrides: Any) -> bytes:
    """Return a file of one tensor whose entry differs; a key set to `...` is left out."""
    entry = {key: value for key, value in {**ENTRY, **overrides}.items() if value is not ...}
    return safetensors_bytes({"t": entry}, bytes(8))


def _two(first: tuple[int, int], second: tuple[int, int], nbytes: int) -> bytes:
    """Return a file of two byte tensors at these offsets."""
    entries = {
        name: tensor_entry("U8", [end - begin], begin, end) for name, (begin, end) in (("a", first), ("b", second))
    }
    return safetensors_bytes(entries, bytes(nbytes))


HEADERS = {
    "01_empty_file": (b"", "the file is 0 bytes long"),
    "01_seven_bytes": (bytes(7), "the file is 7 bytes long"),
    "02_header_len_zero": (bytes(16), "is 0 bytes long"),
    "03_header_len_past_eof": (struct.pack("<Q", 500) + b"{}", "is 500 bytes long, but only 2 bytes follow"),
    "03_header_len_one_past_eof": (struct.pack("<Q", 3) + b"{}", "is 3 bytes long, but only 2 bytes follow"),
    "04_header_len_huge": (b"\xff" * 8 + b"{}", "at most 100000000 are allowed"),
    "04_header_too_large": (struct.pack("<Q", 100_000_001) + b"{}", "is 100000001 bytes long, at most"),
    "05_header_not_json": (safetensors_bytes(b"{nope}"), "header: is not JSON"),
    "05_header_all_spaces": (safetensors_bytes(b"    "), "header: is not JSON"),
    "05_header_number_of_5000_digits": (safetensors_bytes(b'{"t":' + b"9" * 5000 + b"}"), "holds an integer of more"),
    "06_header_is_list": (safetensors_bytes(b"[]"), "holds a list, an object is needed"),
    "06_header_is_null": (safetensors_bytes(b"null"), "holds null, an object is needed"),
    "07_header_trailing_garbage": (safetensors_bytes(b"{} x"), "is not JSON: extra data"),
    "07_header_trailing_nul": (safetensors_bytes(b"{}\0\0"), "is not JSON: extra data"),
    "08_header_not_utf8": (safetensors_bytes(b'{"\xff":1}'), "is not UTF-8 at byte 2"),
    "08_header_bom": (safetensors_bytes(b"\xef\xbb\xbf{}"), "is not JSON"),
    "08_header_half_surrogate_pair": (safetensors_bytes(b'{"\\ud800":1}'), "half a surrogate pair"),
    "09_duplicate_key": (
        safetensors_bytes(b'{"t":%b,"t":%b}' % ((json.dumps(ENTRY).encode(),) * 2), bytes(8)),
        "key 't' occurs twice",
    ),
    "09_duplicate_key_in_entry": (
        safetensors_bytes(b'{"t":{"dtype":"U8","dtype":"U8","shape":[8],"data_offsets":[0,8]}}', bytes(8)),
        "key 'dtype' occurs twice",
    ),
    "10_metadata_not_str": (safetensors_bytes({"__metadata__": {"a\n": 1}}), r"__metadata__: 'a\\n' is a number"),
    "10_metadata_not_object": (safetensors_bytes({"__metadata__": []}), "__metadata__: is a list"),
    "10_entry_not_object": (safetensors_bytes({"t": [1]}), "t: is a list"),
    "10_metadata_of_300000": (
        safetensors_bytes(b'{"__metadata__":{' + b",".join(b'"%d":""' % number for number in range(300_000)) + b"}}"),
        "__metadata__: has more than 262144 entries",
    ),
    "10_metadata_of_9_mib": (
        safetensors_bytes({"__metadata__": {str(number): "x" * (3 << 20) for number in range(3)}}),
        "__metadata__: is longer than 8388608 characters",
    ),
    "10_metadata_string_of_5_mib": (
        safetensors_bytes({"__metadata__": {"x": "x" * (5 << 20)}}),
        "header: holds more than 4194304 characters in one value",
    ),
    "11_dtype_unknown": (_entry(dtype="F33"), "t: dtype is 'F33', allowed are BOOL, "),
    "11_dtype_lower_case": (_entry(dtype="f32"), "t: dtype is 'f32'"),
    "11_dtype_missing": (_entry(dtype=...), "t: dtype is None"),
    "11_dtype_list": (_entry(dtype=["F32"]), "t: dtype is "),
    "11_dtype_long": (_entry(dtype="F" * 9000), r"t: dtype is 'F+\.\.\., allowed"),
    "12_shape_missing": (_entry(shape=...), "t: shape is .*, a list of non-negative integers is needed"),
    "12_shape_negative": (_entry(shape=[-2]), "t: shape is .*, a list of non-negative integers is needed"),
    "12_shape_two_negatives": (_entry(shape=[-1, -2]), "t: shape is .*, a list of non-negative integers is needed"),
    "12_shape_float": (_entry(shape=[2.0]), "t: shape is .*, a list of non-negative integers is needed"),
    "12_shape_bool": (_entry(shape=[2, True]), "t: shape is .*, a list of non-negative integers is needed"),
    "12_shape_string": (_entry(shape="2"), "t: shape is .*, a list of non-negative integers is needed"),
    "12_shape_number": (_entry(shape=2), "t: shape is .*, a list of non-negative integers is needed"),
    "13_shape_overflow": (_entry(shape=[1 << 62, 4, 2]), "t: shape .* has 2.63 elements or more"),
    "13_shape_overflow_to_right_size": (_entry(shape=[(1 << 62) + 1, 2]), "t: shape .* has 2.63 elements or more"),
    "13_shape_overflow_behind_zero": (_entry(shape=[0, 1 << 62, 4]), "t: shape .* has 2.63 elements or more"),
    "13_shape_of_large_numbers": (_entry(shape=[10**300] * 60), "t: shape .* has 2.63 elements or more"),
    "13_shape_minus_zero": (
        safetensors_bytes(b'{"t":{"dtype":"U8","shape":[-0],"data_offsets":[0,0]}}'),
        r"t: shape is \[-0\.0\], a list of non-negative",
    ),
    "13_ignored_number_of_310_digits": (
        safetensors_bytes(b'{"t":{"dtype":"U8","shape":[0],"data_offsets":[0,0],"x":%s}}' % (b"1" * 310)),
        r"header: holds '1+\.\.\., numbers must be finite",
    ),
    "13_shape_of_many_numbers": (_entry(shape=[9] * 300_000), "t: shape has 300000 dimensions, at most 64 are allowed"),
    "13_entry_of_many_numbers": (
        _entry(shape=[9] * 900_000),
        "header: holds more than 1048576 characters in one value",
    ),
    "14_shape_bytes_mismatch": (_entry(shape=[3]), r"span 8 bytes, F32 \[3\] takes 12"),
    "14_shape_scalar_mismatch": (_entry(shape=[]), r"span 8 bytes, F32 \[\] takes 4"),
    "14_shape_half_bytes": (_entry(dtype="F4", shape=[15]), r"span 8 bytes, F4 \[15\] takes 7.5"),
    "14_shape_of_many_ones": (_entry(shape=[1] * 64), r"takes 4"),
    "15_offsets_one": (_entry(data_offsets=[8]), r"t: data_offsets is .*, \[begin, end\] in bytes is needed"),
    "15_offsets_three": (_entry(data_offsets=[0, 8, 8]), r"t: data_offsets is .*, \[begin, end\] in bytes is needed"),
    "15_offsets_missing": (_entry(data_offsets=...), r"t: data_offsets is .*, \[begin, end\] in bytes is needed"),
    "15_offsets_bool": (_entry(data_offsets=[False, 8]), r"t: data_offsets is .*, \[begin, end\] in bytes is needed"),
    "15_offsets_float": (_entry(data_offsets=[0.0, 8.0]), r"t: data_offsets is .*, \[begin, end\] in bytes is needed"),
    "16_offsets_reversed": (_entry(data_offsets=[8, 0]), "t: data_offsets end at 0, before they begin at 8"),
    "17_offsets_negative": (_entry(data_offsets=[-8, 0]), r"t: data_offsets is .*, \[begin, end\] in bytes is needed"),
    "18_offsets_overlap": (_two((0, 5), (4, 8), 8), "b: begins at 4 and overlaps the tensor before it"),
    "19_offsets_alias": (_two((0, 8), (0, 8), 8), "b: begins at 0 and overlaps the tensor before it"),
    "20_offsets_hole": (_two((0, 4), (5, 8), 8), "b: begins at 5 and leaves a hole before it, 4 is needed"),
    "20_offsets_not_from_0": (_entry(data_offsets=[1, 9]), "t: begins at 1 and leaves a hole before it"),
    "20_offsets_far_away": (_entry(shape=[0], data_offsets=[10**308] * 2), "t: begins at 10+.* and leaves a hole"),
    "21_offsets_past_eof": (_entry(shape=[4], data_offsets=[0, 16]), "file: is .*, 8 bytes short of"),
    "21_offsets_far_past_eof": (_entry(shape=[1 << 40], data_offsets=[0, 4 << 40]), "bytes short of"),
    "22_data_truncated": (GOOD[:-1], "file: is .*, 1 bytes short of what the header describes"),
    "23_data_trailing": (GOOD + b"\0", "file: holds 1 bytes after the last tensor, none are allowed"),
    "24_lfs_pointer": (LFS_POINTER, "is a Git LFS pointer"),
    "24_html_page": (b"<!doctype html><html><body>404</body></html>", "is an HTML page"),
    "24_html_page_without_doctype": (b"<HTML><body>Sign in</body></HTML>", "is an HTML page"),
    "24_pickle_inside": (pickle.dumps({"t": list(range(50))}, protocol=2), "is a pickle"),
    "24_pickle_of_protocol_4": (pickle.dumps({"t": list(range(50))}, protocol=4), "is a pickle"),
    "24_zip_inside": (b"PK\x03\x04" + bytes(60), "is a zip archive or a PyTorch pickle"),
    "24_gguf_inside": (b"GGUF" + struct.pack("<IQQ", 3, 0, 0), "is a GGUF file under another name"),
    "24_json_inside": (b'{"weight_map": {}}', "begins with JSON instead of a header length"),
    "nested_deeply": (safetensors_bytes(b'{"t":' + b"[" * 100_000), "header: is nested too deeply"),
    "nested_128_levels": (
        safetensors_bytes({"t": {**ENTRY, "more": json.loads("[" * 126 + "]" * 126)}}, bytes(8)),
        "is nested too deeply, at most 127 levels are allowed",
    ),
    "nested_200_levels": (
        safetensors_bytes(b'{"t":{"a":1,"b":2,"c":3,"d":' + b"[" * 200 + b"]" * 200 + b"}}"),
        "is nested too deeply, at most 127 levels are allowed",
    ),
    "nan": (safetensors_bytes(b'{"t":NaN}'), "holds 'NaN', numbers must be finite"),
}


INDEX = "model.safetensors.index.json"
INDEXES = {
    "25_missing_shard": ('{"weight_map":{"t":"a.safetensors","u":"b.safetensors"}}', "b.safetensors", "is missing"),
    "25_shard_below_a_file": (
        '{"weight_map":{"t":"a.safetensors/b.safetensors"}}',
        "a.safetensors/b.safetensors",
        "is missing",
    ),
    "25_shard_is_a_folder": ('{"weight_map":{"t":"sub.safetensors"}}', "sub.safetensors", "is not a regular file"),
    "26_not_json": ("{", INDEX, "is not JSON"),
    "26_empty": ("", INDEX, "is not JSON"),
    "26_lfs_pointer": (LFS_POINTER.decode(), INDEX, "is a Git LFS pointer"),
    "26_list": ("[]", INDEX, "holds a list"),
    "26_nan": ('{"weight_map":{"t":"a.safetensors"},"x":NaN}', INDEX, "holds 'NaN'"),
    "27_no_weight_map": ("{}", INDEX, "weight_map: is .*, an object of tensor and file names is needed"),
    "27_weight_map_empty": ('{"weight_map":{}}', INDEX, "weight_map: is .*, an object of tensor and file names"),
    "27_weight_map_list": (
        '{"weight_map":["a.safetensors"]}',
        INDEX,
        "weight_map: is .*, an object of tensor and file names",
    ),
    "27_value_not_str": ('{"weight_map":{"t":1}}', INDEX, "t: file name 1, a path of a"),
    "28_path_traversal": ('{"weight_map":{"t":"../a.safetensors"}}', INDEX, "t: file name '../a.safetensors', a path"),
    "28_path_traversal_inside": ('{"weight_map":{"t":"sub/../a.safetensors"}}', INDEX, "a path of a"),
    "28_absolute_path": ('{"weight_map":{"t":"/etc/passwd"}}', INDEX, "t: file name '/etc/passwd', a path of a"),
    "28_backslash": ('{"weight_map":{"t":"..\\\\a.safetensors"}}', INDEX, "a path of a"),
    "28_nul": ('{"weight_map":{"t":"a\\u0000"}}', INDEX, r"t: file name 'a\\x00', a path of a"),
    "28_empty_name": ('{"weight_map":{"t":""}}', INDEX, "t: file name '', a path of a"),
    "28_dot": ('{"weight_map":{"t":"."}}', INDEX, "t: file name '.', a path of a"),
    "28_link_out_of_the_folder": (
        '{"weight_map":{"t":"out.safetensors"}}',
        "out.safetensors",
        "is a link to '.*', a file",
    ),
    "28_folder_that_is_a_link": ('{"weight_map":{"t":"up/x.safetensors"}}', "up/x.safetensors", "is a link to '.*', a"),
    "28_link_to_itself": ('{"weight_map":{"t":"loop.safetensors"}}', "loop.safetensors", "is a link to itself"),
    "28_link_to_nothing": ('{"weight_map":{"t":"nothing.safetensors"}}', "nothing.safetensors", "is missing"),
    "28_pipe": ('{"weight_map":{"t":"pipe.safetensors"}}', "pipe.safetensors", "is not a regular file"),
    "28_name_of_300_bytes": (
        '{"weight_map":{"t":"%s.safetensors"}}' % ("n" * 300),
        "n" * 300 + ".safetensors",
        "has a name that is too long",
    ),
    "28_pickle": ('{"weight_map":{"t":"pytorch_model.bin"}}', INDEX, "t: file name 'pytorch_model.bin', a path of a"),
    "28_index_itself": (f'{{"weight_map":{{"t":"{INDEX}"}}}}', INDEX, "a path of a .safetensors file"),
    "29_tensor_not_in_shard": (
        '{"weight_map":{"x":"a.safetensors"}}',
        INDEX,
        "x: the index places it in 'a.safetensors'",
    ),
    "30_dup_key": ('{"weight_map":{"t":"a.safetensors","t":"a.safetensors"}}', INDEX, "key 't' occurs twice"),
}


def write_index(folder: Path, text: str) -> None:
    """Write an index beside what the cases name: a file, a folder, a pipe, and links."""
    outside = folder.with_name(f"{folder.name}-outside")
    outside.mkdir()
    for place in (outside / "x.safetensors", folder / "a.safetensors"):
        place.write_bytes(safetensors_bytes({"t": ENTRY}, bytes(8)))
    (folder / "sub.safetensors").mkdir()
    (folder / "out.safetensors").symlink_to(outside / "x.safetensors")
    (folder / "up").symlink_to(outside)
    (folder / "loop.safetensors").symlink_to("loop.safetensors")
    (folder / "nothing.safetensors").symlink_to("nowhere")
    os.mkfifo(folder / "pipe.safetensors")
    (folder / INDEX).write_text(text)


CONFIGS = {
    "not_json": ("{", "json: is not JSON"),
    "empty": ("", "json: is not JSON"),
    "list": ("[]", "json: holds a list"),
    "tie_string": (json.dumps(llama_config(tie_word_embeddings="true")), "tie_word_embeddings: is 'true', true or"),
    "tie_number": (json.dumps(llama_config(tie_word_embeddings=1)), "tie_word_embeddings: is 1, true or false"),
    "text_tie_string": (
        json.dumps({"text_config": llama_config(tie_word_embeddings="false")}),
        "text_config.tie_word_embeddings: is 'false'",
    ),
    "duplicate_key": ('{"vocab_size":1,"vocab_size":2}', "key 'vocab_size' occurs twice"),
}
