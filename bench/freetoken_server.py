"""FreeToken's own server on what `ftw convert --layout freetoken` wrote: does it answer as on its own FTW?

Run by hand, where FreeToken and a GPU are; each step leaves its JSON in RESULTS at once:

    python -m ftw.bench.freetoken_server WORK RESULTS [STEP ...]

    answers-qwen3, answers-qwen3-5    greedy answers from its own FTW and from ours, with `--embed-weights` gpu and
                                      host, and with experts streaming
    slots                             expert slots and tokens per second with the table on the GPU and on the host,
                                      with little free VRAM, which another process holds down; in turns
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ftw

from .child import module_command, python_command
from .environment import describe_environment
from .freetoken_models import Sizes, write_qwen3_5_moe, write_qwen3_moe

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_PORT = 2350
_START_SECONDS = 240  # kernels compile at the first start
_ASK_SECONDS = 240
_FLAGS = (
    *("--served-model-name", "default", "--max-running-requests", "1", "--cuda-graph-max-bs", "1"),
    *("--max-seq-len-override", "4096", "--moe-strategy", "offload", "--kv-reserve-tokens", "4096"),
)
_FIXED_KV = ("--num-tokens", "8192")  # so that the VRAM that the table gives back can be seen
_STREAMING = ("--moe-cache-size", "64")
_MODELS = {"qwen3": write_qwen3_moe, "qwen3-5": write_qwen3_5_moe}
_HOLDER = """
import sys, torch
free = torch.cuda.mem_get_info()[0]
held = torch.empty(free - int(sys.argv[1]), dtype=torch.uint8, device="cuda")
print("held", flush=True)
sys.stdin.read()
"""


class Server:
    """FreeToken's server on a folder, until it is stopped."""

    def __init__(self, folder: Path, embed: str, log: Path, flags: tuple[str, ...] = _FIXED_KV) -> None:
        command = module_command("freetoken", "--model-path", str(folder), "--port", str(_PORT), *_FLAGS, *flags)
        self.log = log
        with log.open("w") as file:
            self._process = subprocess.Popen(
                [*command, "--embed-weights", embed], stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )

    def wait(self) -> float:
        """Wait until it is ready; return the seconds.

        Raises:
            RuntimeError: It ended, failed or took too long; the end of its log is told.
        """
        began = time.monotonic()
        while time.monotonic() - began < _START_SECONDS:
            if self._process.poll() is not None:
                break
            try:
                status = _get("/health")["status"]
            except OSError:
                status = ""
            if status == "ok":
                return time.monotonic() - began
            if status == "error":
                break
            time.sleep(0.25)
        raise RuntimeError(f"server is not up: {self.log.read_text(errors='replace')[-3000:]}")

    def stop(self) -> None:
        """End it and all of its processes."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self._process.pid, number)
                self._process.wait(timeout=15)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue
        _wait_for_vram()


@contextmanager
def serving(folder: Path, embed: str, log: Path, flags: tuple[str, ...] = _FIXED_KV) -> Iterator[Server]:
    """Have a server up."""
    server = Server(folder, embed, log, flags)
    try:
        yield server
    finally:
        server.stop()


def _get(path: str) -> Any:
    with urllib.request.urlopen(f"http://127.0.0.1:{_PORT}{path}", timeout=5) as answer:
        return json.load(answer)


def _ask(prompt: str, num_tokens: int) -> dict[str, Any]:
    """Ask for a greedy continuation; return its text and the tokens per second after the first."""
    question = {"model": "default", "prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
    body = json.dumps({**question, "stream": True, "stream_options": {"include_usage": True}}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{_PORT}/v1/completions", data=body, headers={"Content-Type": "application/json"}
    )
    text, times, count = "", [], 0
    with urllib.request.urlopen(request, timeout=_ASK_SECONDS) as answer:
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            count = (event.get("usage") or {}).get("completion_tokens", count)
            for choice in event.get("choices", []):
                if choice["text"]:
                    text += choice["text"]
                    times.append(time.monotonic())
    seconds = times[-1] - times[0]
    return {"text": text, "tokens": count, "tokens_per_s": round((count - 1) / seconds, 2) if seconds else None}


def _prompts(vocab: int) -> list[str]:
    generator = random.Random(1)
    return [" ".join(f"t{generator.randrange(2, vocab)}" for _ in range(length)) for length in (5, 64, 700)]


def _vram_used() -> int:
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return int(subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0])


def _wait_for_vram() -> None:
    """Wait until the driver has taken back what a server had."""
    before = _vram_used()
    for _ in range(40):
        time.sleep(0.25)
        now = _vram_used()
        if now >= before - 16:
            return
        before = now


def _prepare(name: str, work: Path, sizes: Sizes) -> dict[str, Path]:
    """Make a source, FreeToken's own FTW of it, and ours, once."""
    source, own, ours = (work / f"{name}-{kind}" for kind in ("source", "own", "ftw"))
    if not source.exists():
        _MODELS[name](source, sizes)
    if not own.exists():
        command = module_command("freetoken.checkpoint", "--model", str(source), "--out", str(own))
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    if not ours.exists():
        ftw.convert(source, ours, layout="freetoken", embed="host")
        problems = ftw.verify(ours, against=source).problems
        if problems:
            raise RuntimeError(problems[0])
    return {"own": own, "ftw": ours}


def answers(name: str, work: Path, results: Path) -> dict[str, Any]:
    """Compare the greedy answers from each folder with those from FreeToken's own, its table on the GPU."""
    sizes = Sizes()
    folders = _prepare(name, work, sizes)
    ways = [
        *((folder, embed, _FIXED_KV) for folder in folders for embed in ("gpu", "host")),
        ("ftw", "host", (*_FIXED_KV, *_STREAMING)),
    ]
    rows: list[dict[str, Any]] = []
    for folder, embed, flags in ways:
        row: dict[str, Any] = {"folder": folder, "embed_weights": embed, "streams": flags != _FIXED_KV}
        with serving(folders[folder], embed, results / f"{name}-{folder}-{embed}.log", flags) as server:
            row["start_s"] = round(server.wait(), 1)
            texts = [_ask(prompt, 48)["text"] for prompt in _prompts(sizes.vocab)]
            texts.append(_ask(_prompts(sizes.vocab)[1], 400)["text"])
            row["vram_mib"] = _vram_used()
        first = rows[0]["texts"] if rows else texts
        row["equal"] = [_agreement(text, wanted) for text, wanted in zip(texts, first, strict=True)]
        row["distinct_words"] = len(set(texts[-1].split()))
        rows.append({**row, "texts": texts})
        print({key: value for key, value in rows[-1].items() if key != "texts"}, flush=True)
    return {"rows": rows}


def _agreement(text: str, wanted: str) -> str:
    """Return how many words agree before the first that does not, of how many."""
    words, others = text.split(), wanted.split()
    pairs = enumerate(zip(words, others, strict=False))
    same = next((place for place, (one, other) in pairs if one != other), min(len(words), len(others)))
    return f"{same}/{max(len(words), len(others))}"


def slots(work: Path, results: Path, free_bytes: int = 6 << 30, repeats: int = 3) -> dict[str, Any]:
    """Count expert slots and tokens per second where VRAM is short, table on the GPU and on the host in turns."""
    sizes = Sizes(layers=6, experts=128)
    ours = _prepare_large(work, sizes)
    holder = subprocess.Popen(
        python_command(_HOLDER, str(free_bytes)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    assert holder.stdin is not None
    holder.stdout.readline()
    rows = []
    try:
        for number in range(repeats):
            for embed in ("gpu", "host"):
                log = results / f"slots-{embed}-{number}.log"
                with serving(ours, embed, log, ()) as server:
                    server.wait()
                    _ask(_prompts(sizes.vocab)[1], 64)
                    speeds = [_ask(_prompts(sizes.vocab)[1], 300)["tokens_per_s"] for _ in range(2)]
                found = [
                    int(count)
                    for count in re.findall(r"resolved moe_cache_size=(\d+)", log.read_text(errors="replace"))
                ]
                rows.append({"embed_weights": embed, "run": number, "slots": found, "tokens_per_s": speeds})
                print(rows[-1], flush=True)
    finally:
        holder.stdin.close()
        holder.wait()
    return {"free_bytes": free_bytes, "rows": rows}


def _prepare_large(work: Path, sizes: Sizes) -> Path:
    source, ours = work / "large-source", work / "large-ftw"
    if not ours.exists():
        write_qwen3_moe(source, sizes)
        ftw.convert(source, ours, layout="freetoken", embed="host")
    return ours


def main() -> None:
    """Run the steps that are named, or all."""
    work, results, *names = sys.argv[1:]
    steps: dict[str, Callable[[], dict[str, Any]]] = {
        "answers-qwen3": lambda: answers("qwen3", Path(work), Path(results)),
        "answers-qwen3-5": lambda: answers("qwen3-5", Path(work), Path(results)),
        "slots": lambda: slots(Path(work), Path(results)),
    }
    for name in names or steps:
        try:
            figures = steps[name]()
        except (RuntimeError, OSError, subprocess.SubprocessError) as error:
            figures = {"error": str(error)}
            print(name, error, flush=True)
        result = {"bench": f"freetoken_server {name}", "environment": describe_environment(), **figures}
        (Path(results) / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
