"""ConversionResult: what a conversion wrote, as an object and as JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ftw.sizes import count_of, format_size

if TYPE_CHECKING:
    from ftw.conversion.plan import ConversionPlan


@dataclass(frozen=True, slots=True, repr=False)
class ConversionResult:
    """What a conversion wrote, or with `dry_run` would write.

    Attributes:
        source: As it was given.
        target: As it was given.
        format: Of the source.
        plan: All that was decided.
        needed_nbytes: Bytes that are written, without what is kept of an earlier conversion.
        free_nbytes: What was free on the target's disk before. With `dry_run` what an earlier conversion has left and
            this one would clear counts as free.
        resumed_nbytes: Bytes of tensors that an earlier conversion had written, and this one found right. With
            `dry_run` those that the journal names.
        was_complete: Whether the target was complete already, so that nothing was written. With `dry_run` by its index
            and metadata files alone.
        dry_run: Whether this is a plan, and nothing was written.
    """

    source: str
    target: str
    format: str
    plan: ConversionPlan
    needed_nbytes: int
    free_nbytes: int
    resumed_nbytes: int = 0
    was_complete: bool = False
    dry_run: bool = False

    def __repr__(self) -> str:
        """Return a line; `to_dict` has the rest."""
        shard_plan = self.plan.shard_plan
        done = "complete already" if self.was_complete else "plan" if self.dry_run else "written"
        what = f"{count_of(len(shard_plan.tensors), 'tensor')}, {format_size(shard_plan.total_bytes)}"
        shards = count_of(len(shard_plan.shards), "shard")
        tables = ", ".join(table.name for table in self.plan.tables if self.plan.is_on_host(table)) or "nothing"
        return f"ConversionResult({self.target!r}: {done}, {what} in {shards}; placed for host memory: {tables})"

    def to_dict(self) -> dict[str, Any]:
        """Return the object that `ftw convert --json` prints."""
        plan, shard_plan, placement = self.plan, self.plan.shard_plan, self.plan.placement
        return {
            "source": self.source,
            "target": self.target,
            "format": self.format,
            "layout": plan.layout,
            "num_source_tensors": plan.num_source_tensors,
            "num_tensors": len(shard_plan.tensors),
            "nbytes": shard_plan.nbytes,
            "total_bytes": shard_plan.total_bytes,
            "resumed_bytes": self.resumed_nbytes,
            "was_complete": self.was_complete,
            "dry_run": self.dry_run,
            "needed_bytes": self.needed_nbytes,
            "free_bytes": self.free_nbytes,
            "shards": [{"file": shard.name, "nbytes": shard.nbytes} for shard in shard_plan.shards],
            "embed": {
                "placement": placement.placement,
                "tables": [table.name for table in placement.host_tables],
                "reason": placement.reason,
            },
            "tables": [
                {
                    "name": table.name,
                    "role": table.role,
                    "nbytes": table.nbytes,
                    "placement": "host" if plan.is_on_host(table) else "gpu",
                    "eligible": table.eligible,
                    "reason": table.reason,
                    "detail": table.detail,
                }
                for table in plan.tables
            ],
            "decoded": [{"name": name, "from": list(parts)} for name, parts in plan.decoded.items()],
            "metadata_files": plan.metadata_names,
            "warnings": list(plan.warnings),
            "left_out": [entry._asdict() for entry in plan.left_out],
        }
