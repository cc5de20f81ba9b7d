"""No user, password, signature or token is shown: in an error, its chain, a log, or what a command prints."""

import json
import logging
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from builders import llama_config, llama_tensors, padded, write_checkpoint
from ftw.cli.main import main
from hub_server import TOKEN, HubServer, cut, drop, reset_sessions, status
from huggingface_hub import constants, file_download

import ftw
from ftw.hub.redaction import redact, redact_queries

SECRETS = ("s3cret", "alice", TOKEN, "signature")


@pytest.fixture
def logged() -> Any:
    """Yield what is logged, as people see it."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    loggers = [logging.getLogger(name) for name in ("ftw", "huggingface_hub")]
    for logger in loggers:
        logger.addHandler(handler)
    yield lines
    for logger in loggers:
        logger.removeHandler(handler)


@pytest.fixture
def endpoint(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A hub with a model, whose address holds a user and a password, and a token that it does not ask for."""
    hub.add("org/name", write_checkpoint(tmp_path / "m", padded(llama_tensors()), llama_config()))
    address = hub.url.replace("//", "//alice:s3cret@")
    monkeypatch.setattr(constants, "ENDPOINT", address)
    for module in (constants, file_download):
        template = address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(module, "HUGGINGFACE_CO_URL_TEMPLATE", template, raising=False)
    reset_sessions()
    return address


FAULTS: dict[str, tuple[str, Callable[[Any], None]]] = {
    "busy": ("listing", status(503)),
    "forbidden": ("listing", status(403)),
    "bad": ("listing", status(400)),
    "wrong-token": ("listing", status(401, X_Error_Message="Invalid credentials in Authorization header")),
    "no-json": ("listing", lambda handler: handler._send(200, {}, b"<html>")),
    "dropped": ("listing", drop),
    "no-file": ("file", status(404, X_Error_Code="EntryNotFound")),
    "gated": ("file", status(401, X_Error_Code="GatedRepo")),
    "file-busy": ("file", status(500)),
    "file-dropped": ("file", drop),
    "cdn-busy": ("cdn", status(500)),
    "cdn-forbidden": ("cdn", status(403)),
    "cdn-cut": ("cdn", cut(10)),
}


@pytest.mark.parametrize("is_fetched", [False, True], ids=["read", "fetched"])
@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_nothing_secret_is_shown(
    hub: HubServer,
    endpoint: str,
    logged: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    fault: str,
    is_fetched: bool,
) -> None:
    hub.fail(*FAULTS[fault])
    with pytest.raises((ftw.FtwError, ConnectionError)) as caught:
        ftw.convert("org/name", tmp_path / "out") if is_fetched else ftw.inspect("org/name")
    shown = ["".join(traceback.format_exception(caught.value)), repr(caught.value), *logged]
    command = ["convert", "org/name", str(tmp_path / "out")] if is_fetched else ["inspect", "org/name", "--json"]
    assert main(command) == 1
    shown += [*capsys.readouterr(), *logged]
    assert "org/name" in shown[0]
    for secret in SECRETS:
        assert all(secret not in text for text in shown), secret


def test_hub_that_cannot_be_reached_is_named_without_its_user(hub: HubServer, endpoint: str, logged: list[str]) -> None:
    hub.close()
    with pytest.raises(ftw.SourceNotFoundError, match=f"the hub cannot be reached at {hub.url}: Connect") as caught:
        ftw.inspect("org/name")
    shown = ["".join(traceback.format_exception(caught.value)), *logged]
    assert all(secret not in text for secret in SECRETS for text in shown)


def test_what_is_told_of_a_model_has_no_address(
    hub: HubServer, endpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", "org/name", str(tmp_path / "out"), "--json"]) == 0
    assert main(["inspect", "org/name", "--json"]) == 0
    written = (tmp_path / "out" / "freetoken_weight.json").read_text()
    shown = [*capsys.readouterr(), written]
    assert json.loads(written)["source_model_path"] == "org/name"
    assert all(secret not in text for secret in SECRETS for text in shown)


ENDPOINTS = {
    "password": "http://alice:s3cret@127.0.0.1:1",
    "at-sign": "http://alice:s3c@ret@127.0.0.1:1",
    "slash": "https://alice:s3/cret@127.0.0.1:1",
    "number-sign": "https://alice:s3#cret@127.0.0.1:1",
    "no-scheme": "alice:s3cret@127.0.0.1:1",
    "space": "https://alice:s3 cret@127.0.0.1:1",
    "tab": "https://alice:s3\tcret@127.0.0.1:1",
    "bracket": "https://alice:s3cret@[::1",
}


@pytest.mark.parametrize("name", ENDPOINTS, ids=str)
@pytest.mark.parametrize("token", [None, "hf_abcdefghijklmnopqrstuvwxyz\x01"], ids=["no-token", "broken-token"])
def test_command_tells_nothing_of_its_environment(tmp_path: Path, name: str, token: str | None) -> None:
    environment = {**os.environ, "HF_ENDPOINT": ENDPOINTS[name], "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path)}
    environment.update({"HF_TOKEN": token} if token else {})
    script = "import time; time.sleep = lambda seconds: None; from ftw.cli.main import run; run()"
    command = [sys.executable, "-c", script, "inspect", "org/name"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, cwd=tmp_path)
    shown = done.stdout + done.stderr
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("ftw: error: org/name: hub id: ")
    assert "Traceback" not in shown
    assert all(part not in shown for part in ("alice", "s3", "cret", "abcdefghijkl"))


def test_broken_address_of_the_hub_is_told_without_it(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "https://alice:s3/cret@127.0.0.1")
    problem = r"org/name: hub id: HF_ENDPOINT is not an address such as https://HOST; .* is written as %2F or %20$"
    with pytest.raises(ftw.SourceNotFoundError, match=problem):
        ftw.inspect("org/name")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("for url: https://u:p@host/x?y=z", "for url: https://host/x?y=z"),
        ("at http://u@host:80", "at http://host:80"),
        ("http://u:p@q@host/", "http://host/"),
        ("https://host/a@b", "https://host/a@b"),
        ("at https://cdn/x?a=b&X-Amz-Signature=y&c=d)", "at https://cdn/x?…)"),
        ("at https://cdn/x?sig=y", "at https://cdn/x?…"),
        ("mail me@host", "mail me@host"),
        ("b'Bearer abc.def'", "b'Bearer …'"),
        ("token hf_abcdefghijklmnopqrst is", "token … is"),
        ("org/hf_model", "org/hf_model"),
    ],
    ids=str,
)
def test_text_without_secrets(text: str, shown: str) -> None:
    assert redact(text) == shown
    assert "?" not in redact_queries(text)
