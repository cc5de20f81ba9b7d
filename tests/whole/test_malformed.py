"""Each malformed checkpoint is refused with one line, however it is opened; docs/malformed.md holds the lines.

`FTW_WRITE_DOCS=1 pytest tests/whole/test_malformed.py` writes that document anew.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from ftw.cli.main import main
from malformed_cases import EITHER, UNJUDGED, Case, iter_cases
from places import DOCS

import ftw
from ftw.errors import in_command_words

DOCUMENT = DOCS / "malformed.md"
CASES = list(iter_cases())
HEAD = """# Malformed checkpoints

For people who got an error message from `ftw`, and for those who check what it refuses.

What `ftw` says of each, by `FTW_WRITE_DOCS=1 python -m pytest tests/whole/test_malformed.py`, which writes this page;
without the variable the test fails where a message differs from it. A message names the file, its part, what was found
and what is allowed; it is the one line on stderr of `ftw inspect`, which ends with 1, and the text of the
`ftw.CheckpointError` or `ftw.SourceNotFoundError` that `ftw.open_checkpoint` and `ftw.inspect` raise. `…` is the
checkpoint's folder.
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "m"
    place.mkdir()
    return place


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_malformed_checkpoint_is_refused_with_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], case: Case
) -> None:
    source = case.write(folder)
    messages = [in_command_words(refusal(source, use)) for use in (ftw.open_checkpoint, ftw.inspect)]
    assert main(["inspect", str(source)]) == 1
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1
    messages.append(output.err.removeprefix("ftw: error: ").rstrip("\n"))
    assert len(set(messages)) == 1
    assert messages[0].isprintable()
    assert messages[0].startswith(str(folder))
    assert len(messages[0]) < 1000


@pytest.mark.parametrize("name", UNJUDGED)
def test_checkpoint_with_too_many_tables_is_opened_and_verified_and_not_judged(
    folder: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    source = UNJUDGED[name](folder)
    ftw.open_checkpoint(source).close()
    assert ftw.verify(source).is_ok
    target = folder / "out"
    uses = {
        "inspect": ftw.inspect,
        "convert": lambda path: ftw.convert(path, target),
        "load": lambda path: ftw.load(path, device="cpu"),
    }
    messages = [refusal(source, use) for use in uses.values()]
    assert main(["inspect", str(source)]) == 1
    messages.append(capsys.readouterr().err.removeprefix("ftw: error: ").rstrip("\n"))
    assert len(set(messages)) == 1
    assert messages[0].startswith(f"{source}: tensors: ")
    assert not target.exists()


@pytest.mark.parametrize("name", EITHER)
def test_odd_checkpoint_is_read(folder: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    source = EITHER[name](folder)
    with ftw.open_checkpoint(source) as checkpoint:
        for tensor in checkpoint.tensors.values():
            checkpoint.read_into(tensor.name, bytearray(tensor.nbytes))
    assert main(["inspect", "--json", str(source)]) == 0
    assert all(line.startswith("ftw: warning: ") for line in capsys.readouterr().err.splitlines())


def test_document_holds_every_message(tmp_path: Path) -> None:
    content = "\n".join([HEAD, *document_lines(tmp_path)]) + "\n"
    if os.environ.get("FTW_WRITE_DOCS"):
        DOCUMENT.write_text(content, encoding="utf-8")
    assert DOCUMENT.read_text(encoding="utf-8") == content


def test_cases_have_names_of_their_own() -> None:
    assert len({case.id for case in CASES}) == len(CASES)


def refusal(source: Path, open_source: object) -> str:
    """Return the message with which a source is refused."""
    with pytest.raises((ftw.CheckpointError, ftw.SourceNotFoundError)) as caught:
        open_source(str(source))  # type: ignore[operator]
    return str(caught.value)


def document_lines(root: Path) -> Iterator[str]:
    section = ""
    for number, case in enumerate(CASES):
        if case.section != section:
            section = case.section
            yield from (f"## {section}\n", "| what is wrong | message |", "|---|---|")
        folder = root / str(number)
        folder.mkdir()
        message = refusal(case.write(folder), ftw.open_checkpoint)
        message = message.replace(f"{folder}-outside", "…-outside").replace(str(folder), "…")
        yield f"| {case.name} | `{message.replace('|', chr(92) + '|')}` |"
        if number + 1 == len(CASES) or CASES[number + 1].section != section:
            yield ""
    yield from (
        "## Opened and verified, but not judged, converted or loaded\n",
        "| what is wrong | message |",
        "|---|---|",
    )
    for name, write in UNJUDGED.items():
        folder = root / name
        folder.mkdir()
        yield f"| {name} | `{refusal(write(folder), ftw.inspect).replace(str(folder), '…')}` |"
    yield ""
    yield from ("## Odd, and read all the same\n", "| what is odd | what `ftw inspect` tells |", "|---|---|")
    for name, write in EITHER.items():
        folder = root / name
        folder.mkdir()
        yield f"| {name} | {'; '.join(outcome(ftw.inspect(write(folder))))} |"


def outcome(report: ftw.Report) -> Iterator[str]:
    table = report.verdict.token_embedding
    yield f"`{table.reason}`: {table.detail}"
    yield from (f"warning: {warning}" for warning in report.verdict.warnings)
    yield from (f"left out: {entry.name} ({entry.reason})" for entry in report.left_out)
