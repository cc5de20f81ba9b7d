"""Files of a checkpoint: reads by position, one or many at a time; strict JSON; which links, names and foreign files.

Imports: `ftw.host`. No torch.
"""

from ftw.files.debris import DEBRIS_FOLDERS, is_debris, original_of
from ftw.files.file_signatures import find_impostor
from ftw.files.json_stream import JsonStream
from ftw.files.links import MAX_NAME_NBYTES, Roots, is_inside, is_name_inside
from ftw.files.parallel_read import Part, default_num_threads, parse_num_threads, read_parts
from ftw.files.plain_file import open_plain_file
from ftw.files.strict_json import (
    MAX_DEPTH,
    MAX_NBYTES,
    are_counts,
    is_count,
    json_type,
    open_json_file,
    read_json_file,
    read_json_list,
    short_repr,
)
from ftw.files.weight_file import DIRECT_ALIGNMENT, DIRECT_MIN_JOB_NBYTES, OpenFile, WeightFile

__all__ = [
    "DEBRIS_FOLDERS", "DIRECT_ALIGNMENT", "DIRECT_MIN_JOB_NBYTES", "MAX_DEPTH", "MAX_NAME_NBYTES", "MAX_NBYTES",
    "JsonStream", "OpenFile", "Part", "Roots", "WeightFile", "are_counts", "default_num_threads", "find_impostor",
    "is_count", "is_debris", "is_inside", "is_name_inside", "json_type", "open_json_file", "open_plain_file",
    "original_of", "parse_num_threads", "read_json_file", "read_json_list", "read_parts", "short_repr",
]  # fmt: skip
