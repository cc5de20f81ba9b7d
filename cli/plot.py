"""Pictures: how a GPU's memory is spent, before and after its lookup tables have left it."""

from __future__ import annotations

import io
import warnings
from typing import TYPE_CHECKING

from ftw.errors import OutputError, printable
from ftw.writer import write_atomically

if TYPE_CHECKING:
    from pathlib import Path

    from ftw.report import Report

_GIB = 1 << 30
_COLOURS = {"weights": "#4c72b0", "lookup tables": "#dd8452", "left for experts and KV": "#55a868"}


def check_plot(path: Path) -> None:
    """Check that a picture can be drawn there.

    Raises:
        OutputError: matplotlib is missing, or has no format of that suffix.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ImportError as error:
        problem = "a picture needs matplotlib; pip install matplotlib"
        raise OutputError(f"{printable(str(path))}: plot: {problem}") from error
    suffix = path.suffix.removeprefix(".").lower()
    allowed = set(FigureCanvasAgg.get_supported_filetypes()) - {"pgf"}  # which needs TeX
    if suffix not in allowed:
        problem = f"its suffix is '{printable(path.suffix)}', allowed are {', '.join(sorted(allowed))}"
        raise OutputError(f"{printable(str(path))}: plot: {problem}")


def plot_budget(report: Report, path: Path) -> None:
    """Draw the budget of a report as two stacked bars, labelled in GiB; `check_plot` has passed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    budget = report.budget
    if budget is None:
        raise ValueError("the report has no budget, inspect with vram_bytes")
    figure = Figure(figsize=(7, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for place, share in enumerate((budget.before, budget.after)):
        parts = (budget.weights_bytes, share.table_bytes, max(share.left_bytes, 0))
        bottom = 0.0
        for (label, colour), nbytes in zip(_COLOURS.items(), parts, strict=True):
            height = nbytes / _GIB
            axes.bar(place, height, bottom=bottom, color=colour, width=0.6, label=None if place else label)
            if nbytes:
                axes.text(place, bottom + height / 2, f"{height:.2f} GiB", ha="center", va="center")
            bottom += height
    axes.axhline(budget.vram_bytes / _GIB, color="black", linewidth=1, linestyle="--")
    axes.set_xticks([0, 1], ["tables on the GPU", "tables in host memory"])
    axes.set_ylabel("GiB")
    title = f"{printable(report.source)}: {budget.vram_bytes / _GIB:.2f} GiB of VRAM"
    axes.set_title(title, parse_math=False)  # dollar signs in a path are no formula
    figure.legend(loc="outside lower center", ncols=len(_COLOURS))
    picture = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from")  # drawn as a box; the file is whole
        figure.savefig(picture, format=path.suffix[1:].lower())
    write_atomically(path, [picture.getvalue()])
