"""One engine of vLLM in a process of its own, for `bench/vllm_plugin.py`: JSON lines in, JSON lines out.

    argument     {"model": …, "load_format": …, "options": {…}}: what `vllm.LLM` is made of
    first line   what the engine has: KV tokens, model memory, where the table is
    then         one line for each command: {"do": "tokens"}, {"do": "decode", "batch": 16}, …

With REHEARSE=1 there is no vLLM: ftw loads the table alone, and rows stand for tokens, so that all but the figures can
be tried on a CPU.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
import traceback
from typing import Any, Protocol

VOCAB = 512 if os.environ.get("TINY") else 151936
_LONGEST = 400 if os.environ.get("TINY") else 9000


class Engine(Protocol):
    """What answers commands."""

    def facts(self) -> dict[str, Any]:
        """Return what the engine has."""

    def generate(self, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        """Return the greedy tokens that follow each prompt."""

    def call(self, name: str, **arguments: Any) -> dict[str, Any]:
        """Do what one engine alone can: "reload", "sleep", "rows"."""


class Vllm:
    """vLLM's engine, in this process."""

    def __init__(self, spec: dict[str, Any]) -> None:
        from vllm import LLM

        started = time.perf_counter()
        defaults = {"gpu_memory_utilization": 0.3, "max_model_len": 16384, "max_num_batched_tokens": 8192, "seed": 0}
        options = {**defaults, "enable_prefix_caching": False, "skip_tokenizer_init": True, **spec.get("options", {})}
        self._model = spec["model"]
        self._llm = LLM(self._model, load_format=spec.get("load_format", "auto"), **options)
        self._init_s = round(time.perf_counter() - started, 1)

    def facts(self) -> dict[str, Any]:
        """See `Engine`."""
        config = self._llm.llm_engine.vllm_config
        cache = config.cache_config
        found: dict[str, Any] = self._llm.collective_rpc(_worker_facts)[0]
        found |= {"init_s": self._init_s, "blocks": cache.num_gpu_blocks, "block_size": cache.block_size}
        found["kv_tokens"] = (cache.num_gpu_blocks or 0) * cache.block_size
        found["graphs"] = str(config.compilation_config.cudagraph_mode)
        return found

    def generate(self, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        """See `Engine`."""
        from vllm import SamplingParams

        parameters = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        asked: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
        return [list(out.outputs[0].token_ids) for out in self._llm.generate(asked, parameters, use_tqdm=False)]

    def call(self, name: str, **arguments: Any) -> dict[str, Any]:
        """See `Engine`."""
        if name == "reload":
            self._model = arguments["path"]
            self._llm.collective_rpc("reload_weights", kwargs={"weights_path": self._model})
            return {}
        if name == "sleep":
            before = _used_bytes()
            self._llm.sleep(level=1)
            asleep = _used_bytes()
            self._llm.wake_up()
            return {"used_before": before, "used_asleep": asleep, "used_after": _used_bytes()}
        found: dict[str, Any] = self._llm.collective_rpc(_compare_rows, args=(self._model,))[0]
        return found


class Rehearsal:
    """Stands for vLLM's engine where there is none."""

    def __init__(self, spec: dict[str, Any]) -> None:
        import ftw

        self._embed = os.environ.get("FTW_EMBED") or spec.get("options", {}).get("additional_config", {}).get(
            "ftw", {}
        ).get("embed", "gpu")
        self._source = spec["model"]
        self._model = ftw.load(self._source, embed=self._embed, device="cpu")

    def facts(self) -> dict[str, Any]:
        """See `Engine`."""
        nbytes = self._model.embedding.table.nbytes
        is_host = self._model.memory.placement == "host"
        tokens = 100_000 + nbytes // 16 * is_host
        return {"kv_tokens": tokens, "block_size": 16, "model_memory": nbytes * (3 - is_host), "table_nbytes": nbytes}

    def generate(self, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        """See `Engine`."""
        import torch

        rows = [self._model.embedding(torch.tensor(prompt)).float().sum() for prompt in prompts]
        return [[int(row * 1000) % VOCAB + step for step in range(num_tokens)] for row in rows]

    def call(self, name: str, **arguments: Any) -> dict[str, Any]:
        """See `Engine`."""
        if name == "reload":
            import ftw

            self._model.close()
            self._model = ftw.load(arguments["path"], embed=self._embed, device="cpu")
        return {"rows": VOCAB, "differ": 0, "is_on_host": self._model.memory.placement == "host"}


def _worker_facts(worker: Any) -> dict[str, Any]:
    runner = worker.model_runner
    model = runner.get_model()
    table = next(module for path, module in model.named_modules() if path.endswith("embed_tokens"))
    rows = getattr(getattr(table, "quant_method", None), "rows", None)
    weight = getattr(table, "weight", None)
    return {
        "model_memory": int(runner.model_memory_usage),
        "layer": type(table).__name__,
        "method": type(getattr(table, "quant_method", None)).__name__,
        "parameter": list(weight.shape) if weight is not None else None,
        "pinned_nbytes": getattr(rows, "pinned_nbytes", 0),
        "hot_rows": rows.hot.rows.shape[0] if rows is not None and rows.hot is not None else 0,
        "used": _used_bytes(),
    }


def _compare_rows(worker: Any, source: str) -> dict[str, Any]:
    """Compare every row that the model's layer gives, bit for bit, with the checkpoint's."""
    import torch

    import ftw

    layer = next(m for path, m in worker.model_runner.get_model().named_modules() if path.endswith("embed_tokens"))
    with ftw.load(source, embed="gpu", device="cpu") as model:
        table = model.embedding.table
        differ = 0
        for start in range(0, table.shape[0], 4096):
            ids = torch.arange(start, min(start + 4096, table.shape[0]), device="cuda")
            differ += int((layer(ids).cpu() != table[start : start + ids.numel()]).any(dim=1).sum())
        return {"rows": table.shape[0], "differ": differ}


def _used_bytes() -> int:
    import torch

    free, total = torch.cuda.mem_get_info()
    return int(total - free)


class Prompts:
    """Prompts that are the same in every process: evenly spread ids, and ids as text has them (Zipf)."""

    def __init__(self) -> None:
        import torch

        self._torch = torch
        self._generator = torch.Generator().manual_seed(7)

    def uniform(self, length: int) -> list[int]:
        """Return ids that are mostly different."""
        return self._torch.randint(2, VOCAB, (length,), generator=self._generator).tolist()

    def zipf(self, length: int) -> list[int]:
        """Return ids of which few make up most."""
        weights = 1.0 / self._torch.arange(1, VOCAB + 1, dtype=self._torch.float64)
        return self._torch.multinomial(weights, length, True, generator=self._generator).tolist()

    def nineteen(self) -> list[list[int]]:
        """Return the prompts whose tokens are compared."""
        short = [self.uniform(16 + 5 * number) for number in range(16)]
        return [*short, self.uniform(_LONGEST // 13), self.uniform(_LONGEST // 3), self.zipf(_LONGEST)]


def answer(engine: Engine, command: dict[str, Any]) -> dict[str, Any]:
    """Do one command."""
    do = command.pop("do")
    if do == "tokens":
        tokens = engine.generate(Prompts().nineteen(), command.get("num_tokens", 32))
        return {"hash": hashlib.sha256(json.dumps(tokens).encode()).hexdigest()[:16], "tokens": tokens}
    if do == "time":
        prompts = Prompts()
        make = prompts.zipf if command.get("zipf") else prompts.uniform
        asked = [make(command["length"]) for _ in range(command["batch"])]
        started = time.perf_counter()
        engine.generate(asked, command["num_tokens"])
        return {"s": time.perf_counter() - started}
    return engine.call(do, **command)


def main() -> None:
    """Start an engine, then answer commands until there are none."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints is log
    spec = json.loads(sys.argv[1])

    def reply(found: dict[str, Any]) -> None:
        replies.write(json.dumps(found) + "\n")
        replies.flush()

    try:
        engine: Engine = Rehearsal(spec) if os.environ.get("REHEARSE") else Vllm(spec)
        reply(engine.facts())
        for line in sys.stdin:
            reply(answer(engine, json.loads(line)))
    except BaseException as error:
        reply({"error": f"{type(error).__name__}: {error}"[:2000]})
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(0)  # vLLM's own end takes seconds, and may hang


if __name__ == "__main__":
    main()
