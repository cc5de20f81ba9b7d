"""The verdict: may a lookup table leave the GPU, why, where does it go, and what does that gain.

Imports: `ftw.checkpoint`. No torch.
"""

from ftw.verdict.families import DECODER_TABLE_READ_WHOLE
from ftw.verdict.gain import Budget, BudgetSide
from ftw.verdict.placement import Embed, Placement, plan_placement
from ftw.verdict.report import Report, inspect
from ftw.verdict.verdict import TableVerdict, Verdict, judge
from ftw.verdict.wording import explain, refusal, refuse

__all__ = [
    "DECODER_TABLE_READ_WHOLE", "Budget", "BudgetSide", "Embed", "Placement", "Report", "TableVerdict", "Verdict",
    "explain", "inspect", "judge", "plan_placement", "refusal", "refuse",
]  # fmt: skip
