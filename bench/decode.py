"""`ftw bench decode`: a model with its token embedding in host memory, beside the same one with it on the GPU.

    gpu                 the table among the weights, read by ftw's own kernel
    host                the table in page-locked memory
    host, hot 64MiB     with the rows used most in VRAM, learnt from prompts before

Weights are random and the same for all three; layers are cut down, as the rows say, which makes a lookup weigh more
than in the whole model. A step is a captured CUDA graph that feeds itself. Limit: the "gpu" rows; steps and prompts of
the three take turns, and a ratio is the median of those within a round. Tokens are compared first. On a machine
without a GPU tiny models run through the references, without graphs.
"""

from __future__ import annotations

import contextlib
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

import ftw

from .decode_memory import empty_device, memory_rows
from .decode_plan import MODELS, QUICK, TINY_MODELS, Plan, describe, placements
from .decode_session import Session, load_model, make_buffers, write_model
from .decoder import Decoder, Shape, make_cache
from .ids import Ids
from .sparse_mlp import has_grouped_products
from .timing import quantiles, time_interleaved_ms

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ftw.embedding import HostEmbedding
    from ftw.sharded_embedding import ShardedEmbedding

_LEARNT_PROMPTS, _LEARNT_TOKENS = 8, 8192


class Subject(NamedTuple):
    """One model on the device, and what looks its tokens up, by placement."""

    shape: Shape
    decoder: Decoder
    embeddings: dict[str, HostEmbedding | ShardedEmbedding]
    device: torch.device

    def sessions(self, batch: int, plan: Plan) -> dict[str, Session]:
        """Return a session for each placement, ready to replay; they share their buffers and take turns."""
        buffers = make_buffers(self.shape, batch, plan.prompt, plan.steps, self.device)
        found = {name: Session(self.decoder, embedding, buffers) for name, embedding in self.embeddings.items()}
        for session in found.values():
            session.capture()
        return found


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
        "hot_rows": f"learnt from {_LEARNT_PROMPTS} prompts of {_LEARNT_TOKENS} Zipf ids",
        "experts": "grouped products" if has_grouped_products(device) else "gathered or padded",
        **{name: [] for name in ("decode", "prefill", "memory", "tokens")},
    }
    for model in models:
        shape = model if layers is None else model._replace(layers=min(layers, model.full_layers))
        with tempfile.TemporaryDirectory(prefix="ftw-bench-", dir=Path.cwd()) as name, torch.inference_mode():
            write_model(Path(name), shape)
            result["memory"] += memory_rows(Path(name), shape, plan, device)
            with _load(Path(name), shape, plan, device) as subject:
                result["tokens"] += _token_rows(subject, plan)
                source = Ids(shape.vocab, device, seed=plan.seeds)
                _learn(subject, source)
                result["decode"] += _decode_rows(subject, plan, source)
                result["prefill"] += _prefill_rows(subject, plan, source)
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
        embeddings: dict[str, HostEmbedding | ShardedEmbedding] = {first.name: loaded.model.embedding}
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
            for seed in range(plan.seeds):
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
                "seeds": plan.seeds,
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


def _decode_rows(subject: Subject, plan: Plan, source: Ids) -> Iterator[dict[str, Any]]:
    """Time replays of the captured step, on tokens as text has them, all along the decoded positions."""
    for batch in plan.batches:
        sessions = subject.sessions(batch, plan)
        first = next(iter(sessions.values()))
        tokens = source.draw("zipf", batch * plan.rounds).view(plan.rounds, batch)

        def prepare(number: int, first: Session = first, tokens: torch.Tensor = tokens) -> None:
            first.prepare(tokens[number], plan.prompt + number % plan.steps)

        ways = {name: session.replay for name, session in sessions.items()}
        times = time_interleaved_ms(ways, rounds=plan.rounds, before=prepare)
        yield from _timed({**describe(subject.shape), "batch": batch}, "step", times)


def _prefill_rows(subject: Subject, plan: Plan, source: Ids) -> Iterator[dict[str, Any]]:
    """Time one prompt, eager as engines run it, of ids as text has them, other ones in each round."""
    for length in plan.prefills:
        cache = make_cache(subject.shape, 1, length, subject.device, torch.bfloat16)
        prompts = source.draw("zipf", length * plan.prefill_rounds).view(plan.prefill_rounds, 1, length)
        ids = prompts[0].clone()

        def prepare(number: int, ids: torch.Tensor = ids, prompts: torch.Tensor = prompts) -> None:
            ids.copy_(prompts[number])

        prefill = subject.decoder.prefill
        ways = {name: partial(prefill, embedding, ids, cache) for name, embedding in subject.embeddings.items()}
        times = time_interleaved_ms(ways, rounds=plan.prefill_rounds, before=prepare)
        yield from _timed({**describe(subject.shape), "tokens": length}, "prefill", times)


def _timed(head: dict[str, Any], what: str, times: dict[str, list[float]]) -> Iterator[dict[str, Any]]:
    """Return a row for each placement; a ratio is the median of those to the first placement in the same round."""
    expected = next(iter(times.values()))
    for placement, samples in times.items():
        spread = quantiles(samples)
        ratio = quantiles([own / other for own, other in zip(samples, expected, strict=True)])
        yield {
            **head,
            "placement": placement,
            f"{what}_ms": round(spread.median, 4),
            f"{what}_p20_ms": round(spread.p20, 4),
            f"{what}_p80_ms": round(spread.p80, 4),
            "ratio": round(ratio.median, 5),
        }
