"""Hostile sources: whatever config.json says, planning ends soon, with a plan or an error of one line."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from arrangements import Changed, arranged, change
from folders import read_index
from freetoken_sources import NAMES, write_source, write_spec

import ftw
from ftw.checkpoint.config import parse_model_config
from ftw.dtypes import DTYPES
from ftw.layouts.freetoken.arrangement import FreetokenArrangement
from ftw.layouts.freetoken.served import find_obstacle

VALUES = [
    *(10**9, -1, 0, True, 1.5, float("inf"), "x" * 3000, "", None, [], [[1]], [{"a": []}], ["re:(a*)*b"] * 3),
    *([10**9] * 5, [10**6] * 5000, [-1], [None], {}, {"a": {"b": [1]}}),
]
FILES = ("config.json", "inference/config.json", "hf_quant_config.json")
TRIALS = 150


def walk(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the place of each value in an object, and of the first ones in its lists."""
    places = value if isinstance(value, dict) else range(min(len(value), 2)) if isinstance(value, list) else ()
    for place in places:
        yield (*path, place)
        yield from walk(value[place], (*path, place))


def put(content: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    """Return a copy with another value at a place."""
    made = json.loads(json.dumps(content))
    part = made
    for place in path[:-1]:
        part = part[place]
    part[path[-1]] = value
    return made


def changed(checkpoint: ftw.Checkpoint, file: str, content: dict[str, Any]) -> Changed:
    """Return a checkpoint that has another content in one of its files."""
    made = Changed(checkpoint, checkpoint.tensors)
    if file == "config.json":
        made.config = parse_model_config(content, Path(file))
    else:
        made.read_json = lambda name: content if name == file else checkpoint.read_json(name)
    return made


def plan(checkpoint: Any) -> str:
    """Return the message with which a checkpoint is refused, "" if it is not."""
    try:
        FreetokenArrangement(checkpoint)
    except ftw.CheckpointError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", NAMES)
def test_any_value_in_a_configuration_is_taken_or_refused_in_one_line(tmp_path, name):
    generator = random.Random(name)
    num_refused = 0
    with ftw.open_checkpoint(write_source(name, tmp_path)) as checkpoint:
        contents = {file: dict(found) for file in FILES if (found := checkpoint.read_json(file)) is not None}
        places = [(file, path) for file, content in contents.items() for path in walk(content)]
        for _ in range(TRIALS):
            file, path = generator.choice(places)
            try:
                made = changed(checkpoint, file, put(contents[file], path, generator.choice(VALUES)))
            except ftw.CheckpointError:  # a tie flag that is none
                continue
            message, obstacle = plan(made), find_obstacle(made)
            assert "\n" not in f"{message}{obstacle}"
            assert len(message) < 6000
            num_refused += bool(message)
    assert num_refused


def misshape(tensor: Any, generator: random.Random) -> Any:
    """Return a tensor with another shape or type."""
    shape = list(tensor.shape)
    shapes = [[], [0, *shape[1:]], [*shape[:-1], 0], [1, *shape], shape[:-1], shape[::-1], [*shape[:-1], 3], shape]
    shape, dtype = generator.choice(shapes), generator.choice([tensor.dtype, "F32", "U8", "F8_E4M3", "I64"])
    nbytes = DTYPES[dtype].bits // 8
    for size in shape:
        nbytes *= size
    return tensor._replace(shape=tuple(shape), dtype=dtype, nbytes=nbytes)


@pytest.mark.parametrize("name", NAMES)
def test_any_shape_of_a_tensor_is_taken_or_refused_in_one_line(tmp_path, name):
    generator = random.Random(name)
    num_refused = 0
    with ftw.open_checkpoint(write_source(name, tmp_path)) as checkpoint:
        names = list(checkpoint.tensors)
        for trial in range(TRIALS // 2):
            one = generator.choice(names)
            role = one.split(".")[-2:]
            alike = [other for other in names if trial % 2 and other.split(".")[-2:] == role] or [one]
            seed = generator.random()
            odd = {other: misshape(checkpoint.tensors[other], random.Random(seed)) for other in alike}
            message = plan(Changed(checkpoint, {**checkpoint.tensors, **odd}))
            assert "\n" not in message
            num_refused += bool(message)
    assert num_refused


def text_of(config: dict[str, Any]) -> dict[str, Any]:
    return config.get("text_config", config)


@pytest.mark.parametrize(
    ("name", "key", "value", "problem"),
    [
        ("llama", "num_hidden_layers", 10**9, r"num_hidden_layers: is 1000000000, a count of at most 10000"),
        ("qwen3_moe", "num_hidden_layers", 10**9, r"num_hidden_layers: is 1000000000, a count of at most 10000"),
        ("qwen3_moe", "num_experts", 10**9, r"experts: are 1000000000 in a layer, .* 10000 are allowed at most"),
        ("qwen3_vl_moe", "num_experts", 10**9, r"experts: are 1000000000 in a layer, 4 tensors are of all of these"),
        ("qwen4_exp", "split_ngram_parts", 10**9, r"n-gram table: its part \d+ is missing"),
        ("glm_moe_dsa", "first_k_dense_replace", -1, r"first_k_dense_replace: is -1, a count of at most 10000"),
        ("deepseek_v41", "engram_layer_ids", [[1]], r"engram_layer_ids: is \[\[1\]\], a list of numbers or names"),
        ("deepseek_v41", "compress_ratios", ["4"] * 99, r"compress_ratios: is \['4'.*, a list of counts is needed"),
        ("deepseek_v41", "num_hidden_layers", 0, r"layers\.0\.ffn\.gate\.bias_vl|is an expert's of layer 0"),
        ("minimax_m3", "layer_types", [{}] * 99, r"layer_types: is .*, a list of numbers or names is needed"),
    ],
    ids=(
        "layers layers-of-experts experts stacked-experts table-parts negative nested-list strings no-layers objects"
    ).split(),
)
def test_number_that_would_take_ages_is_refused_by_name(tmp_path, name, key, value, problem):
    def edit(_spec, config, _tensors):
        text_of(config)[key] = value

    with pytest.raises(ftw.CheckpointError, match=problem) as caught, arranged(change(name, edit), tmp_path):
        pass
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [10**9, -1, "many", [1]], ids=str)
@pytest.mark.parametrize(
    ("name", "key"), [("qwen3_vl", "depth"), ("gemma4", "num_hidden_layers")], ids=["qwen3_vl", "gemma4"]
)
def test_number_of_blocks_of_a_vision_tower_is_bounded(tmp_path, name, key, value):
    def edit(_spec, config, _tensors):
        config["vision_config"][key] = value

    problem = rf"config\.json: {key}: is .*, a count of at most 10000 is needed"
    with pytest.raises(ftw.CheckpointError, match=problem), arranged(change(name, edit), tmp_path):
        pass


def test_endless_list_of_taps_is_refused_at_the_first_that_is_not_there(tmp_path):
    def edit(_spec, config, _tensors):
        config["vision_config"]["deepstack_visual_indexes"] = [0] * 200_000

    problem = r"visual\.deepstack_merger_list\.\d+\.norm\.weight: is missing"
    with pytest.raises(ftw.CheckpointError, match=problem), arranged(change("qwen3_vl", edit), tmp_path):
        pass


def test_inspect_of_an_ftw_bounds_the_same_numbers(tmp_path):
    ftw.convert(write_source("qwen3_moe", tmp_path / "source"), tmp_path / "out", layout="freetoken")
    path = tmp_path / "out" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_bytes()), "num_hidden_layers": 10**9}))
    assert read_index(tmp_path / "out")["quant_format"] == "bf16"
    found = ftw.inspect(tmp_path / "out").freetoken_obstacle
    assert found == "config.json: num_hidden_layers: is 1000000000, a count of at most 10000 is needed"


@pytest.mark.parametrize(
    ("pattern", "problem"),
    [
        ("re:(a*)*b", None),
        ("re:(.*.*.*.*.*.*)*[^m]x", None),
        ("re:((a?){30}a{30})+b", None),
        ("re:(?=a)b", r"quantization_config: holds '\(\?=a\)b', which holds \(\?=a, which is not allowed"),
        ("re:" + "a" * 5000, r"which has 5000 characters and 0 groups, at most 1000 and 30 are allowed"),
    ],
    ids=["nested", "dots", "counted", "lookahead", "long"],
)
def test_regular_expression_of_a_source_cannot_make_it_hang(tmp_path, pattern, problem):
    """Names of up to 256 characters, on which Python's own matching would not end."""

    def edit(_spec, config, tensors):
        config["quantization_config"]["ignore"].append(pattern)
        tensors[f"mtp.{'a' * 200}.weight"] = ["BF16", [2, 2], "model.safetensors"]

    spec = change("qwen3_5_nvfp4_ct", edit)
    if problem is None:
        with arranged(spec, tmp_path) as arrangement:
            assert arrangement.tensors
    else:
        with pytest.raises(ftw.CheckpointError, match=problem), arranged(spec, tmp_path):
            pass


def test_endless_name_is_refused(tmp_path):
    def edit(_spec, _config, tensors):
        tensors["layers.1." * 7000 + "weight"] = ["BF16", [2], "model.safetensors"]

    with (
        pytest.raises(
            ftw.CheckpointError, match=r"has 63006 characters, 256 printable ones are allowed at most"
        ) as caught,
        arranged(change("llama", edit), tmp_path),
    ):
        pass
    assert len(str(caught.value)) < 6000


def test_endless_groups_of_a_scheme_are_refused(tmp_path):
    def edit(_spec, config, _tensors):
        declared = config["quantization_config"]
        group = next(iter(declared["config_groups"].values()))
        declared["config_groups"] = {str(number): group for number in range(101)}

    (tmp_path / "source").mkdir()
    with ftw.open_checkpoint(write_spec(change("qwen3_5_nvfp4_ct", edit), tmp_path / "source")) as checkpoint:
        assert "config_groups are 101, at most 100 are allowed" in plan(checkpoint)


def test_line_breaks_of_a_source_stand_in_no_message(tmp_path):
    def rename(_spec, config, _tensors):
        config["architectures"] = ["Llama\nForCausalLM"]

    def add(_spec, _config, tensors):
        tensors["model.layers.0.\nmlp.weight"] = ["BF16", [2], "model.safetensors"]

    for number, edit in enumerate((rename, add)):
        (tmp_path / str(number)).mkdir()
        with ftw.open_checkpoint(write_spec(change("llama", edit), tmp_path / str(number))) as checkpoint:
            message, obstacle = plan(checkpoint), find_obstacle(checkpoint)
        assert "\\n" in message
        assert obstacle
        assert "\n" not in f"{message}{obstacle}"
