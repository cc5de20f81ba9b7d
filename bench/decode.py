"""`ftw bench decode`: a model with its token embedding in host memory, beside the same one with it on the GPU.

    gpu                 the table among the weights, read by ftw's own kernel
    host                the table in page-locked memory
    host, hot 64MiB     with the rows used most in VRAM, learnt from prompts before

Weights are random and the same for all three; layers are cut down, as the rows say, which makes a lookup weigh more
than in the whole model. Memory is measured first, of each placement alone (`decode_memory`), then tokens are compared,
then steps and prompts are timed (`decode_timing`). Without a GPU tiny models run through the references, no graphs.
"""

from __future__ import annotations

import contextlib
import logging
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import ftw

from .decode_memory import empty_device, memory_rows
from .decode_plan import MODELS, QUICK, TINY_MODELS, Plan, describe, placements
from .decode_session import Subject, load_model, write_model
from .decode_timing import decode_rows, prefill_rows
from .ids import Ids
from .sparse_mlp import has_grouped_products

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ftw.lookup import HostEmbedding

    from .decoder import Shape

_log = logging.getLogger("ftw.bench")
_LEARNT_PROMPTS, _LEARNT_TOKENS = 8, 8192


def run(
    layers: int | None = None, *, models: tuple[Shape, ...] | None = None, plan: Plan | None = None
) -> dict[str, Any]:
    """Compare tokens, time steps and prompts, and measure memory.

    Args:
        layers: Build that many of each model, at most all; None for as many as `models` say.
        models: Which ones; None for a real MoE's and a real dense model's shapes, without a GPU for tiny ones.
        plan: How much to measure; None for all of it, without a GPU for little.
    """
    is_gpu = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if is_gpu else torch.device("cpu")
    models = models or (MODELS if is_gpu else TINY_MODELS)
    plan = plan or (Plan() if is_gpu else QUICK)
    result: dict[str, Any] = {
        "vram": plan.vram,
        "hot_rows": f"learnt while tokens are compared, then from {_LEARNT_PROMPTS} prompts of {_LEARNT_TOKENS} "
        "Zipf ids; while steps and prompts are timed they stay",
        "experts": "grouped products" if has_grouped_products(device) else "gathered or padded",
        **{name: [] for name in ("decode", "prefill", "memory", "tokens")},
    }
    for model in models:
        shape = model if layers is None else model._replace(layers=min(layers, model.full_layers))
        with tempfile.TemporaryDirectory(prefix="ftw-bench-", dir=Path.cwd()) as name, torch.inference_mode():
            _log.info("%s: the checkpoint is written", shape.name)
            write_model(Path(name), shape)
            _log.info("%s: memory", shape.name)
            result["memory"] += memory_rows(Path(name), shape, plan, device)
            with _load(Path(name), shape, plan, device) as subject:
                _log.info("%s: tokens are compared", shape.name)
                result["tokens"] += _token_rows(subject, plan)
                source = Ids(shape.vocab, device, seed=plan.seeds)
                _learn(subject, source)
                _log.info("%s: steps are timed", shape.name)
                result["decode"] += decode_rows(subject, plan, source)
                _log.info("%s: prompts are timed", shape.name)
                result["prefill"] += prefill_rows(subject, plan, source)
            del subject
            empty_device(device)
    return result


@contextlib.contextmanager
def _load(folder: Path, shape: Shape, plan: Plan, device: torch.device) -> Iterator[Subject]:
    """Load the weights once, and the table in each placement."""
    with contextlib.ExitStack() as stack:
        first, *others = placements(plan)
        loaded = load_model(folder, shape, device, first)
        stack.callback(loaded.model.close)
        embeddings: dict[str, HostEmbedding] = {first.name: loaded.model.embedding}
        for other in others:
            model = ftw.load(folder, embed=other.embed, device=device, dummy=True, hot_bytes=other.hot_bytes)
            stack.callback(model.close)
            embeddings[other.name] = model.embedding
        yield Subject(shape, loaded.decoder, embeddings, device)


def _token_rows(subject: Subject, plan: Plan) -> Iterator[dict[str, Any]]:
    """Decode the same prompts with each placement, and compare all tokens."""
    for batch in plan.batches:
        sessions = subject.sessions(batch, plan)
        is_both = subject.device.type == "cuda" and batch in plan.eager_batches
        for mode in ("graph", "eager") if is_both else ("graph",) if subject.device.type == "cuda" else ("eager",):
            different: dict[str, int] = {}
            distinct = []
            seeds = min(plan.seeds, plan.eager_seeds) if is_both and mode == "eager" else plan.seeds
            for seed in range(seeds):
                prompts = Ids(subject.shape.vocab, subject.device, seed).draw("zipf", batch * plan.prompt)
                found = {
                    name: session.decode(prompts.view(batch, -1), plan.steps, use_graph=mode == "graph")
                    for name, session in sessions.items()
                }
                expected = next(iter(found.values()))
                distinct.append(int(expected.unique().numel()))
                for name, tokens in found.items():
                    different[name] = different.get(name, 0) + int((tokens != expected).sum())
            yield {
                **describe(subject.shape),
                "batch": batch,
                "mode": mode,
                "seeds": seeds,
                "steps": plan.steps,
                "tokens_equal": not any(different.values()),
                "different": ", ".join(f"{name}: {count}" for name, count in different.items() if count),
                "distinct_tokens": min(distinct),
            }


def _learn(subject: Subject, source: Ids) -> None:
    """Let hot rows learn from prompts, which are none of those that are timed."""
    prompts = [source.draw("zipf", _LEARNT_TOKENS) for _ in range(_LEARNT_PROMPTS)]
    for embedding in subject.embeddings.values():
        if embedding.hot is not None:
            for ids in prompts:
                embedding(ids)
            embedding.update_hot_rows()
