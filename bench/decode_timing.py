"""Parts of `ftw bench decode`: how long a step and a prompt take with each placement of the table.

Limit: the "gpu" rows. "gpu, again" is the same once more, captured by itself: a ratio that is no farther from 1 than
its own is noise. All take turns, and a ratio is the median of those within a round; the file has the quantiles of
ratios, and their medians in each capture.

A step is a captured CUDA graph that feeds itself. A prompt is a graph, too, or its time would be that of launching
kernels; it is eager where experts need the host to wait. What a graph costs depends on the addresses that it was
captured with, so all placements have the same ones, several times.
"""

from __future__ import annotations

from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from .decode_plan import AGAIN, Plan, describe
from .decode_session import Session, Subject, capture_graph
from .decoder import make_cache
from .timing import quantiles, rotated, time_interleaved_ms

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from .ids import Ids


def decode_rows(subject: Subject, plan: Plan, source: Ids) -> Iterator[dict[str, Any]]:
    """Time replays of the captured step, on tokens as text has them, all along the decoded positions."""
    subject = _with_noise(subject)
    for batch in plan.batches:
        captures = [subject.sessions(batch, plan, first=number) for number in range(plan.captures)]  # all kept at once
        blocks = []
        for sessions in captures:
            session = next(iter(sessions.values()))
            tokens = source.draw("zipf", batch * plan.rounds).view(plan.rounds, batch)

            def prepare(number: int, session: Session = session, tokens: torch.Tensor = tokens) -> None:
                place = number * plan.steps // plan.rounds
                session.prepare(tokens[number], plan.prompt + place)

            ways = {name: session.replay for name, session in sessions.items()}
            blocks.append(time_interleaved_ms(ways, rounds=plan.rounds, before=prepare))
        yield from _timed({**describe(subject.shape), "batch": batch}, "step", blocks)


def prefill_rows(subject: Subject, plan: Plan, source: Ids) -> Iterator[dict[str, Any]]:
    """Time one prompt of ids as text has them, other ones in each round."""
    subject = _with_noise(subject)
    is_captured = subject.device.type == "cuda" and subject.decoder.has_fixed_shapes
    mode = "graph" if is_captured else "eager"
    for length, rounds in plan.prefills:
        cache = make_cache(subject.shape, 1, length, subject.device, torch.bfloat16)
        ids = torch.zeros(1, length, dtype=torch.int64, device=subject.device)
        calls = {
            name: partial(subject.decoder.prefill, embedding, ids, cache)
            for name, embedding in subject.embeddings.items()
        }
        captures = [_capture(calls, first=number) for number in range(plan.captures)] if is_captured else [calls]
        blocks = []
        for ways in captures:
            prompts = source.draw("zipf", length * rounds).view(rounds, 1, length)

            def prepare(number: int, ids: torch.Tensor = ids, prompts: torch.Tensor = prompts) -> None:
                ids.copy_(prompts[number])

            blocks.append(time_interleaved_ms(ways, rounds=rounds, before=prepare))
        yield from _timed({**describe(subject.shape), "tokens": length, "mode": mode}, "prefill", blocks)


def _capture(calls: Mapping[str, Callable[[], object]], *, first: int) -> dict[str, Callable[[], object]]:
    """Return replays of calls, whose intermediate values share their addresses; number `first` is captured first."""
    pool = torch.cuda.graph_pool_handle()
    replays = {name: capture_graph(calls[name], pool).replay for name in rotated(list(calls), first)}
    return {name: replays[name] for name in calls}


def _with_noise(subject: Subject) -> Subject:
    """Return the subject with its first placement twice."""
    first = next(iter(subject.embeddings.values()))
    return subject._replace(embeddings={**subject.embeddings, AGAIN: first})


def _timed(head: dict[str, Any], what: str, blocks: list[dict[str, list[float]]]) -> Iterator[dict[str, Any]]:
    """Return a row for each placement; a ratio is one to the first placement, of the same round and block."""
    first = next(iter(blocks[0]))
    for placement in blocks[0]:
        spread = quantiles([sample for block in blocks for sample in block[placement]])
        ratios = [[own / other for own, other in zip(block[placement], block[first], strict=True)] for block in blocks]
        ratio = quantiles(list(chain.from_iterable(ratios)))
        yield {
            **head,
            "placement": placement,
            f"{what}_ms": round(spread.median, 4),
            f"{what}_p20_ms": round(spread.p20, 4),
            f"{what}_p80_ms": round(spread.p80, 4),
            "ratio": round(ratio.median, 5),
            "ratio_p20": round(ratio.p20, 5),
            "ratio_p80": round(ratio.p80, 5),
            "capture_ratios": [round(quantiles(block).median, 5) for block in ratios],
        }
