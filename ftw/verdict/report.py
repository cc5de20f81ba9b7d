"""Report: what `ftw inspect` says about a checkpoint, and what is gained when the eligible tables leave the GPU."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ftw.checkpoint import Checkpoint, open_checkpoint
from ftw.layouts import find_obstacle
from ftw.verdict.gain import Budget, Gain, find_experts, find_gain, plan_budget
from ftw.verdict.verdict import Verdict, judge

if TYPE_CHECKING:
    import os

    from ftw.checkpoint import ModelConfig
    from ftw.readers import LeftOut


@dataclass(frozen=True, slots=True)
class Report:
    """What a checkpoint is, its lookup tables, and what leaving the GPU frees.

    `freetoken_obstacle` says of an FTW what stands against FreeToken's server loading it, None if nothing does.
    """

    format: str
    source: str
    config: ModelConfig
    num_tensors: int
    nbytes: int
    dtypes: dict[str, int]
    verdict: Verdict
    gain: Gain
    budget: Budget | None
    left_out: tuple[LeftOut, ...]
    freetoken_obstacle: str | None = None

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
    decode_df11: bool = False,
    follow_links: bool = False,
) -> Report:
    """Say what a checkpoint is and whether its lookup tables may leave the GPU.

    Reads headers, and bytes only where a stored LM head may be a copy of the table.

    Args:
        source: A path, a hub id, or an opened checkpoint.
        vram_bytes: The VRAM of a GPU, `budget` then says how it is spent.
        decode_df11: Take lookup tables that are stored as DF11 for the plain bf16 ones that they decode to. An opened
            checkpoint is taken as it was opened.
        follow_links: Follow links that lead out of the checkpoint's folder, as `open_checkpoint` does.

    Raises:
        SourceNotFoundError: There is no checkpoint of that name.
        CheckpointError: It is broken.
    """
    if isinstance(source, Checkpoint):
        return _inspect(source, vram_bytes)
    with open_checkpoint(source, headers_only=True, decode_df11=decode_df11, follow_links=follow_links) as checkpoint:
        return _inspect(checkpoint, vram_bytes)


def _inspect(checkpoint: Checkpoint, vram_bytes: int | None) -> Report:
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
        budget=None if vram_bytes is None else plan_budget(checkpoint, verdict, experts, vram_bytes),
        left_out=checkpoint.left_out,
        freetoken_obstacle=find_obstacle(checkpoint) if checkpoint.format == "ftw" else None,
    )


def _budget_dict(budget: Budget) -> dict[str, Any]:
    return {**asdict(budget), "before": budget.before._asdict(), "after": budget.after._asdict()}
