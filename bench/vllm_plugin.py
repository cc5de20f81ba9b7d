"""vLLM with its table in host memory beside vLLM as it is: tokens, KV cache, memory, times. Run by hand.

    python -m ftw.bench.vllm_plugin OUT MODELS [STEP …]

Each engine is a process of its own, each step leaves OUT/STEP.json as soon as it is done, and a step that fails says so
there and does not end the others. Steps, in order of their weight; all of them without a name:

    eager, graphs    tokens and rows equal, KV tokens and model memory by the table's bytes; graphs also: stock, ftw,
                     stock, ftw on one cache of compiled models, and `reload_weights`
    serve            `vllm serve --load-format ftw` with the OpenAI client, multi-process engine
    times            decoding and prefill in interleaved rounds, hot rows on and off, vLLM's own ways beside them
    moe, gemma, fp8  other models: the table moves; a tied one is refused by "host" and served by "auto"
    sleep            same tokens, and VRAM as promised

TINY=1 REHEARSE=1 runs all of it but `serve` on a CPU without vLLM, to see that the steps work.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
import traceback
import urllib.request
from pathlib import Path
from typing import Any

from ftw.sizes import align_up

from .child import module_command
from .environment import describe_environment
from .vllm_engine import Prompts
from .vllm_models import make

HOST = {"additional_config": {"ftw": {"embed": "host"}}}
EAGER = {"enforce_eager": True}
_BLOCK_NBYTES = 2 << 20  # torch's allocator takes as many for a table, and vLLM counts what it takes
_ROUNDS = 2 if os.environ.get("TINY") else 9
_KERNELS = ("lookup_kernel", "elect_kernel", "spread_kernel")


class Child:
    """An engine's process; its log lies beside the results."""

    def __init__(
        self, out: Path, name: str, model: Path, *, environ: dict[str, str] | None = None, **spec: Any
    ) -> None:
        self._log = out / f"{name}.log"
        command = module_command("ftw.bench.vllm_engine", json.dumps({"model": str(model), **spec}))
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=_environ(environ)
            )
        self.facts: dict[str, Any] = {}

    def wait(self) -> dict[str, Any]:
        """Return what the engine has once it has started, or its error."""
        self.facts = self._read()
        return self.facts

    def ask(self, do: str, **command: Any) -> dict[str, Any]:
        """Return what it answers to a command."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **command}) + "\n")
        self._process.stdin.flush()
        return self._read()

    def end(self) -> list[str]:
        """End the process; return the lines of its log that are ftw's, and those of kernels compiled too late."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait(timeout=120)
        lines = self._log.read_text(errors="replace").splitlines()
        late = [line for line in lines if "during inference" in line and any(kernel in line for kernel in _KERNELS)]
        return [line[-400:] for line in lines if "ftw:" in line or "on the GPU" in line] + late

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        found: dict[str, Any] = json.loads(line) if line else {"error": "the process has ended"}
        return found


def run(out: Path, name: str, model: Path, *commands: dict[str, Any], **spec: Any) -> dict[str, Any]:
    """Start an engine alone, give it commands, and return its facts, its answers and what it logged."""
    child = Child(out, name, model, **spec)
    found: dict[str, Any] = {"facts": child.wait()}
    if "error" not in found["facts"]:
        found["answers"] = [child.ask(**command) for command in commands]
    found["log"] = child.end()
    (out / f"{name}.json").write_text(json.dumps(found))
    return found


TOKENS: dict[str, Any] = {"do": "tokens"}
ROWS: dict[str, Any] = {"do": "rows"}


def compare(stock: dict[str, Any], ours: dict[str, Any], table_nbytes: int) -> dict[str, Any]:
    """Return what differs between two runs whose first command was `tokens`."""
    one, other = stock["facts"], ours["facts"]
    if "error" in one or "error" in other:
        return {"ok": False, "stock": one.get("error"), "ftw": other.get("error")}
    fallen = one["model_memory"] - other["model_memory"]
    found = {
        "tokens_equal": stock["answers"][0].get("hash") == ours["answers"][0].get("hash"),
        "kv_tokens": [one["kv_tokens"], other["kv_tokens"]],
        "kv_tokens_gained": other["kv_tokens"] - one["kv_tokens"],
        "model_memory": [one["model_memory"], other["model_memory"]],
        "memory_fallen": fallen,
        "memory_falls_by_the_table": fallen in (table_nbytes, align_up(table_nbytes, _BLOCK_NBYTES)),
        "kernels_compiled_late": [line for line in ours["log"] if "during inference" in line],
    }
    return {**found, "ok": found["tokens_equal"] and found["memory_falls_by_the_table"]}


def step_eager(out: Path, models: Path) -> dict[str, Any]:
    """Stock and ftw without graphs."""
    model = make("untied", models)
    stock = run(out, "eager-stock", model, TOKENS, options=EAGER)
    ours = run(out, "eager-ftw", model, TOKENS, ROWS, options={**EAGER, **HOST})
    return {**compare(stock, ours, _table_nbytes(model)), "stock": stock["facts"], "ftw": _short(ours)}


def step_graphs(out: Path, models: Path) -> dict[str, Any]:
    """Compiled models on one cache: stock, ftw, stock, ftw; the last two reload other weights."""
    model, other = make("untied", models), make("other", models)
    environ = {"VLLM_CACHE_ROOT": str(models / "cache")}
    reload: list[dict[str, Any]] = [{"do": "reload", "path": str(other)}, TOKENS]
    first = run(out, "graphs-stock", model, TOKENS, environ=environ)
    second = run(out, "graphs-ftw", model, TOKENS, environ=environ, options=HOST)
    third = run(out, "graphs-stock-again", model, TOKENS, *reload, environ=environ)
    fourth = run(out, "graphs-ftw-again", model, TOKENS, *reload, ROWS, environ=environ, options=HOST)
    found = compare(first, second, _table_nbytes(model))
    runs = (first, second, third, fourth)
    found["hashes"] = [entry.get("answers", [{}])[0].get("hash") for entry in runs]
    reloaded = [entry["answers"][2].get("hash") if "answers" in entry else None for entry in (third, fourth)]
    found["reloaded_hashes"] = reloaded
    found["rows_after_reload"] = fourth["answers"][3] if "answers" in fourth else fourth["facts"]
    found["ok"] = len(set(found["hashes"])) == 1 and len(set(reloaded)) == 1 and reloaded[0] != found["hashes"][0]
    return {**found, "stock": first["facts"], "ftw": _short(second)}


def step_serve(out: Path, models: Path) -> dict[str, Any]:
    """The server, on an FTW folder, asked by the OpenAI client; its answers beside those of the engine in process."""
    import ftw

    model, folder = make("untied", models), models / "untied.ftw"
    if not folder.exists():
        ftw.convert(model, folder, embed="host")
    port = 8123
    command = module_command("vllm.entrypoints.cli.main", "serve", str(folder), "--load-format", "ftw")
    command += ["--port", str(port), "--max-model-len", "16384", "--gpu-memory-utilization", "0.3"]
    environ = _environ({"FTW_EMBED": "host", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"})
    log = out / "serve.log"
    with log.open("w") as lines:
        server = subprocess.Popen(command, stdout=lines, stderr=subprocess.STDOUT, env=environ)
    try:
        _wait_for(f"http://127.0.0.1:{port}/health", server)
        answers = [_complete(port, str(folder), prompt) for prompt in Prompts().nineteen()]
    finally:
        server.terminate()
        server.wait(timeout=60)
    kept = out / "eager-stock.json"
    wanted = json.loads(kept.read_text())["answers"][0]["tokens"] if kept.exists() else None
    said = [line[-400:] for line in log.read_text(errors="replace").splitlines() if "ftw:" in line]
    is_equal = None if wanted is None else [one == other for one, other in zip(answers, wanted, strict=True)]
    return {"ok": is_equal is None or all(is_equal), "equal_to_stock": is_equal, "log": said, "answers": answers}


def step_times(out: Path, models: Path) -> dict[str, Any]:
    """Engines beside each other, one working at a time; medians of interleaved rounds, and their spread."""
    model = make("untied", models)
    fixed = {"kv_cache_memory_bytes": 6 << 30, "gpu_memory_utilization": 0.1}
    hot = {"additional_config": {"ftw": {"embed": "host", "hot_bytes": "64MiB"}}}
    ways: dict[str, dict[str, Any]] = {"stock": {}, "stock again": {}, "ftw": HOST, "ftw hot": hot}
    ways["vllm cpu_offload_params"] = {"cpu_offload_gb": 1.0, "cpu_offload_params": ["embed_tokens"]}
    ways["vllm uva, 1 GB"] = {"cpu_offload_gb": 1.0}
    loads: dict[str, dict[str, Any]] = {
        f"decode {batch}": {"batch": batch, "length": 16, "num_tokens": 128} for batch in (1, 16, 128)
    }
    for length in (512, 8000):
        for spread in ("uniform", "zipf"):
            loads[f"prefill {length} {spread}"] = {
                "batch": 1, "length": min(length, 300) if os.environ.get("TINY") else length, "num_tokens": 1,
                "zipf": spread == "zipf",
            }  # fmt: skip
    children = {}
    for number, (way, options) in enumerate(ways.items()):
        environ = {"VLLM_CACHE_ROOT": str(models / f"cache-times-{number}")}
        children[way] = Child(out, f"times-{number}", model, environ=environ, options={**fixed, **options})
    facts = {way: child.wait() for way, child in children.items()}
    working = {way: child for way, child in children.items() if "error" not in facts[way]}
    seconds: dict[str, dict[str, list[float]]] = {load: {way: [] for way in working} for load in loads}
    for number in range(_ROUNDS + 1):
        for load, command in loads.items():
            for way, child in working.items():
                found = child.ask("time", **command)
                if number and "s" in found:  # the first round warms up
                    seconds[load][way].append(found["s"])
        (out / "times-rounds.json").write_text(json.dumps(seconds))
    for child in children.values():
        child.end()
    return {"ok": True, "facts": facts, "ms": {load: _medians(by_way) for load, by_way in seconds.items()}}


def step_moe(out: Path, models: Path) -> dict[str, Any]:
    """Qwen3-MoE."""
    return _two(out, models, "moe")


def step_fp8(out: Path, models: Path) -> dict[str, Any]:
    """A checkpoint in FP8 whose table is plain."""
    return _two(out, models, "fp8")


def step_gemma(out: Path, models: Path) -> dict[str, Any]:
    """A tied model: "host" ends the start with one line, "auto" serves it as stock does."""
    model = make("gemma", models)
    refused = run(out, "gemma-host", model, TOKENS, options={**EAGER, **HOST})
    stock = run(out, "gemma-stock", model, TOKENS, options=EAGER)
    auto = run(out, "gemma-auto", model, TOKENS, options=EAGER, environ={"FTW_EMBED": "auto"})
    found = compare(stock, auto, 0)
    is_refused = "error" in refused["facts"] and "LM head" in str(refused["facts"]["error"])
    return {**found, "ok": found["ok"] and is_refused, "host": refused["facts"].get("error"), "log": auto["log"]}


def step_sleep(out: Path, models: Path) -> dict[str, Any]:
    """Sleep at level 1, wake, and the same tokens; the VRAM meanwhile."""
    model = make("untied", models)
    options = {**EAGER, "enable_sleep_mode": True}
    commands: list[dict[str, Any]] = [TOKENS, {"do": "sleep"}, TOKENS, ROWS]
    stock = run(out, "sleep-stock", model, *commands, options=options)
    ours = run(out, "sleep-ftw", model, *commands, options={**options, **HOST})
    found = compare(stock, ours, _table_nbytes(model))
    if "answers" in ours:
        found["same_after_waking"] = ours["answers"][0].get("hash") == ours["answers"][2].get("hash")
        found["ok"] = found["ok"] and found["same_after_waking"]
        found["vram"] = [entry["answers"][1] for entry in (stock, ours) if "answers" in entry]
    return found


STEPS = {
    step.__name__.removeprefix("step_"): step
    for step in (step_eager, step_graphs, step_serve, step_times, step_moe, step_gemma, step_fp8, step_sleep)
}


def _two(out: Path, models: Path, kind: str) -> dict[str, Any]:
    model = make(kind, models)
    stock = run(out, f"{kind}-stock", model, TOKENS, options=EAGER)
    ours = run(out, f"{kind}-ftw", model, TOKENS, ROWS, options={**EAGER, **HOST})
    return {**compare(stock, ours, _table_nbytes(model)), "ftw": _short(ours)}


def _short(entry: dict[str, Any]) -> dict[str, Any]:
    return {**entry["facts"], "log": entry["log"], "rows": entry.get("answers", [{}])[-1].get("differ")}


def _table_nbytes(model: Path) -> int:
    import ftw

    return int(ftw.inspect(model).verdict.token_embedding.nbytes)


def _medians(by_way: dict[str, list[float]]) -> dict[str, Any]:
    return {
        way: {"median": statistics.median(times) * 1e3, "min": min(times) * 1e3, "max": max(times) * 1e3}
        for way, times in by_way.items()
        if times
    }


def _environ(more: dict[str, str] | None) -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if name != "FTW_EMBED"}
    fixed = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    return {**own, **fixed, **(more or {})}


def _wait_for(url: str, server: subprocess.Popen[bytes], patience_s: float = 240.0) -> None:
    end = time.monotonic() + patience_s
    while time.monotonic() < end:
        if server.poll() is not None:
            raise RuntimeError(f"the server has ended with status {server.returncode}")
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5) as answer:
            if answer.status == 200:
                return
        time.sleep(0.5)
    raise RuntimeError(f"the server does not answer after {patience_s:.0f} s")


def _complete(port: int, model: str, prompt: list[int]) -> list[int]:
    from openai import OpenAI

    client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none")
    more = {"ignore_eos": True, "return_token_ids": True}
    done = client.completions.create(model=model, prompt=prompt, max_tokens=32, temperature=0, extra_body=more)
    ids: list[int] = done.choices[0].model_dump()["token_ids"]
    return ids


def main() -> None:
    """Run the steps that are named, or all."""
    out, models, *names = sys.argv[1:]
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "environment.json").write_text(json.dumps(describe_environment()))
    for name in names or STEPS:
        started = time.perf_counter()
        try:
            found = STEPS[name](folder, Path(models))
        except Exception as error:  # the other steps are worth their time
            traceback.print_exc()
            found = {"ok": False, "error": f"{type(error).__name__}: {error}"}
        found["s"] = round(time.perf_counter() - started, 1)
        (folder / f"{name}.json").write_text(json.dumps(found, indent=1))
        shown = {key: value for key, value in found.items() if key not in ("answers", "facts")}
        print("STEP", name, json.dumps(shown)[:3000], flush=True)


if __name__ == "__main__":
    main()
