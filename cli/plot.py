"""Pictures: how a GPU's memory is spent, before and after its lookup tables have left it, and what was measured.

They are drawn with matplotlib's own settings. A `matplotlibrc` of the current folder, which may be a stranger's, is not
even read: it can make matplotlib import modules and start TeX.
"""

from __future__ import annotations

import io
import os
import sys
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ftw.errors import OutputError, printable
from ftw.host import write_atomically

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from matplotlib.figure import Figure

    from ftw.verdict import Report

_GIB = 1 << 30
_COLOURS = {
    "weights": "#4c72b0",
    "lookup tables": "#dd8452",
    "context and activations": "#8c8c8c",
    "left for experts and KV": "#55a868",
}


def check_plot(path: Path) -> None:
    """Check that a picture can be drawn there.

    Raises:
        OutputError: matplotlib is missing, or has no format of that suffix.
    """
    try:
        with _away_from_the_current_folder():
            from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ImportError as error:
        problem = "a picture needs matplotlib; pip install matplotlib"
        raise OutputError(f"{printable(str(path))}: plot: {problem}") from error
    if not path.parent.is_dir():
        raise OutputError(f"{printable(str(path))}: plot: there is no folder '{printable(str(path.parent))}'")
    suffix = path.suffix.removeprefix(".").lower()
    allowed = set(FigureCanvasAgg.get_supported_filetypes()) - {"pgf"}  # which needs TeX
    if suffix not in allowed:
        problem = f"its suffix is '{printable(path.suffix)}', allowed are {', '.join(sorted(allowed))}"
        raise OutputError(f"{printable(str(path))}: plot: {problem}")


@contextmanager
def _away_from_the_current_folder() -> Iterator[None]:
    """Be in the folder of this module while matplotlib is imported, which looks for its settings where we are."""
    if "matplotlib" in sys.modules:
        yield
        return
    here = os.open(".", getattr(os, "O_PATH", os.O_RDONLY)) if hasattr(os, "fchdir") else None
    name = os.getcwd() if here is None else ""
    try:
        os.chdir(os.path.dirname(os.path.abspath(__file__)))
        yield
    finally:
        if here is None:
            os.chdir(name)
        else:
            os.fchdir(here)
            os.close(here)


@contextmanager
def _plain_settings() -> Iterator[None]:
    """Give matplotlib the settings that it comes with, whoever imported it where; the others are back afterwards."""
    import matplotlib

    with matplotlib.rc_context({key: value for key, value in matplotlib.rcParamsDefault.items() if key != "backend"}):
        yield


@_plain_settings()
def plot_budget(report: Report, path: Path) -> None:
    """Draw the budget of a report as two stacked bars, labelled in GiB; `check_plot` has passed."""
    budget = report.budget
    if budget is None:
        raise ValueError("the report has no budget, inspect with vram_bytes")
    figure = _make_figure(7, 5)
    axes = figure.add_subplot()
    for place, share in enumerate((budget.before, budget.after)):
        parts = (budget.weights_bytes, share.table_bytes, budget.reserved_bytes, max(share.left_bytes, 0))
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
    figure.legend(loc="outside lower center", ncols=2)
    _save(figure, path)


@_plain_settings()
def plot_lookups(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw the time of lookups over the number of ids, a panel for each table and distribution, a line for each way."""
    panels = list(dict.fromkeys((row.get("table", ""), row.get("drawn", "")) for row in rows))
    columns = min(2, len(panels))
    lines = -(-len(panels) // columns)
    figure = _make_figure(6 * columns, 3.6 * lines)
    ways = list(dict.fromkeys(row["way"] for row in rows))
    for number, panel in enumerate(panels):
        axes = figure.add_subplot(lines, columns, number + 1)
        for place, way in enumerate(ways):
            points = [
                (row["ids"], row.get("graph_us", row["eager_us"]))
                for row in rows
                if (row.get("table", ""), row.get("drawn", "")) == panel and row["way"] == way
            ]
            if points:
                axes.plot(*zip(*points, strict=True), marker="o", color=f"C{place}", label=way)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_title(", ".join(filter(None, panel)) or "lookups", fontsize=10)
        axes.set_xlabel("ids")
        axes.set_ylabel("µs")
        axes.grid(alpha=0.3)
        if not number:
            axes.legend(fontsize=8)
    _save(figure, path)


@_plain_settings()
def plot_decoding(result: dict[str, Any], path: Path) -> None:
    """Draw how much longer steps and prompts take than with the table on the GPU, and the KV tokens that fit."""
    figure = _make_figure(15, 4.5)
    panels = {
        "decode": ("decode step", "% longer than with the table on the GPU"),
        "prefill": ("prefill", "% longer than with the table on the GPU"),
        "memory": (f"KV tokens that fit into {result['vram']}", "tokens"),
    }
    for number, (name, (title, unit)) in enumerate(panels.items()):
        axes = figure.add_subplot(1, len(panels), number + 1)
        values = {(_group(row), row["placement"]): _height(row) for row in result[name]}
        groups = list(dict.fromkeys(group for group, _ in values))
        placements = list(dict.fromkeys(placement for _, placement in values))
        width = 0.8 / len(placements)
        for place, placement in enumerate(placements):
            starts = [group + (place - len(placements) / 2 + 0.5) * width for group in range(len(groups))]
            heights = [values[group, placement] for group in groups]
            bars = axes.bar(starts, heights, width, color=f"C{place}", label=placement)
            axes.bar_label(bars, fmt="{:,.0f}" if name == "memory" else "{:.2f}", fontsize=7, padding=2)
        axes.set_xticks(range(len(groups)), groups, fontsize=7)
        axes.set_title(title, fontsize=10)
        axes.set_ylabel(unit, fontsize=8)
        axes.margins(y=0.15)
        if not number:
            axes.legend(fontsize=8)
    _save(figure, path)


def _group(row: dict[str, Any]) -> str:
    """Return the words under the bars of one model and size."""
    size = f"batch {row['batch']}" if "batch" in row else f"{row['tokens']} tokens" if "tokens" in row else ""
    return "\n".join(filter(None, (row["model"], f"{row['layers']} layers", size)))


def _height(row: dict[str, Any]) -> float:
    return float(row["kv_tokens"] if "kv_tokens" in row else (row["ratio"] - 1) * 100)


@_plain_settings()
def plot_bars(rows: list[dict[str, Any]], value: str, path: Path) -> None:
    """Draw one figure of each row as a bar, labelled by the words of the row."""
    figure = _make_figure(8, 1 + 0.35 * len(rows))
    axes = figure.add_subplot()
    labels = [", ".join(text for text in row.values() if isinstance(text, str)) for row in rows]
    places = range(len(rows))
    bars = axes.barh(places, [row[value] for row in rows], color=_COLOURS["weights"])
    axes.bar_label(bars, fontsize=8, padding=2)
    axes.set_yticks(places, labels, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel(value.replace("_", " "))
    _save(figure, path)


def _make_figure(width: float, height: float) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _save(figure: Figure, path: Path) -> None:
    picture = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from")  # drawn as a box; the file is whole
        figure.savefig(picture, format=path.suffix[1:].lower())
    write_atomically(path, [picture.getvalue()])
