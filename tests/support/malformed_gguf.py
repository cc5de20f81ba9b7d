"""Malformed GGUF files, by the numbers of the list that the reader is held to: content, and what is said of it."""

import pickle
import struct
from pathlib import Path
from typing import Any

from gguf_builder import ARCHITECTURE, Q6_K, Q8_0, entry, gguf_bytes, kv, shard_kvs, text, value

LFS_POINTER = (
    b"version https://git-lfs.github.com/spec/v1\n"
    b"oid sha256:4665a5ea423c2713d436b5ee50593a9640e0018c1550b5a0002f74190d6caea8\nsize 12345\n"
)
DATA = bytes(32)  # of the one tensor that `entry()` describes
GOOD = gguf_bytes([entry()], DATA)


def keyed(*more: bytes) -> bytes:
    """Return a file without tensors whose key-values go on with `more`."""
    return gguf_bytes(kvs=[ARCHITECTURE, *more])


def _alignment(kind: str, content: int) -> bytes:
    return keyed(kv("general.alignment", kind, content))


def _two(second_offset: int, nbytes: int) -> bytes:
    """Return a file of two tensors of 40 bytes, the first one at 0."""
    return gguf_bytes([entry("a", (10,)), entry("b", (10,), offset=second_offset)], bytes(nbytes))


def nested_arrays(levels: int) -> bytes:
    """Return a key whose value is arrays in arrays, the innermost of no numbers."""
    heads = struct.pack("<IQ", 9, 1) * (levels - 1) + struct.pack("<IQ", 0, 0)
    return text("k") + struct.pack("<I", 9) + heads


WIDE = kv("llama.embedding_length", "u32", 16)
FILES = {
    "01_empty_file": (b"", "header: the file is 0 bytes long, a header takes at least 24"),
    "01_only_magic": (b"GGUF", "the file is 4 bytes long"),
    "01_part_of_magic": (b"GG", "the file is 2 bytes long"),
    "01_one_byte_short": (gguf_bytes(kvs=[])[:-1], "the file is 23 bytes long"),
    "02_bad_magic": (gguf_bytes(magic=b"GGML"), "file: begins with b'GGML', b'GGUF' is needed"),
    "02_magic_of_zeros": (bytes(64), r"begins with b'\\x00\\x00\\x00\\x00', b'GGUF' is needed"),
    "02_magic_reversed": (gguf_bytes(magic=b"FUGG"), "begins with b'FUGG'"),
    "02_magic_lower_case": (gguf_bytes(magic=b"gguf"), "begins with b'gguf'"),
    "02_lfs_pointer": (LFS_POINTER, "file: is a Git LFS pointer, .* fetch it with 'git lfs pull'"),
    "02_html_page": (b"<!DOCTYPE html><html><body>404</body></html>", "file: is an HTML page"),
    "02_zip": (b"PK\x03\x04" + bytes(60), "is a zip archive or a PyTorch pickle, which is never opened"),
    "02_pickle": (pickle.dumps({"t": list(range(50))}, protocol=2), "is a pickle, which is never opened"),
    "03_version_0": (gguf_bytes(version=0), "version: is 0, 2 and 3 are read"),
    "03_version_1": (gguf_bytes(version=1), "version: is 1, 2 and 3 are read"),
    "03_version_4": (gguf_bytes(version=4), "version: is 4, 2 and 3"),
    "03_version_99": (gguf_bytes(version=99), "version: is 99, 2 and 3"),
    "03_version_99_big_endian": (gguf_bytes(version=99, order=">"), "version: is 99, 2 and 3"),
    "04_big_endian_version_only": (gguf_bytes([entry()], DATA, version=3 << 24), "the number of keys is 72057594037"),
    "05_kv_count_huge": (gguf_bytes(num_keys=1 << 60), f"the number of keys is {1 << 60}, of at least 14 bytes each"),
    "05_kv_count_negative": (gguf_bytes(num_keys=(1 << 64) - 1), f"the number of keys is {(1 << 64) - 1}, "),
    "05_kv_count_wraps": (gguf_bytes(num_keys=(1 << 64) // 14 + 1), "of at least 14 bytes each, but only"),
    "05_kv_count_one_more": (gguf_bytes(num_keys=2), "key 1: 8 bytes are needed at byte .* only 0 remain"),
    "06_tensor_count_huge": (gguf_bytes(num_tensors=1 << 60), f"the number of tensors is {1 << 60}, of at least 25"),
    "06_tensor_count_negative": (gguf_bytes(num_tensors=(1 << 64) - 1), f"number of tensors is {(1 << 64) - 1}, "),
    "06_tensor_count_one_more": (gguf_bytes([entry()], num_tensors=2, alignment=1), "tensor 1: 8 bytes are needed at"),
    "07_key_len_huge": (keyed(kv("k", "u8", 1, length=1 << 40)), "its name is 1099511627776 bytes long, at most"),
    "07_key_len_65536": (keyed(kv("k" * 65536, "u8", 1)), "key 1: its name is 65536 bytes long, at most 65535"),
    "07_key_len_past_eof": (keyed(kv("k", "u8", 1, length=60000)), "key 1: 60000 bytes are needed at byte"),
    "08_key_empty": (keyed(kv("", "u8", 1)), "key 1: its name is empty"),
    "09_key_duplicate": (keyed(kv("k", "u8", 1), kv("k", "u8", 1)), "key 2: 'k' occurs twice, keys must be unique"),
    "09_key_duplicate_architecture": (keyed(ARCHITECTURE), "key 1: 'general.architecture' occurs twice"),
    "10_key_not_utf8": (keyed(kv(b"k\xff", "u8", 1)), "key 1: its name is not UTF-8 at byte 1"),
    "10_key_half_surrogate_pair": (keyed(kv(b"\xed\xa0\x80", "u8", 1)), "key 1: its name is not UTF-8 at byte 0"),
    "10_architecture_not_utf8": (
        gguf_bytes(kvs=[kv("general.architecture", "str", b"ab\xff")]),
        "general.architecture: its text is not UTF-8 at byte 2",
    ),
    "10_architecture_long": (
        gguf_bytes(kvs=[kv("general.architecture", "str", b"a" * 65536)]),
        "general.architecture: is a string of 65536 bytes, at most 65535 are allowed",
    ),
    "10_value_len_huge": (
        keyed(text("k") + struct.pack("<IQ", 8, 1 << 63)),
        f"k: is a string of {1 << 63} bytes, but only 0 bytes follow",
    ),
    "11_kv_bad_type": (keyed(text("k") + struct.pack("<IQ", 13, 0)), "k: value type is 13, allowed are 0 to 12"),
    "11_kv_bad_type_huge": (keyed(text("k") + struct.pack("<IQ", 0xFFFFFFFF, 0)), "k: value type is 4294967295"),
    "11_array_bad_elem_type": (keyed(kv("k", "array", ("u8", [1]), code=13)), "k: value type is 13, allowed"),
    "11_array_bad_elem_type_nested": (
        keyed(text("k") + struct.pack("<IIQ", 9, 9, 2) + value("array", ("u8", [])) + struct.pack("<IQ", 99, 0)),
        "k: value type is 99",
    ),
    "11_bool_of_7": (keyed(kv("k\n", "bool", 7)), r"k\\n: holds a bool of 7, 0 or 1 is needed"),
    "12_array_len_huge": (
        keyed(kv("k", "array", ("u64", [1]), count=1 << 61)),
        f"k: its number of elements is {1 << 61}, of at least 8 bytes each, but only 8 bytes follow",
    ),
    "12_array_len_wraps": (keyed(kv("k", "array", ("u32", [1]), count=(1 << 62) + 1)), "k: its number of elements is"),
    "12_array_len_one_more": (keyed(kv("k", "array", ("u8", [1]), count=2)), "number of elements is 2, .* only 1"),
    "12_array_of_strings_len_huge": (keyed(kv("k", "array", ("str", ["a"]), count=1 << 60)), "at least 8 bytes each"),
    "12_array_of_strings_one_more": (
        keyed(kv("k", "array", ("str", ["a"] * 8), count=9)),
        "k: 8 bytes are needed at byte .*, but only 0 remain",
    ),
    "12_string_in_array_huge": (
        keyed(text("k") + struct.pack("<IIQQ", 9, 8, 1, (1 << 64) - 1)),
        "k: 18446744073709551623 bytes are needed at byte",
    ),
    "12_string_in_array_past_eof": (keyed(text("k") + struct.pack("<IIQQ", 9, 8, 1, 1)), "k: 9 bytes are needed"),
    "12_array_of_arrays_len_huge": (keyed(text("k") + struct.pack("<IIQ", 9, 9, 1 << 60)), "of at least 12 bytes each"),
    "13_array_deep_nesting": (keyed(nested_arrays(128)), "k: its arrays are nested more than 127 levels deep"),
    "13_array_very_deep_nesting": (keyed(nested_arrays(100_000)), "k: its arrays are nested more than 127 levels deep"),
    "14_alignment_zero": (_alignment("u32", 0), "general.alignment: is 0, a power of two from 1 to 1048576 is needed"),
    "14_alignment_not_pow2": (_alignment("u32", 24), "general.alignment: is 24, a power of two"),
    "14_alignment_huge": (_alignment("u32", 1 << 30), "general.alignment: is 1073741824, a power of two"),
    "14_alignment_u64": (_alignment("u64", 32), "general.alignment: is a UINT64, a UINT32 is needed"),
    "14_alignment_i32": (_alignment("i32", -32), "general.alignment: is a INT32, a UINT32 is needed"),
    "14_alignment_array": (
        keyed(kv("general.alignment", "array", ("u32", [32]))),
        "general.alignment: is a ARRAY, a UINT32 is needed",
    ),
    "15_ndims_0_packed": (
        gguf_bytes([entry(sizes=(), code=Q8_0)], bytes(34)),
        "t: has rows of 1 elements, Q8_0 needs a multiple of 32",
    ),
    "15_ndims_5": (gguf_bytes([entry(sizes=(8, 1, 1, 1, 1))], DATA), "t: has 5 dimensions, at most 4 are allowed"),
    "15_ndims_huge": (gguf_bytes([entry(dimensions=0xFFFFFFFF)], DATA), "t: has 4294967295 dimensions"),
    "17_dim_overflow": (gguf_bytes([entry(sizes=(1 << 62, 4))], DATA), r"t: shape \[4, \d+\] has 2.63 elements"),
    "17_dim_overflow_to_right_size": (
        gguf_bytes([entry(sizes=(8, (1 << 61) + 1))], DATA),
        "t: shape .* has 2.63 elements or more",
    ),
    "17_dim_overflow_behind_zero": (gguf_bytes([entry(sizes=(0, 1 << 62, 4))], DATA), "has 2.63 elements or more"),
    "17_dim_overflow_bytes": (
        gguf_bytes([entry(sizes=((1 << 62) + 8,))], DATA),
        f"t: ends at byte {4 * ((1 << 62) + 8) + 128}, but the file has only 160",
    ),
    "17_dim_negative": (gguf_bytes([entry(sizes=((1 << 64) - 8,))], DATA), "has 2.63 elements or more"),
    "18_type_unknown": (
        gguf_bytes([entry(code=99)], DATA),
        "t: type is 99, which the installed gguf package does not know",
    ),
    "18_type_removed_4": (gguf_bytes([entry(code=4)], DATA), "t: type is 4, which the installed gguf package"),
    "18_type_negative": (gguf_bytes([entry(code=0xFFFFFFFF)], DATA), "t: type is 4294967295, which"),
    "19_row_not_block_multiple": (
        gguf_bytes([entry(sizes=(48, 2), code=Q8_0)], bytes(204)),
        "t: has rows of 48 elements, Q8_0 needs a multiple of 32",
    ),
    "19_row_not_block_multiple_k": (
        gguf_bytes([entry(sizes=(128, 2), code=Q6_K)], bytes(420)),
        "t: has rows of 128 elements, Q6_K needs a multiple of 256",
    ),
    "20_offset_past_eof": (gguf_bytes([entry(offset=64)], DATA), "t: ends at byte 224, but the file has only 160"),
    "20_offset_past_eof_of_an_empty_one": (gguf_bytes([entry(sizes=(0,), offset=64)], DATA), "t: ends at byte 192"),
    "21_offset_wraps": (
        gguf_bytes([entry(offset=(1 << 64) - 128)], DATA),
        f"t: ends at byte {(1 << 64) + 32}, but the file has only 160",
    ),
    "21_offset_wraps_of_an_empty_one": (
        gguf_bytes([entry(sizes=(0,), offset=(1 << 64) - 128)], DATA),
        f"t: ends at byte {1 << 64}",
    ),
    "22_offset_unaligned": (
        gguf_bytes([entry(offset=8)], bytes(64)),
        "t: begins at byte 8 of the data, a multiple of 32 is needed",
    ),
    "22_offset_unaligned_to_64": (
        gguf_bytes(
            [entry(offset=32)], bytes(96), kvs=[ARCHITECTURE, kv("general.alignment", "u32", 64)], alignment=64
        ),
        "t: begins at byte 32 of the data, a multiple of 64 is needed",
    ),
    "23_offset_overlap": (_two(32, 128), "b: begins at byte .* and overlaps the tensor before it, which ends at"),
    "23_offset_alias": (_two(0, 128), "b: begins at byte .* of the file and overlaps the tensor before it"),
    "24_truncated_data": (GOOD[:-1], "t: ends at byte 160, but the file has only 159"),
    "24_truncated_kv": (gguf_bytes()[:-1], "general.architecture: is a string of 5 bytes, but only 4 bytes follow"),
    "24_truncated_tensor_info": (gguf_bytes([entry()], alignment=1)[:-1], "t: 20 bytes are needed at byte .* only 19"),
    "25_tensor_dup_name": (
        gguf_bytes([entry(), entry(offset=32)], bytes(64)),
        "tensor 1: 't' occurs twice, names must be unique",
    ),
    "26_tensor_name_not_utf8": (gguf_bytes([entry(b"\xfft")], DATA), "tensor 0: its name is not UTF-8 at byte 0"),
    "26_tensor_name_empty": (gguf_bytes([entry("")], DATA), "tensor 0: its name is empty"),
    "26_tensor_name_long": (gguf_bytes([entry("t" * 64)], DATA), "tensor 0: its name is 64 bytes long, at most 63 are"),
    "26_tensor_name_long_in_bytes": (gguf_bytes([entry("ü" * 32)], DATA), "tensor 0: its name is 64 bytes long, at"),
    "27_no_architecture": (
        gguf_bytes(kvs=[]),
        "general.architecture: is missing, the name of an architecture is needed",
    ),
    "27_architecture_wrong_type": (
        gguf_bytes(kvs=[kv("general.architecture", "u32", 1)]),
        "general.architecture: is a UINT32, the name of an architecture is needed",
    ),
    "27_architecture_zero": (gguf_bytes(kvs=[kv("general.architecture", "u32", 0)]), "architecture: is a UINT32, the"),
    "27_architecture_empty": (gguf_bytes(kvs=[kv("general.architecture", "str", "")]), "is empty, the name of"),
    "28_emb_len_mismatch": (
        gguf_bytes([entry("token_embd.weight", (8, 1))], DATA, kvs=[ARCHITECTURE, WIDE]),
        "token_embd.weight: has 8 columns, but 'llama.embedding_length' is 16",
    ),
    "28_emb_len_mismatch_packed": (
        gguf_bytes([entry("token_embd.weight", (32, 1), Q8_0)], bytes(34), kvs=[ARCHITECTURE, WIDE]),
        "token_embd.weight: has 32 columns, but 'llama.embedding_length' is 16",
    ),
    "29_split_orphan": (
        gguf_bytes(kvs=[ARCHITECTURE, kv("split.count", "u16", 3)]),
        "split.count: is 3, but the file's name is not that of a shard, NAME-00001-of-00003.gguf",
    ),
    "29_split_count_wrong_type": (
        gguf_bytes(kvs=[ARCHITECTURE, kv("split.count", "str", "3")]),
        "split.count: is a STRING, a UINT16 is needed",
    ),
}  # fmt: skip


NAMES = [f"m-0000{number}-of-00003.gguf" for number in (1, 2, 3)]


def write_set(folder: Path, **overrides: Any) -> list[Path]:
    """Write a set of three shards, of a tensor each; `overrides` replace the key-values of the second."""
    keys = {
        "split.no": kv("split.no", "u16", 1),
        "split.count": kv("split.count", "u16", 3),
        "split.tensors.count": kv("split.tensors.count", "i32", 3),
    }
    second = [own for own in {**keys, **overrides}.values() if own]
    kvs = [[ARCHITECTURE, *shard_kvs(0, 3, 3)], second, shard_kvs(2, 3, 3)]
    for number, (name, own) in enumerate(zip(NAMES, kvs, strict=True)):
        (folder / name).write_bytes(gguf_bytes([entry(f"t{number}")], bytes([number]) * 32, kvs=own))
    return [folder / name for name in NAMES]


SECOND_SHARDS = {
    "no_of_another": ({"split.no": kv("split.no", "u16", 0)}, "split.no: is 0, 1 is needed"),
    "no_from_one": ({"split.no": kv("split.no", "u16", 2)}, "split.no: is 2, 1 is needed"),
    "no_missing": ({"split.no": None}, "split.no: is missing, 1 is needed"),
    "no_u32": ({"split.no": kv("split.no", "u32", 1)}, "split.no: is a UINT32, a UINT16 is needed"),
    "no_bool": ({"split.no": kv("split.no", "bool", 1)}, "split.no: is a BOOL, a UINT16 is needed"),
    "no_array": ({"split.no": kv("split.no", "array", ("u16", [1]))}, "split.no: is a ARRAY, a UINT16"),
    "count_other": ({"split.count": kv("split.count", "u16", 2)}, "split.count: is 2, 3 is needed"),
    "count_missing": ({"split.count": None}, "split.count: is missing, 3 is needed"),
    "count_string": ({"split.count": kv("split.count", "str", "3")}, "split.count: is a STRING, a UINT16 is"),
    "tensors_fewer": (
        {"split.tensors.count": kv("split.tensors.count", "i32", 2)},
        "split.tensors.count: is 2, 3 is needed",
    ),
    "tensors_negative": (
        {"split.tensors.count": kv("split.tensors.count", "i32", -3)},
        "split.tensors.count: is -3, 3 is needed",
    ),
    "tensors_missing": ({"split.tensors.count": None}, "split.tensors.count: is missing, 3 is needed"),
    "tensors_u16": (
        {"split.tensors.count": kv("split.tensors.count", "u16", 3)},
        "split.tensors.count: is a UINT16, a INT32 is needed",
    ),
    "architecture_of_a_wrong_type": (
        {"more": kv("general.architecture", "u8", 3)},
        "general.architecture: is a UINT8, the name of an",
    ),
}
