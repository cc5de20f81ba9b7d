import gc
import subprocess
import sys

import pytest
import torch
from torch import nn

from ftw.offloading.tensor_holders import find_holder, place_of, span_of


class Holder(nn.Module):
    """Holds whatever it is given as an attribute named `kept`."""

    def __init__(self, kept: object) -> None:
        super().__init__()
        self.kept = kept


@pytest.fixture
def embedding() -> nn.Embedding:
    return nn.Embedding(7, 3)


def test_place_begins_at_the_root(embedding: nn.Embedding) -> None:
    model = nn.ModuleDict({"model": nn.Sequential(nn.Identity(), embedding)})
    place = place_of(embedding, "weight")
    assert place == ("model.1.weight", "ModuleDict")
    assert str(place) == "model.1.weight of ModuleDict"
    del model


def test_place_of_a_root_is_the_attribute(embedding: nn.Embedding) -> None:
    assert str(place_of(embedding, "weight")) == "weight of Embedding"


def test_place_ends_where_modules_hold_each_other() -> None:
    one, other = nn.Sequential(nn.Identity()), nn.Sequential(nn.Identity())
    one.append(other)
    other._modules["back"] = one
    assert place_of(one, "x").root == "Sequential"
    del other._modules["back"]


def test_module_alone_holds_its_table(embedding: nn.Embedding) -> None:
    model = nn.Sequential(embedding, nn.Linear(3, 7))
    assert find_holder(embedding.weight, {embedding: 1}) is None
    del model


def test_same_parameter_in_another_module_is_found(embedding: nn.Embedding) -> None:
    model = nn.ModuleDict({"embed": embedding, "lm_head": nn.Linear(3, 7)})
    model["lm_head"].weight = embedding.weight
    assert find_holder(embedding.weight, {embedding: 1}) == "lm_head.weight of ModuleDict"


def test_same_module_in_a_second_place_is_found(embedding: nn.Embedding) -> None:
    """SGLang's tied models have `self.lm_head = self.model.embed_tokens`."""
    model = nn.ModuleDict({"embed": embedding, "lm_head": embedding})
    assert find_holder(embedding.weight, {embedding: 1}) == "embed of ModuleDict and lm_head of ModuleDict"
    del model


def test_buffer_of_another_module_is_found(embedding: nn.Embedding) -> None:
    other = nn.Module()
    other.register_buffer("cached", embedding.weight.data)
    assert find_holder(embedding.weight, {embedding: 1}) == "cached of Module"


@pytest.mark.parametrize(
    ("keep", "path"),
    [
        (lambda weight: weight.data, "kept"),
        (lambda weight: weight.detach(), "kept"),
        (lambda weight: weight.detach()[2:4], "kept"),
        (lambda weight: weight.detach().view(torch.int32), "kept"),
        (lambda weight: [1, weight.data], "kept[1]"),
        (lambda weight: (weight.data,), "kept[0]"),
        (lambda weight: {"head": weight.data}, "kept['head']"),
    ],
    ids=["data", "detached", "rows", "other_dtype", "list", "tuple", "dict"],
)
def test_alias_in_another_module_is_found(embedding: nn.Embedding, keep: object, path: str) -> None:
    other = Holder(keep(embedding.weight))
    assert find_holder(embedding.weight, {embedding: 1}) == f"{path} of Holder"
    del other


def test_alias_in_the_module_itself_is_found(embedding: nn.Embedding) -> None:
    embedding.transposed = embedding.weight.data.T
    assert find_holder(embedding.weight, {embedding: 1}) == "transposed of Embedding"


def test_state_dict_is_found(embedding: nn.Embedding) -> None:
    state = embedding.state_dict()
    assert find_holder(embedding.weight, {embedding: 1}) == "another tensor [7, 3], kept as 'weight'"
    state.clear()
    assert find_holder(embedding.weight, {embedding: 1}) is None


def test_closure_over_an_alias_is_found(embedding: nn.Embedding) -> None:
    def project(alias: torch.Tensor) -> object:
        return lambda hidden: hidden @ alias.T

    head = project(embedding.weight.data)
    assert find_holder(embedding.weight, {embedding: 1}) == "another tensor [7, 3]"
    del head


def test_what_shares_no_memory_is_not_found(embedding: nn.Embedding) -> None:
    copies = [embedding.weight.detach().clone(), torch.empty(0), torch.empty(7, 3, device="meta")]
    copies.append(torch.eye(3).to_sparse())
    optimizer = torch.optim.Adam(embedding.parameters())
    assert find_holder(embedding.weight, {embedding: 1}) is None
    del copies, optimizer


def test_tensor_in_a_module_is_found_without_its_owner(embedding: nn.Embedding) -> None:
    assert find_holder(embedding.weight, {}) == "weight of Embedding"


def test_tensor_without_memory_has_no_holder() -> None:
    empty = torch.empty(0, 3)
    alias = empty.detach()
    assert span_of(empty) is None
    assert find_holder(empty, {}) is None
    del alias


def test_garbage_holds_nothing(embedding: nn.Embedding) -> None:
    gc.disable()
    try:
        cycle: list[object] = [embedding.weight.data]
        cycle.append(cycle)
        del cycle
        assert find_holder(embedding.weight, {embedding: 1}) is None
    finally:
        gc.enable()


def test_wrapping_tensors_are_passed_over(embedding: nn.Embedding) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        fake = mode.from_tensor(embedding.weight)
        made = torch.empty(7, 3)
    assert find_holder(embedding.weight, {embedding: 1}) is None
    del fake, made


def test_frozen_objects_are_seen_and_stay_frozen() -> None:
    """Engines call gc.freeze() when they are warm; in a process of its own, which cannot spoil other tests."""
    script = """
import gc
from torch import nn
from ftw.offloading.tensor_holders import find_holder
model = nn.ModuleDict({"embed": nn.Embedding(7, 3), "lm_head": nn.Linear(3, 7)})
model["lm_head"].weight = model["embed"].weight
gc.freeze()
assert find_holder(model["embed"].weight, {model["embed"]: 1}) == "lm_head.weight of ModuleDict"
assert gc.get_freeze_count() > 1000
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_looking_wakes_nobody(embedding: nn.Embedding) -> None:
    class Sleeper:
        @property
        def __class__(self) -> type:
            raise AssertionError("woken")

    sleeper = Sleeper()
    assert find_holder(embedding.weight, {embedding: 1}) is None
    del sleeper
