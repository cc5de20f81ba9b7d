"""A minimal serving engine around `ftw.load`; `dense_decoder.py` beside it is its model.

    python examples/minimal_engine.py --make-tiny /tmp/tiny
    python examples/minimal_engine.py /tmp/tiny --embed host --hot 64KiB
    python examples/minimal_engine.py Qwen/Qwen3-8B --embed host --hot 64MiB --prompt "Why is the sky blue?"

    load       the token embedding into pinned host memory, all other weights onto the device
    size       the KV pool takes what is free on the device then, the table's bytes among it
    capture    one decode step of all lanes as a CUDA graph (on a CPU it runs eagerly)
    serve      a prompt takes a free lane and is prefilled; each step decodes one token in every lane

A sequence owns slots of the pool, for its prompt and its answer. Slot 0 is what idle lanes write to.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from dense_decoder import MODEL_TYPES, Decoder, Sizes, Step, fill_decoder
from safetensors.torch import save_file

import ftw
import ftw.memory

KV_SHARE = 0.9  # of the free memory; the rest is for activations
CPU_KV_BYTES = 64 << 20
STEPS_PER_UPDATE = 64  # of the hot rows


@dataclass
class Sequence:
    """A prompt that is served: its place among the prompts, its lane, its slots of the pool, its tokens so far."""

    number: int
    lane: int
    slots: list[int]
    tokens: list[int] = field(default_factory=list)


class Engine:
    """Serves prompts greedily; close it, or use it in a `with` block."""

    def __init__(
        self,
        source: str | Path,
        *,
        embed: str = "auto",
        device: str | None = None,
        hot_bytes: str | None = None,
        lanes: int = 8,
        max_length: int = 1024,
        kv_bytes: int | None = None,
    ) -> None:
        """Load, size the pool by what is free then (or `kv_bytes`), and capture a decode step."""
        with ftw.open_checkpoint(source) as checkpoint:  # headers alone: what is refused is not loaded first
            self.sizes = Sizes.read(checkpoint)
        self.loaded = ftw.load(source, embed=embed, device=device, hot_bytes=hot_bytes)
        try:
            self._prepare(lanes, max_length, kv_bytes)
        except BaseException:
            self.loaded.close()
            raise

    def _prepare(self, lanes: int, max_length: int, kv_bytes: int | None) -> None:
        """Make all that a step reads and writes."""
        self.embedding, self.device = self.loaded.embedding, self.loaded.device
        self.decoder = fill_decoder(self.loaded, self.sizes)
        dtype = self.decoder.lm_head.weight.dtype

        row = (self.sizes.kv_heads, self.sizes.head_dim)
        token_bytes = 2 * self.sizes.layers * row[0] * row[1] * dtype.itemsize
        free = ftw.memory.snapshot(self.device).device_free  # the table's bytes too, where it is in host memory
        budget = kv_bytes or (int(free * KV_SHARE) if self.device.type == "cuda" else CPU_KV_BYTES)
        self.kv_tokens = budget // token_bytes - 1
        if self.kv_tokens < 2:
            raise ValueError(f"{budget} bytes have no room for 2 tokens of {token_bytes} bytes in the KV pool")
        self.max_length = min(max_length, self.kv_tokens)
        num_slots = min(self.kv_tokens, lanes * self.max_length)  # more than the lanes can use would lie idle
        self.pool = torch.zeros(self.sizes.layers, 2, 1 + num_slots, *row, dtype=dtype, device=self.device)
        self.free_slots = list(range(num_slots, 0, -1))

        exponents = torch.arange(0, self.sizes.head_dim, 2, device=self.device) / self.sizes.head_dim
        angles = torch.arange(self.max_length, device=self.device)[:, None] * self.sizes.rope_base**-exponents
        angles = torch.cat((angles, angles), dim=-1)
        self.rotation = torch.stack((angles.cos(), angles.sin())).to(dtype)
        self.tokens = torch.zeros(lanes, dtype=torch.int64, device=self.device)
        self.positions = torch.zeros_like(self.tokens)
        self.slots = torch.zeros(lanes, self.max_length, dtype=torch.int64, device=self.device)
        self.num_steps = 0
        self.run_step = self._capture() if self.device.type == "cuda" else self._step

    @torch.inference_mode()
    def generate(self, prompts: list[list[int]], max_new_tokens: int) -> list[list[int]]:
        """Return the tokens that follow each prompt: up to a stop token, `max_new_tokens` at most; of 0 none.

        Raises:
            ValueError: A prompt has no token, or one and its answer are longer than `max_length`, or the number is
                below 0. Nothing has been decoded then.
        """
        if max_new_tokens < 0:
            raise ValueError(f"{max_new_tokens} new tokens were asked for, allowed are 0 and more")
        if not all(prompts):
            raise ValueError("a prompt has no tokens, at least 1 is needed")
        longest = max(map(len, prompts), default=0) + max_new_tokens
        if longest > self.max_length:
            raise ValueError(f"a prompt and its answer take {longest} tokens, allowed are {self.max_length}")
        waiting, running = deque(enumerate(prompts)), dict[int, Sequence]()
        answers: list[list[int]] = [[] for _ in prompts]
        if not max_new_tokens:
            return answers
        while waiting or running:
            for lane in range(len(self.tokens)):
                if waiting and lane not in running and len(waiting[0][1]) + max_new_tokens <= len(self.free_slots):
                    running[lane] = self._prefill(*waiting.popleft(), lane, max_new_tokens)
            for sequence in list(running.values()):
                if len(sequence.tokens) == max_new_tokens or sequence.tokens[-1] in self.sizes.stops:
                    answers[sequence.number] = sequence.tokens
                    self._leave(running.pop(sequence.lane))
            if running:
                self.run_step()
                self._learn()
                tokens = self.tokens.tolist()  # waits for the step
                for lane, sequence in running.items():
                    sequence.tokens.append(tokens[lane])
        return answers

    def close(self) -> None:
        """Give the memory back, once no step runs any more."""
        self.loaded.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _prefill(self, number: int, prompt: list[int], lane: int, max_new_tokens: int) -> Sequence:
        """Give a prompt a lane and slots, and compute its first token."""
        slots = [self.free_slots.pop() for _ in range(len(prompt) + max_new_tokens)]
        self.slots[lane, : len(slots)] = torch.tensor(slots, device=self.device)
        ids = torch.tensor([prompt], device=self.device)
        positions = torch.arange(len(prompt), device=self.device)[None]
        step = Step.at(positions, self.slots[lane : lane + 1, : len(prompt)], self.rotation)
        self.tokens[lane] = self.decoder(self.embedding(ids), step, self.pool)[0]
        self.positions[lane] = len(prompt)
        return Sequence(number, lane, slots, [int(self.tokens[lane])])

    def _leave(self, sequence: Sequence) -> None:
        """Let the lane idle: it goes on decoding, into slot 0."""
        self.free_slots += sequence.slots
        self.slots[sequence.lane] = 0
        self.positions[sequence.lane] = 0

    def _step(self) -> None:
        """Decode one token in every lane; the next step reads it. Shapes and addresses are the same each time."""
        step = Step.at(self.positions[:, None], self.slots, self.rotation)
        self.tokens.copy_(self.decoder(self.embedding(self.tokens[:, None]), step, self.pool))
        self.positions.add_(1).clamp_(max=self.max_length - 1)

    @torch.inference_mode()
    def _capture(self) -> Callable[[], None]:
        """Return the replay of a captured step; it is run once before, so that kernels are compiled outside."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step()
        return graph.replay

    def _learn(self) -> None:
        """Keep the rows that are read most in VRAM, where that was asked for; captured steps see the new ones."""
        self.num_steps += 1
        if self.embedding.hot is not None and self.num_steps % STEPS_PER_UPDATE == 0:
            self.embedding.update_hot_rows()


def make_tiny(folder: Path) -> None:
    """Write a tiny Qwen3 with random weights."""
    vocab, hidden, layers, heads, kv_heads, head_dim, inner = 512, 64, 2, 4, 2, 16, 128
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": vocab, "hidden_size": hidden,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "head_dim": head_dim, "intermediate_size": inner, "rms_norm_eps": 1e-6, "rope_theta": 10_000.0,
        "tie_word_embeddings": False,
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    sizes = Sizes(vocab, hidden, inner, layers, heads, kv_heads, head_dim, 1e-6, 10_000.0, frozenset())
    weights = Decoder(sizes, has_norms=True, has_biases=False, has_output_bias=False).state_dict()
    weights["model.embed_tokens.weight"] = torch.randn(vocab, hidden)
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))


def main() -> None:
    """Serve prompts, and print what fits and how fast it went."""
    parser = argparse.ArgumentParser(description="a minimal engine around ftw.load")
    parser.add_argument("source", nargs="?", help=f"folder or hub id of a model: {', '.join(MODEL_TYPES)}")
    parser.add_argument("--make-tiny", type=Path, metavar="DIR", help="write a tiny checkpoint there, and end")
    parser.add_argument("--embed", default="auto", choices=("auto", "host", "gpu"))
    parser.add_argument("--hot", metavar="SIZE", help="of hot rows, such as 64MiB; with --embed auto or host")
    parser.add_argument("--device", help="such as cuda:0 or cpu")
    parser.add_argument("--prompt", action="append", help="text; needs transformers and a tokenizer")
    parser.add_argument("--num-prompts", type=int, default=16, help="of random tokens, without --prompt")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--max-length", type=int, default=1024, help="of a prompt and its answer, in tokens")
    options = parser.parse_args()
    if options.make_tiny:
        make_tiny(options.make_tiny)
        return
    if not options.source:
        parser.error("a source or --make-tiny is needed")
    where = {"embed": options.embed, "device": options.device, "hot_bytes": options.hot}
    with Engine(options.source, **where, max_length=options.max_length) as engine:
        print(f"token embedding on the {engine.loaded.memory.placement}: {engine.loaded.memory.reason}")
        print(f"KV tokens that fit: {engine.kv_tokens}; the pool has {engine.pool.shape[2] - 1} slots")
        tokenizer = None
        if options.prompt:
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(options.source)
            prompts = [tokenizer(text)["input_ids"] for text in options.prompt]
        else:
            generator = torch.Generator().manual_seed(0)
            shape = (options.num_prompts, 32)
            prompts = torch.randint(0, engine.sizes.vocab, shape, generator=generator).tolist()
        start = time.perf_counter()
        answers = engine.generate(prompts, options.max_new_tokens)
        seconds = time.perf_counter() - start
        for answer in answers[:4]:
            print(tokenizer.decode(answer) if tokenizer else answer)
        decoded = sum(map(len, answers))
        print(f"{decoded} tokens in {seconds:.2f} s: {decoded / seconds:.0f} tokens/s")


if __name__ == "__main__":
    try:
        main()
    except (ftw.FtwError, OSError, ValueError) as error:  # a wrong path, a tied model, a prompt that is too long
        raise SystemExit(f"error: {error}") from error
