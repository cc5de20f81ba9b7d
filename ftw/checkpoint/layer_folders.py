"""Layers of a model that lie in folders of their own, as sentence-transformers lays them out.

modules.json is a list of {"idx", "name", "path", "type"}. The model itself has the path "", a dense layer "2_Dense":
its weights are 2_Dense/model.safetensors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftw.errors import CheckpointError
from ftw.files import is_name_inside, read_json_list

if TYPE_CHECKING:
    from ftw.hub import Place

_MODULES_NAME = "modules.json"
_WEIGHTS_NAME, _PICKLE_NAME = "model.safetensors", "pytorch_model.bin"
_MAX_LAYERS = 64


def find_layer_files(place: Place) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the weight files of such layers, relative to the folder, and warnings: they are not among the tensors."""
    if not place.is_folder or not place.has(_MODULES_NAME) or place.leads_out(_MODULES_NAME):
        return (), ()
    try:
        modules = read_json_list(place.folder / _MODULES_NAME, place.locate(_MODULES_NAME))
    except CheckpointError as error:
        return (), (f"what layers lie beside the model is not known: {place.describe(error)}",)
    paths = [module["path"] for module in modules if isinstance(module, dict) and isinstance(module.get("path"), str)]
    folders = sorted({path for path in paths if path and is_name_inside(path)})[:_MAX_LAYERS]
    files = tuple(f"{path}/{_WEIGHTS_NAME}" for path in folders if place.has(f"{path}/{_WEIGHTS_NAME}"))
    pickles = [f"{path}/{_PICKLE_NAME}" for path in folders if place.has(f"{path}/{_PICKLE_NAME}")]
    lone = [name for name in pickles if name.replace(_PICKLE_NAME, _WEIGHTS_NAME) not in files]
    what = f"holds a layer of the model by {_MODULES_NAME}, and is not among its tensors"
    copied = (f"{name} {what}; a conversion copies the file as it is" for name in files)
    return files, (*copied, *(f"{name} {what}; it is a pickle, which a conversion leaves out" for name in lone))
