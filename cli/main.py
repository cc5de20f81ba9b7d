"""The `ftw` command: its sub-commands, and how errors become exit statuses."""

from __future__ import annotations

import _thread
import contextlib
import gc
import io
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType

import typer

from ftw import __version__
from ftw.errors import FtwError, NotEligibleError

from .bench import bench_command
from .convert import convert_command
from .demo import demo_command
from .exit_codes import DONE, FAILED, INTERRUPTED, PIPE_CLOSED, REFUSED, USAGE
from .inspect import inspect_command
from .output import ClosedStream, describe_failure, print_error, print_json, print_logged_warnings
from .verify import verify_command

_MOMENT_SECONDS = 0.01

Handler = Callable[[int, FrameType | None], object] | signal.Handlers

app = typer.Typer(
    name="ftw",
    help="Keep an LLM's lookup tables in host memory and give the VRAM back.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help: no escapes, and lines as wide as the terminal
    context_settings={"help_option_names": ["-h", "--help"]},
)

# Each with what `ftw --help` says of it, short enough not to be cut.
_COMMANDS: dict[str, tuple[Callable[..., int | None], str]] = {
    "inspect": (inspect_command, "May the tables leave the GPU, what is gained?"),
    "convert": (convert_command, "Convert a checkpoint to an FTW folder."),
    "verify": (verify_command, "Check a checkpoint, or compare it with another."),
    "bench": (bench_command, "Measure on this machine."),
    "demo": (demo_command, "Try all of it on a small checkpoint."),
}
for _name, (_command, _summary) in _COMMANDS.items():
    app.command(_name, short_help=_summary)(_command)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"ftw {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Print the release."),
) -> None:
    pass


def run(arguments: list[str] | None = None) -> None:
    """Run the command line and exit with its status."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by whoever started us
            nowhere = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - as long as the process; no file gets its number
            setattr(sys, name, ClosedStream(nowhere) if name == "stdout" else nowhere)
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal that cannot show a name gets its escapes
    print_logged_warnings()
    gc.set_threshold(500_000, 10, 10)  # headers of 100,000 tensors are no garbage, and are walked for nothing
    sys.unraisablehook = _interrupt_again
    try:
        _change_interrupts(signal.SIG_DFL, signal.default_int_handler)  # `ftw_command` has left them to the system
        status = main(arguments)
    except KeyboardInterrupt:  # right before or after what `main` does
        status = INTERRUPTED
    while True:
        try:  # nothing is left that would have to be told
            _change_interrupts(signal.default_int_handler, signal.SIG_DFL)
            break
        except KeyboardInterrupt:
            status = INTERRUPTED
    sys.exit(status)


def _change_interrupts(old: Handler, new: Handler) -> None:
    """Change what SIGINT does, if it does that; where it is ignored, it stays so."""
    if signal.getsignal(signal.SIGINT) is old:
        signal.signal(signal.SIGINT, new)


def _interrupt_again(unraisable: sys.UnraisableHookArgs) -> None:
    """Repeat an interrupt that fell into a callback or a destructor, out of which Python lets no error."""
    if isinstance(unraisable.exc_value, KeyboardInterrupt):
        threading.Timer(_MOMENT_SECONDS, _thread.interrupt_main).start()
    else:
        sys.__unraisablehook__(unraisable)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit status; an error is one line on stderr, with --json an object too."""
    words = sys.argv[1:] if arguments is None else arguments
    try:
        status = app(args=words or ["--help"], prog_name="ftw", standalone_mode=False)
        status = status if words else USAGE
        sys.stdout.flush()  # here, where an error has a place to go
    except typer.TyperException as error:
        problem = " ".join(error.format_message().split()).removesuffix(".").replace("Value error, ", "")
        _tell(f"{problem}; see '{' '.join(['ftw', *_command_of(words)])} --help'", error, words)
        return USAGE
    except NotEligibleError as error:
        _tell(str(error), error, words)
        return REFUSED
    except (BrokenPipeError, SystemExit):  # typer makes the latter of the former
        # Whoever read our output has left; nothing may be written at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    except (FtwError, OSError) as error:
        _tell(_describe(error), error, words)
        return FAILED
    except BaseException as error:
        if not _is_interrupt(error):
            raise
        status = INTERRUPTED
    if status == INTERRUPTED:  # typer makes this of a KeyboardInterrupt
        _tell("interrupted", None, words)
    return status if isinstance(status, int) else DONE


def _tell(message: str, error: Exception | None, words: list[str]) -> None:
    """Print a failure on stderr, and where JSON was asked for its object on stdout, if that can be written."""
    print_error(message)
    if _is_json_asked(words):
        with contextlib.suppress(OSError):
            print_json(describe_failure(message, error))
            sys.stdout.flush()


def _is_json_asked(words: list[str]) -> bool:
    """Tell whether a command was to print one JSON object; of `ftw bench` the option names a file."""
    options = words[: words.index("--")] if "--" in words else words
    return "--json" in options and _command_of(words) != ["bench"]


def _command_of(words: list[str]) -> list[str]:
    """Return the name of the command, as a list; none if the first word that is no option names none."""
    first = [word for word in words if not word.startswith("-")][:1]
    return first if _COMMANDS.keys() & set(first) else []


def _is_interrupt(error: BaseException) -> bool:
    """Tell whether an error is an interrupt, or what Python or typer made of one."""
    chain: BaseException | None = error
    while chain is not None:
        if isinstance(chain, (KeyboardInterrupt, typer.Abort)):
            return True
        chain = chain.__cause__ or chain.__context__
    return False


def _describe(error: FtwError | OSError) -> str:
    """Return the line of an error; one of the operating system in the form that ours have."""
    if isinstance(error, FtwError) or not error.strerror:
        return str(error)
    return f"{error.filename or 'stdout'}: file: {error.strerror[0].lower()}{error.strerror[1:]}"
