"""Report: what `ftw inspect` says about a checkpoint, and what is gained when the eligible tables leave the GPU."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from ftw.checkpoint import Checkpoint, NotAModel, find_not_a_model, open_checkpoint
from ftw.layouts import find_obstacle, layout_of
from ftw.readers import read_ftw_key
from ftw.sizes import count_of, format_size
from ftw.verdict.gain import Budget, Experts, Gain, find_experts, find_gain, plan_budget
from ftw.verdict.verdict import Verdict, judge

if TYPE_CHECKING:
    import os

    from ftw.checkpoint import ModelConfig
    from ftw.readers import LeftOut


class FtwFacts(NamedTuple):
    """What the index of an FTW says of the folder.

    Attributes:
        producer: Who wrote it, None if it does not say.
        layout: "plain" or "freetoken".
        num_checksums: Tensors with a checksum.
        num_sha256: Tensors with a SHA-256.
        host_tensors: Names of the tensors that are placed for host memory.
    """

    producer: str | None
    layout: str
    num_checksums: int
    num_sha256: int
    host_tensors: tuple[str, ...]


@dataclass(frozen=True, slots=True, repr=False)
class Report:
    """What a checkpoint is, its lookup tables, and what leaving the GPU frees.

    Attributes:
        experts: All routed experts.
        freetoken_obstacle: What stands against FreeToken's server loading an FTW, None if nothing does.
        ftw: What the index of an FTW says, None for other formats.
        not_a_model: What it is if it is no model, None if it may be one.
    """

    format: str
    source: str
    config: ModelConfig
    num_tensors: int
    nbytes: int
    dtypes: dict[str, int]
    verdict: Verdict
    gain: Gain
    experts: Experts
    budget: Budget | None
    left_out: tuple[LeftOut, ...]
    freetoken_obstacle: str | None = None
    ftw: FtwFacts | None = None
    not_a_model: NotAModel | None = None

    def __repr__(self) -> str:
        """Return a line of what counts; `to_dict` has the rest."""
        size = f"{count_of(self.num_tensors, 'tensor')}, {format_size(self.nbytes)}"
        table = self.verdict.token_embedding
        may = "may leave the GPU" if table.eligible else f"stays on the GPU ({table.reason})"
        what = f"{self.format}, {self.config.architecture or 'unknown architecture'}, {size}"
        return f"Report({self.source!r}: {what}; token embedding {may}, frees {format_size(self.gain.vram_bytes)})"

    @property
    def is_host_eligible(self) -> bool:
        """Whether the token embedding may leave the GPU."""
        return self.verdict.token_embedding.eligible

    def to_dict(self) -> dict[str, Any]:
        """Return the object that `ftw inspect --json` prints."""
        return {
            "format": self.format,
            "source": self.source,
            "architecture": self.config.architecture,
            "model_type": self.config.model_type,
            "num_tensors": self.num_tensors,
            "nbytes": self.nbytes,
            "dtypes": self.dtypes,
            "tables": [{key: getattr(table, key) for key in _TABLE_KEYS} for table in self.verdict.tables],
            "tied": {"value": self.verdict.tied, "evidence": list(self.verdict.tie_evidence)},
            "host": {
                "eligible": self.is_host_eligible,
                "reason": self.verdict.token_embedding.reason,
                "nbytes": sum(table.nbytes for table in self.verdict.eligible_tables),
            },
            "gain": asdict(self.gain),
            **({} if self.budget is None else {"budget": _budget_dict(self.budget)}),
            **({"freetoken": self._freetoken_dict()} if self.format == "ftw" else {}),
            **({} if self.ftw is None else {"ftw": {**self.ftw._asdict(), "host_tensors": [*self.ftw.host_tensors]}}),
            **({} if self.not_a_model is None else {"not_a_model": self.not_a_model._asdict()}),
            "warnings": list(self.verdict.warnings),
            "left_out": [entry._asdict() for entry in self.left_out],
        }

    def _freetoken_dict(self) -> dict[str, Any]:
        return {"serves": self.freetoken_obstacle is None, "obstacle": self.freetoken_obstacle}


_TABLE_KEYS = ("name", "role", "rows", "columns", "dtype", "row_bytes", "nbytes", "eligible", "reason", "detail")


def inspect(
    source: str | os.PathLike[str] | Checkpoint,
    *,
    vram_bytes: int | None = None,
    reserve_bytes: int | None = None,
    decode_df11: bool = False,
    follow_links: bool = False,
) -> Report:
    """Say what a checkpoint is and whether its lookup tables may leave the GPU.

    Reads headers, and bytes only where a stored LM head may be a copy of the table.

    Args:
        source: A path, a hub id, or an opened checkpoint.
        vram_bytes: The VRAM of a GPU, `budget` then says how it is spent.
        reserve_bytes: What of it stays with the CUDA context, activations and others; None for 1 GiB, and of less than
            10 GiB a tenth.
        decode_df11: Take lookup tables that are stored as DF11 for the plain bf16 ones that they decode to. An opened
            checkpoint is taken as it was opened.
        follow_links: Follow links that lead out of the checkpoint's folder, as `open_checkpoint` does.

    Raises:
        SourceNotFoundError: There is no checkpoint of that name.
        CheckpointError: It is broken.
    """
    if isinstance(source, Checkpoint):
        return _inspect(source, vram_bytes, reserve_bytes)
    with open_checkpoint(source, headers_only=True, decode_df11=decode_df11, follow_links=follow_links) as checkpoint:
        return _inspect(checkpoint, vram_bytes, reserve_bytes)


def _inspect(checkpoint: Checkpoint, vram_bytes: int | None, reserve_bytes: int | None) -> Report:
    dtypes: Counter[str] = Counter()
    for tensor in checkpoint.tensors.values():
        dtypes[tensor.ggml_type or tensor.dtype] += tensor.nbytes
    verdict = judge(checkpoint)
    experts = find_experts(checkpoint.tensors.values(), checkpoint.config.num_experts)
    return Report(
        format=checkpoint.format,
        source=checkpoint.source,
        config=checkpoint.config,
        num_tensors=len(checkpoint.tensors),
        nbytes=checkpoint.nbytes,
        dtypes=dict(dtypes.most_common()),
        verdict=verdict,
        gain=find_gain(checkpoint.config, verdict, experts),
        experts=experts,
        budget=None if vram_bytes is None else plan_budget(checkpoint, verdict, experts, vram_bytes, reserve_bytes),
        left_out=checkpoint.left_out,
        freetoken_obstacle=find_obstacle(checkpoint) if checkpoint.format == "ftw" else None,
        ftw=_ftw_facts(checkpoint) if checkpoint.format == "ftw" else None,
        not_a_model=find_not_a_model(checkpoint),
    )


def _ftw_facts(checkpoint: Checkpoint) -> FtwFacts:
    producer = read_ftw_key(checkpoint.metadata, "producer")
    tensors = checkpoint.tensors.values()
    return FtwFacts(
        producer=producer if isinstance(producer, str) and producer else None,
        layout=layout_of(checkpoint),
        num_checksums=sum(tensor.xxh3_64 is not None for tensor in tensors),
        num_sha256=sum(tensor.sha256 is not None for tensor in tensors),
        host_tensors=tuple(tensor.name for tensor in tensors if tensor.placement == "host"),
    )


def _budget_dict(budget: Budget) -> dict[str, Any]:
    return {**asdict(budget), "before": budget.before._asdict(), "after": budget.after._asdict()}
