"""Parts of `ftw bench decode`: which models, where their tables lie, and how much is measured."""

from __future__ import annotations

from typing import Any, NamedTuple

from .decoder import Shape

MODELS = (
    Shape("Qwen3-30B-A3B", 12, 48, 2048, 768, 32, 4, 128, 151_936, experts=128, experts_per_token=8),
    Shape("Qwen3-8B", 18, 36, 4096, 12_288, 32, 8, 128, 151_936),
)
TINY_MODELS = (
    Shape("tiny MoE", 2, 2, 64, 32, 4, 2, 16, 1000, experts=8, experts_per_token=2),
    Shape("tiny dense", 2, 2, 64, 128, 4, 2, 16, 1000),
)


class Plan(NamedTuple):
    """How much is measured.

    Attributes:
        steps: Decoded after each prompt whose tokens are compared.
        seeds: Of such prompts.
        prompt: Their length.
        batches: Sequences decoded at a time.
        eager_batches: Those that are decoded without a graph, too.
        eager_seeds: Of prompts that are.
        captures: Of a step and a prompt with each placement: what one costs depends on where its memory lies.
        rounds: Of timed steps, for each capture.
        prefills: Lengths of timed prompts, and rounds of them, for each capture.
        hot_bytes: Of hot rows.
        vram: A GPU's memory, of which KV tokens take what the weights leave.
    """

    steps: int = 256
    seeds: int = 5
    prompt: int = 64
    batches: tuple[int, ...] = (1, 16)
    eager_batches: tuple[int, ...] = (16,)
    eager_seeds: int = 2
    captures: int = 4
    rounds: int = 60
    prefills: tuple[tuple[int, int], ...] = ((512, 40), (8192, 30))
    hot_bytes: str = "64MiB"
    vram: str = "24GiB"


QUICK = Plan(12, 2, 8, (1, 4), (4,), captures=2, rounds=8, prefills=((16, 8), (64, 8)), hot_bytes="16KiB", vram="64MiB")
AGAIN = "gpu, again"  # measured beside "gpu", which it is: what differs between those two is noise


class Placement(NamedTuple):
    """Where a token embedding lies: arguments of `ftw.load`."""

    name: str
    embed: str
    hot_bytes: str | None = None


def placements(plan: Plan) -> tuple[Placement, ...]:
    """Return what is compared; the first is what the others are held against."""
    hot = Placement(f"host, hot {plan.hot_bytes}", "host", plan.hot_bytes)
    return (Placement("gpu", "gpu"), Placement("host", "host"), hot)


def describe(shape: Shape) -> dict[str, Any]:
    """Return how every row of a model begins."""
    return {"model": shape.name, "layers": f"{shape.layers} of {shape.full_layers}"}
