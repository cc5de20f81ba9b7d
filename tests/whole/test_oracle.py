"""The oracle: every class of transformers that looks tokens up, saved and reloaded tiny, against the verdict on it.

A class is built with the tie flag left out, true and false, and once more with each flag taken out of the config.json
that it saved, as transformers 4 leaves out a default. Where a family reads the flag in the text part, it is set there
too, and where it has another name for it, under that name. The reloaded model shows which table it looks tokens up in,
and whether anything but lookups uses that weight. Where it does not tell which table it is, every table that ftw names
is looked for among its lookups.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
import transformers
from amounts import IS_WHOLE
from inspecting import stored_bytes, tensor_bytes
from oracle_exceptions import CANNOT_BUILD, READ_WHOLE, REFUSES_TRUE, SAFE_SIDE, TOO_LARGE
from tiny_configs import OTHERS, TIE_KEY, classes, tiny_config
from transformers.utils import logging

import ftw
from ftw.verdict import families

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

# Lookups that are no `torch.nn.Embedding`.
_OTHER_LOOKUPS = ("QuantEmbedding", "Molmo2Embedding")
_TEXT_ONLY = ("Llama4ForCausalLM", "Llama4TextModel")  # of such a family, but with the text part's configuration alone
_TEXT_FLAG_COUNTS = families.FLAG_AT_TOP_OR_IN_TEXT | set(families.FLAG_IN_PART)


class Flags(NamedTuple):
    """How the tie flag is set in a configuration.

    `stripped` takes it out of the saved file; `renamed` puts it there under the other name that the family has for it,
    and the opposite under the usual one.
    """

    top: bool | None = None
    text: bool | None = None
    stripped: bool = False
    renamed: bool = False

    @property
    def id(self) -> str:
        if self.stripped:
            return "stripped"
        top = {None: "absent", True: "true", False: "false"}[self.top]
        if self.renamed:
            return f"renamed-{top}"
        return top if self.text is None else f"{top}-text_{str(self.text).lower()}"


_FLAGS = (Flags(), Flags(top=True), Flags(top=False), Flags(stripped=True))
_TEXT_FLAGS = (Flags(text=True), Flags(text=False), Flags(top=False, text=True), Flags(top=True, text=False))
_RENAMED = (Flags(top=True, renamed=True), Flags(top=False, renamed=True))


def _flags_of(name: str, family: str) -> tuple[Flags, ...]:
    """Return how the flag of a class is set; that of one without an LM head says nothing, wherever it is."""
    text = _TEXT_FLAGS if family in _TEXT_FLAG_COUNTS and name not in _TEXT_ONLY else ()
    if name in OTHERS or name.endswith("Model"):
        return (Flags(top=True), Flags(top=False), *text)
    return (*_FLAGS, *text, *(_RENAMED if family in families.FLAG_NAMES else ()))


CASES = [
    (name, flags)
    for name, family in classes().items()
    if name not in CANNOT_BUILD and name not in TOO_LARGE
    for flags in _flags_of(name, family)
    if not (flags.top and name in REFUSES_TRUE)
]
_NUMBERS = {name: number for number, name in enumerate(classes())}
# Of each class every second way, and the other ones of the next class; all with FTW_WHOLE=1.
_TAKEN = [case for number, case in enumerate(CASES) if IS_WHOLE or (number + _NUMBERS[case[0]]) % 2 == 0]
# Variants that compute with the whole table in ways that no shared weight shows: class, values, and what stays free.
_READ_WHOLE: dict[str, tuple[str, dict[str, bool], set[str]]] = {
    "ibert-quantised": ("IBertModel", {"quant_mode": True}, set()),
    "ibert-quantised-masked": ("IBertForMaskedLM", {"quant_mode": True}, set()),
    "deberta-new_head": ("DebertaForMaskedLM", {"legacy": False}, {"position_embedding"}),
    "deberta_v2-new_head": ("DebertaV2ForMaskedLM", {"legacy": False}, {"position_embedding"}),
}


class Observed(NamedTuple):
    """What a reloaded model does, and what ftw says of the folder that it came from.

    Attributes:
        is_shared: Whether anything but lookups uses the table that it reads first; None where it has none, or several.
        wrongly_kept: The tables that ftw calls tied although nothing but lookups uses them, of a class without a first.
        holds_table: Whether the tensor that ftw names holds that table.
        is_read_whole: Whether that tensor is one that its class computes with besides, by the list of exceptions.
        wrongly_eligible: The tables that ftw would let go although something else uses them.
    """

    is_shared: bool | None
    holds_table: bool
    is_read_whole: bool
    wrongly_eligible: tuple[str, ...]
    wrongly_kept: tuple[str, ...]
    report: ftw.Report

    @property
    def difference(self) -> str:
        """Say where the verdict differs from the model; empty where it does not."""
        verdict = self.report.verdict
        if self.wrongly_eligible:
            return f"wrongly eligible: {', '.join(self.wrongly_eligible)}"
        if self.is_shared is None:
            return f"wrongly kept: {', '.join(self.wrongly_kept)}" if self.wrongly_kept else ""
        is_free = not self.is_shared and not self.is_read_whole
        if verdict.tied is not self.is_shared or verdict.token_embedding.eligible is not is_free:
            return f"shared: {self.is_shared}, called {verdict.token_embedding.reason}"
        return "" if self.holds_table else f"another table: {verdict.token_embedding.name}"


@pytest.fixture(autouse=True, scope="module")
def _quiet() -> Iterator[None]:
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tiny tensors
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(("name", "flags"), _TAKEN, ids=[f"{name}-{flags.id}" for name, flags in _TAKEN])
@pytest.mark.filterwarnings("ignore")  # transformers warns of its own deprecations
def test_verdict_is_what_the_model_does(name: str, flags: Flags, tmp_path: Path) -> None:
    observed = observe(name, flags, tmp_path)
    assert observed.wrongly_eligible == ()
    excepted, _ = SAFE_SIDE.get(name, ((), ""))
    assert bool(observed.difference) is (flags.id in excepted), observed.difference


@pytest.mark.parametrize("flag", [True, False], ids=["true", "false"])
@pytest.mark.parametrize("variant", _READ_WHOLE)
@pytest.mark.filterwarnings("ignore")
def test_table_that_the_model_computes_with_stays(variant: str, flag: bool, tmp_path: Path) -> None:
    name, values, free = _READ_WHOLE[variant]
    model_class = getattr(transformers, name)
    config = tiny_config(name, flag)
    for key, value in values.items():
        setattr(config, key, value)
    model_class(config).save_pretrained(tmp_path)
    assert {table.role for table in ftw.inspect(tmp_path).verdict.eligible_tables} == free


@pytest.mark.parametrize("name", CANNOT_BUILD)
@pytest.mark.filterwarnings("ignore")
def test_class_that_cannot_be_built_still_cannot(name: str) -> None:
    with pytest.raises(Exception):  # noqa: B017, PT011 - each fails in its own way
        _build_without_weights(name)


@pytest.mark.parametrize("name", REFUSES_TRUE)
def test_class_that_refuses_a_true_flag_still_does(name: str) -> None:
    with pytest.raises(Exception, match=TIE_KEY):
        tiny_config(name, True)


@pytest.mark.parametrize("name", TOO_LARGE)
@pytest.mark.filterwarnings("ignore")
def test_class_that_is_left_out_is_still_too_large(name: str) -> None:
    assert sum(weight.numel() for weight in _build_without_weights(name).parameters()) > 50_000_000


def test_exceptions_are_of_classes_that_are_tested() -> None:
    tested: dict[str, set[str]] = {}
    for name, flags in CASES:
        tested.setdefault(name, set()).add(flags.id)
    assert set(SAFE_SIDE) <= set(tested)
    assert all(set(excepted) <= tested[name] for name, (excepted, _) in SAFE_SIDE.items())
    assert set(READ_WHOLE) <= set(tested)
    assert all(reason for _, reason in SAFE_SIDE.values())
    assert len(tested) >= 150


def observe(name: str, flags: Flags, folder: Path) -> Observed:
    """Build, save and reload one class, and inspect the folder."""
    model_class = getattr(transformers, name)
    torch.manual_seed(0)
    model = model_class(tiny_config(name, flags.top, flags.text))
    model.to(torch.bfloat16).save_pretrained(folder)
    if flags.stripped:
        _rewrite(folder / "config.json", _without_flags)
    if flags.renamed:
        changed = {"tie_embedding": flags.top, TIE_KEY: not flags.top}
        _rewrite(folder / "config.json", lambda config: config | changed)
    if name.startswith("Qwen2_5Omni"):
        torch.save({}, folder / "spk_dict.pt")  # the voices of its talker, which it asks for without one, too
    model = model_class.from_pretrained(folder)
    report = ftw.inspect(folder)
    weight = _table_that_is_read(model)
    others = list(_weights_of_others(model))
    with ftw.open_checkpoint(folder) as checkpoint:
        stored = {table.name: stored_bytes(checkpoint, table.name) for table in report.verdict.tables if table.rows}
    used = {tensor_bytes(other.detach()) for other in others if other.dim() == 2 and other.numel()}
    looked_up = {tensor_bytes(module.weight.detach()) for module in model.modules() if _is_lookup(module)}
    table = report.verdict.token_embedding
    part, _ = READ_WHOLE.get(name, ("no part", ""))
    whole = {table.name for table in report.verdict.tables if part in table.name.split(".")}
    return Observed(
        is_shared=None if weight is None else any(other.data_ptr() == weight.data_ptr() for other in others),
        holds_table=weight is not None and stored.get(table.name) == tensor_bytes(weight.detach()),
        is_read_whole=table.name in whole,
        wrongly_eligible=tuple(
            table.name
            for table in report.verdict.eligible_tables
            if stored.get(table.name) in used or table.name in whole
        ),
        wrongly_kept=tuple(
            table.name
            for table in report.verdict.tables
            if table.reason.startswith("tie") and stored.get(table.name) in looked_up - used and table.name not in whole
        ),
        report=report,
    )


def _rewrite(path: Path, change: Callable[[Any], Any]) -> None:
    path.write_text(json.dumps(change(json.loads(path.read_text()))))


def _without_flags(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {key: _without_flags(part) for key, part in value.items() if key != TIE_KEY}


def _build_without_weights(name: str) -> Any:
    with torch.device("meta"):
        return getattr(transformers, name)(tiny_config(name))


def _table_that_is_read(model: Any) -> torch.Tensor | None:
    """Return the weight that the input ids are looked up in.

    An untied encoder-decoder reads its encoder's own table, though some classes (Bart) still name the shared one.
    """
    candidates = [_input_embeddings(model)]
    if getattr(model.config, "is_encoder_decoder", False):
        encoder = model.get_encoder()
        candidates = [getattr(encoder, "embed_tokens", None), _input_embeddings(encoder), *candidates]
    tables = (module.weight for module in candidates if _is_lookup(module))  # Whisper's encoder hears, it has none
    return next((table for table in tables if isinstance(table, torch.Tensor)), None)


def _input_embeddings(module: Any) -> Any:
    try:
        return module.get_input_embeddings()
    except (AttributeError, NotImplementedError):
        return None


def _is_lookup(module: Any) -> bool:
    if type(module).__name__ in _OTHER_LOOKUPS:
        return hasattr(module, "weight")
    return isinstance(module, torch.nn.Embedding)


def _weights_of_others(model: Any) -> Iterator[torch.Tensor]:
    """Yield every weight that something else than a lookup uses."""
    for module in model.modules():
        if not isinstance(module, torch.nn.Embedding) and type(module).__name__ not in _OTHER_LOOKUPS:
            yield from module.parameters(recurse=False)
        head = module.get_output_embeddings() if hasattr(module, "get_output_embeddings") else None
        if isinstance(head, torch.nn.Linear) or (module is model and hasattr(head, "weight")):
            yield head.weight
