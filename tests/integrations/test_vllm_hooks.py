"""What the plug-in asks of a release of vLLM, when it takes hold of it, and what a user may ask for."""

import inspect
import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_vllm import FakeVllm, installed

import ftw
from ftw.integrations.vllm import register
from ftw.integrations.vllm.plugin import AfterImport
from ftw.integrations.vllm.settings import Settings, find_settings


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeVllm]:
    yield from installed(monkeypatch)


def test_release_that_has_everything_is_taken(vllm: FakeVllm, caplog: pytest.LogCaptureFixture) -> None:
    from ftw.integrations.vllm.hooks import check_release

    check_release(has_hot_rows=True)
    assert caplog.text == ""


def test_release_that_was_not_run_is_said(vllm: FakeVllm, caplog: pytest.LogCaptureFixture) -> None:
    from ftw.integrations.vllm.hooks import check_release

    vllm.modules["vllm"].__version__ = "0.27.0"
    with caplog.at_level(logging.WARNING, logger="vllm.ftw"):
        check_release(has_hot_rows=False)
    assert caplog.messages == [
        "ftw has not been run with vLLM 0.27.0, which has what it needs; it was with vLLM 0.26.0"
    ]


def test_every_function_that_is_gone_or_different_is_refused_in_one_line(vllm: FakeVllm) -> None:
    from ftw.integrations.vllm.hooks import NEEDED, NEEDED_FOR_HOT_ROWS, check_release

    for place in {**NEEDED, **NEEDED_FOR_HOT_ROWS}:
        module, _, path = place.partition(":")
        *owners, name = path.split(".")
        owner: object = vllm.modules[module]
        for part in owners:
            owner = getattr(owner, part)
        original = inspect.getattr_static(owner, name)
        setattr(owner, name, lambda another: another)
        with pytest.raises(ftw.FtwError, match=r"^vllm 0\.26\.0: .*found \(.*another\), \(.*\) is needed"):
            check_release(has_hot_rows=True)
        delattr(owner, name)
        if not hasattr(owner, name):  # nor do its bases have it
            with pytest.raises(ftw.FtwError, match=r"found nothing, \(.*\) is needed"):
                check_release(has_hot_rows=True)
        setattr(owner, name, original)
    check_release(has_hot_rows=True)


def test_hook_of_hot_rows_is_needed_for_hot_rows_alone(vllm: FakeVllm) -> None:
    from ftw.integrations.vllm.hooks import check_release

    del vllm.modules["vllm.v1.worker.gpu_worker"].Worker
    check_release(has_hot_rows=False)
    with pytest.raises(ftw.FtwError, match=r"Worker\.execute_model: found nothing"):
        check_release(has_hot_rows=True)


def test_plug_in_that_is_registered_twice_wraps_once(vllm: FakeVllm) -> None:
    register()
    wrapped = vllm.BaseModelLoader.load_model
    register()
    assert vllm.BaseModelLoader.load_model is wrapped
    assert list(inspect.signature(wrapped).parameters) == ["self", "vllm_config", "model_config", "prefix"]


def test_vllm_without_loaders_is_left_alone_unless_ftw_is_asked_for(
    vllm: FakeVllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    del vllm.modules["vllm.model_executor.model_loader"].BaseModelLoader
    register()
    monkeypatch.setenv("FTW_EMBED", "auto")
    with pytest.raises(ftw.FtwError, match=r"^vllm 0\.26\.0: .*found no BaseModelLoader"):
        register()


def test_module_that_is_imported_later_is_followed_by_the_action(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "imported_late.py").write_text("value = 7\n")
    monkeypatch.syspath_prepend(tmp_path)
    seen: list[object] = []
    finder = AfterImport("imported_late", lambda module: seen.append(module.value))
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    import json.tool  # noqa: F401 - another module goes by

    assert seen == []
    import imported_late  # type: ignore[import-not-found]

    assert seen == [imported_late.value] == [7]
    assert finder not in sys.meta_path
    del sys.modules["imported_late"]


@pytest.mark.parametrize(
    ("environ", "config", "load_format", "found"),
    [
        ({}, {}, "auto", None),
        ({"FTW_EMBED": ""}, {}, "auto", None),
        ({"FTW_EMBED": "gpu"}, {}, "auto", None),
        ({"FTW_EMBED": "host"}, {}, "auto", Settings("host")),
        ({"FTW_EMBED": "auto"}, None, "auto", Settings("auto")),
        ({}, {"ftw": {"embed": "host", "hot_bytes": "64MiB"}}, "auto", Settings("host", 64 << 20)),
        ({"FTW_EMBED": "host"}, {"ftw": {"embed": "gpu"}}, "auto", None),
        ({"FTW_EMBED": "host"}, {"ftw": {"hot_bytes": 4096}}, "auto", Settings("host", 4096)),
        ({"FTW_EMBED": "auto"}, {"ftw": {"follow_links": True}}, "auto", Settings("auto", follow_links=True)),
        ({}, {"other": 1}, "auto", None),
        ({}, {}, "ftw", Settings("auto")),
        ({"FTW_EMBED": "gpu"}, {}, "ftw", None),
    ],
    ids=str,
)
def test_what_is_asked_for(environ: dict[str, str], config: object, load_format: str, found: Settings | None) -> None:
    assert find_settings(environ, config, load_format) == found


@pytest.mark.parametrize(
    ("environ", "config", "problem"),
    [
        ({"FTW_EMBED": "cpu"}, {}, "FTW_EMBED: found 'cpu', allowed are host, auto, gpu"),
        ({}, {"ftw": "host"}, "additional config: ftw: found 'host', such as {'embed': 'host'} is needed"),
        ({}, {"ftw": {"embed": "ram"}}, "additional config: ftw: embed: found 'ram', allowed are host, auto, gpu"),
        (
            {},
            {"ftw": {"embde": "host"}},
            "additional config: ftw: found 'embde', allowed are embed, hot_bytes, follow_links",
        ),
        ({}, {"ftw": {"embed": "host", "hot_bytes": "much"}}, "additional config: ftw: hot_bytes"),
        ({}, {"ftw": {"embed": "host", "follow_links": "yes"}}, "additional config: ftw: follow_links: found 'yes'"),
        ({}, {"ftw": {"hot_bytes": "1MiB"}}, "additional config: ftw: hot_bytes: with embed 'gpu'"),
    ],
    ids=str,
)
def test_what_may_not_be_asked_for(environ: dict[str, str], config: object, problem: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(problem)}"):
        find_settings(environ, config, "auto")
