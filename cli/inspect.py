"""`ftw inspect`: what a checkpoint is, its lookup tables, and what leaving the GPU frees."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ftw.sizes import format_size
from ftw.verdict import inspect, refuse

from .exit_codes import DONE, REFUSED
from .inspect_text import print_report
from .links import FollowLinksOption
from .output import QuietOption, describe_failure, print_error, print_json, print_warning
from .plot import check_plot, plot_budget
from .progress import show_waiting
from .sizes import parse_size_option

_MIN_VRAM = 1 << 20


def _parse_vram(text: str) -> int:
    nbytes = parse_size_option(text)
    if nbytes < _MIN_VRAM:
        raise typer.BadParameter(f"'{text}' is {format_size(nbytes)}, at least 1 MiB is needed; write 24GiB for 24 GiB")
    return nbytes


def inspect_command(
    source: Annotated[str, typer.Argument(metavar="SRC", help="Folder, weight file, or hub id.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Exit with 3 unless the token embedding may leave the GPU.")
    ] = False,
    vram: Annotated[
        int | None,
        typer.Option(parser=_parse_vram, metavar="SIZE", help="Tell how a GPU of this much memory is spent."),
    ] = None,
    follow_links: FollowLinksOption = False,
    decode_df11: Annotated[
        bool, typer.Option("--decode-df11", help="Take DF11 lookup tables for the plain bf16 ones they decode to.")
    ] = False,
    reserve: Annotated[
        int | None,
        typer.Option(
            parser=parse_size_option,
            metavar="SIZE",
            help="VRAM that stays with the CUDA context, activations and others; needs --vram. "
            "Default: 1 GiB, and of less than 10 GiB a tenth.",
        ),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Draw that as a picture; needs --vram and matplotlib.")
    ] = None,
    quiet: QuietOption = False,
) -> int:
    """Tell what a checkpoint is and whether its lookup tables may leave the GPU."""
    for name, value in (("--plot FILE.png", plot), ("--reserve SIZE", reserve)):
        if value is not None and vram is None:
            problem = f"{name} is about how the memory of a GPU is spent, so --vram SIZE is needed with it"
            raise typer.BadParameter(problem)
    if reserve is not None and vram is not None and reserve > vram:
        problem = f"{format_size(reserve)} is more than the {format_size(vram)} of --vram"
        raise typer.BadParameter(problem, param_hint="'--reserve'")
    if plot is not None:
        check_plot(plot)
    with show_waiting("inspect", is_quiet=quiet) as say:
        say("reading headers")
        report = inspect(
            source, vram_bytes=vram, reserve_bytes=reserve, decode_df11=decode_df11, follow_links=follow_links
        )
    for warning in report.verdict.warnings:
        print_warning(warning)
    if plot is not None:
        plot_budget(report, plot)
    # What to do is printed with the report: this command moves nothing.
    refused = refuse(report.verdict, source, way_out="") if check and not report.is_host_eligible else None
    if as_json:
        print_json({**report.to_dict(), **({} if refused is None else describe_failure(str(refused), refused))})
    elif not quiet:
        print_report(report)
    if refused is not None:
        print_error(str(refused))
        return REFUSED
    return DONE
