"""The README and the pages it leads to: what they say of models is so, their commands and links are there."""

import re
import runpy
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from ftw.bench.checkpoints import write_hollow_checkpoint
from ftw.cli.demo_checkpoint import write_demo_checkpoint
from ftw.cli.main import main
from places import ROOT

import ftw

README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
# Rows and columns of the token embedding, and what the published config.json says besides; the flag of Gemma 3 is
# absent there.
MODELS: dict[str, tuple[int, int, bool | None, dict[str, Any]]] = {
    "Qwen3-30B-A3B": (151_936, 2048, False, {"model_type": "qwen3_moe", "num_hidden_layers": 48,
                                             "num_key_value_heads": 4, "head_dim": 128}),
    "Qwen3-8B": (151_936, 4096, False, {"model_type": "qwen3", "num_hidden_layers": 36, "num_key_value_heads": 8,
                                        "head_dim": 128}),
    "Llama-3.1-8B": (128_256, 4096, False, {"model_type": "llama"}),
    "Qwen3-4B": (151_936, 2560, True, {"model_type": "qwen3"}),
    "Llama-3.2-3B": (128_256, 3072, True, {"model_type": "llama"}),
    "Gemma 3": (262_208, 2560, None, {"model_type": "gemma3_text"}),
}  # fmt: skip
ARCHITECTURES = {"qwen3_moe": "Qwen3Moe", "qwen3": "Qwen3", "llama": "Llama", "gemma3_text": "Gemma3"}


def inspect_model(name: str, folder: Path) -> dict[str, Any]:
    """Inspect a checkpoint that has a model's configuration, its table, and its LM head where it has one."""
    rows, columns, flag, facts = MODELS[name]
    config = {"architectures": [f"{ARCHITECTURES[facts['model_type']]}ForCausalLM"], "vocab_size": rows, **facts}
    config |= {"hidden_size": columns, "num_attention_heads": 32}
    config |= {} if flag is None else {"tie_word_embeddings": flag}
    names = ["model.embed_tokens.weight"] + ["lm_head.weight"] * (flag is False)
    write_hollow_checkpoint(folder, dict.fromkeys(names, (rows, columns)), config)
    return ftw.inspect(folder).to_dict()


def line_with(text: str) -> str:
    return next(line for line in README.splitlines() if text in line)


def anchors(page: Path) -> set[str]:
    """Return what a link may name in a page, as GitHub makes it of headings."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", MODELS)
def test_models_that_the_readme_names_are_as_it_says(tmp_path: Path, name: str) -> None:
    found = inspect_model(name, tmp_path / "model")
    is_named_tied = name in line_with("**Who does not:**")
    assert (name in line_with("**Who gains:**")) != is_named_tied
    assert found["host"]["eligible"] == (not is_named_tied)
    assert found["host"]["reason"] == ("tied" if is_named_tied else "ok")
    if not is_named_tied:
        size = f"{found['host']['nbytes'] / 2**20:.0f} MiB"
        assert re.search(rf"{size} (of VRAM )?for {name}", line_with("**How much:**"))


@pytest.mark.parametrize(("name", "tokens"), [("Qwen3-30B-A3B", 6300), ("Qwen3-8B", 8400)])
def test_tokens_that_the_readme_names_are_what_inspect_says(tmp_path: Path, name: str, tokens: int) -> None:
    assert inspect_model(name, tmp_path / "model")["gain"]["kv_tokens"] // 100 * 100 == tokens
    assert f"{tokens}" in line_with("**How much:**")


def test_readme_is_short() -> None:
    assert len(README.splitlines()) <= 120


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    lost = []
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not link.startswith("https://") and not (target.exists() and (not anchor or anchor in anchors(target))):
            lost.append(link)
    assert lost == []


@pytest.mark.parametrize("page", PAGES[1:], ids=lambda page: page.name)
def test_page_says_at_its_top_for_whom_it_is(page: Path) -> None:
    top = page.read_text(encoding="utf-8").partition("\n## ")[0]
    assert re.search(r"\b[Ff]or (people|everyone|users|authors|contributors|Python programmers)\b", top)


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.name)
def test_index_names_each_page(page: Path) -> None:
    assert page.name == "README.md" or f"]({page.name})" in (ROOT / "docs" / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", ["README.md", "docs/convert.md", "docs/inspect.md"])
def test_options_of_commands_in_texts_are_there(
    page: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    lines = re.findall(r"^ {4}ftw (\w+)(.*)$", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE)
    assert lines
    for command, words in lines:
        assert main([command, "--help"]) == 0
        known = set(re.findall(r"--[\w-]+", capsys.readouterr().out))
        assert set(re.findall(r" \[?(--[\w-]+)", words.partition("  #")[0])) - known == set()


def test_code_of_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_demo_checkpoint(tmp_path / "path/to/checkpoint")
    monkeypatch.chdir(tmp_path)
    code = re.findall(r"```python\n(.*?)```", README, re.DOTALL)[0]
    names: dict[str, Any] = {}
    exec(compile(code.replace("cuda:0", "cpu"), "README.md", "exec"), names)
    assert names["rows"].shape == (3, 256)
    assert "lm_head.weight" in names["weights"]
    assert names["rows"].dtype == torch.bfloat16


def test_picture_shows_what_inspect_prints(tmp_path: Path) -> None:
    made = runpy.run_path(str(ROOT / "docs" / "make_picture.py"))
    text, _ = made["run_inspect"](tmp_path)
    shown = re.findall(r"<text[^>]*>([^<]*)", made["draw_terminal"](text))
    committed = re.findall(r"<text[^>]*>([^<]*)", made["PICTURE"].read_text(encoding="utf-8"))
    assert committed == shown, "run `python docs/make_picture.py`"
    assert shlex.split(text.splitlines()[0])[:2] == ["$", "ftw"]
