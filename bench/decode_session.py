"""Parts of `ftw bench decode`: a decoder with random weights, and sessions that decode with one of its embeddings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

import ftw

from .checkpoints import TABLE, write_hollow_checkpoint
from .decoder import Cache, Decoder, Shape, make_cache
from .sparse_mlp import has_grouped_products
from .timing import rotated

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from ftw.loading import LoadedModel
    from ftw.lookup import HostEmbedding

    from .decode_plan import Placement, Plan

_ROW_SCALE = 0.02  # of the random table's values, to which all layers together then add as much
_STEPS_PER_UPDATE = 64  # of hot rows, while decoding


class Loaded(NamedTuple):
    """A model: what `ftw.load` returned, and the layers that were filled from it."""

    model: LoadedModel
    decoder: Decoder


def write_model(folder: Path, shape: Shape) -> None:
    """Write the headers of a checkpoint of this shape."""
    with torch.device("meta"):
        state = Decoder(shape).state_dict()
    shapes = {TABLE: (shape.vocab, shape.hidden), **{name: tuple(tensor.shape) for name, tensor in state.items()}}
    config = {
        "architectures": ["Qwen3MoeForCausalLM" if shape.experts else "Qwen3ForCausalLM"],
        "model_type": "qwen3_moe" if shape.experts else "qwen3", "tie_word_embeddings": False,
        "hidden_size": shape.hidden, "vocab_size": shape.vocab, "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads, "head_dim": shape.head_dim,
    }  # fmt: skip
    write_hollow_checkpoint(folder, shapes, config)


def load_model(folder: Path, shape: Shape, device: torch.device, placement: Placement) -> Loaded:
    """Load random weights, the same ones for each placement; close the `model`."""
    model = ftw.load(folder, embed=placement.embed, device=device, dummy=True, hot_bytes=placement.hot_bytes)
    if placement.embed == "gpu":
        model.embedding  # noqa: B018 -- puts the table on the GPU, among the weights
    with torch.device("meta"):
        decoder = Decoder(shape, is_grouped=has_grouped_products(device))
    decoder.load_state_dict({name: tensor for name, tensor in model.weights() if name != TABLE}, assign=True)
    for module in decoder.modules():
        if isinstance(module, torch.nn.RMSNorm):
            module.weight.data.fill_(1.0)  # random ones would leave next to nothing of their input
    for name, parameter in decoder.named_parameters():
        if "o_proj" in name or "down_proj" in name:  # or the layers would drown the token, and all tokens be the same
            parameter.data.mul_(_ROW_SCALE / (2 * shape.layers) ** 0.5)
    return Loaded(model, decoder)


class Buffers(NamedTuple):
    """What a step reads and writes, at fixed addresses, for B sequences.

    Attributes:
        tokens: `[B]`, the last ones.
        positions: `[B]`, where they stand.
        history: `[B, steps]`, what was decoded.
        num_decoded: `[1]`, how many steps of it.
        cache: Keys and values.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    history: torch.Tensor
    num_decoded: torch.Tensor
    cache: Cache


def make_buffers(shape: Shape, batch: int, length: int, steps: int, device: torch.device) -> Buffers:
    """Return buffers for prompts of `length` tokens and `steps` more."""
    room = -(-(length + steps) // 64) * 64  # of whole vectors, as attention masks need it
    tokens, positions = (torch.zeros(batch, dtype=torch.int64, device=device) for _ in range(2))
    history = torch.zeros(batch, steps, dtype=torch.int64, device=device)
    num_decoded = torch.zeros(1, dtype=torch.int64, device=device)
    return Buffers(tokens, positions, history, num_decoded, make_cache(shape, batch, room, device, torch.bfloat16))


class Session:
    """Decodes with one embedding: eager, or by replays of one captured step, which feeds itself."""

    def __init__(self, decoder: Decoder, embedding: HostEmbedding, buffers: Buffers) -> None:
        self.decoder = decoder
        self.embedding = embedding
        self.buffers = buffers
        self.graph: torch.cuda.CUDAGraph | None = None

    def capture(self, pool: Any = None) -> None:
        """Capture the step, where there is a GPU; what is in the buffers is lost."""
        if self.buffers.tokens.device.type == "cuda":
            self._reset(0)
            self.graph = capture_graph(self.step, pool)

    def step(self) -> None:
        """Decode one token of each sequence."""
        tokens, positions, history, num_decoded, cache = self.buffers
        tokens.copy_(self.decoder.step(self.embedding, tokens, positions, cache))
        history.index_copy_(1, num_decoded, tokens[:, None])
        positions.add_(1)
        num_decoded.add_(1)

    def replay(self) -> None:
        """Do the same by the graph, where there is one."""
        if self.graph is None:
            self.step()
        else:
            self.graph.replay()

    def prepare(self, tokens: torch.Tensor, position: int) -> None:
        """Set what the next step reads."""
        self._reset(position)
        self.buffers.tokens.copy_(tokens)

    def decode(self, prompts: torch.Tensor, steps: int, *, use_graph: bool) -> torch.Tensor:
        """Return the tokens `[B, 1 + steps]` that follow prompts `[B, S]`; hot rows are chosen anew on the way."""
        first = self.decoder.prefill(self.embedding, prompts, self.buffers.cache)
        self.prepare(first, prompts.shape[1])
        for number in range(steps):
            if self.embedding.hot is not None and number % _STEPS_PER_UPDATE == 0:
                self.embedding.update_hot_rows()
            self.replay() if use_graph else self.step()
        return torch.cat((first[:, None], self.buffers.history[:, :steps]), dim=1)

    def _reset(self, position: int) -> None:
        self.buffers.positions.fill_(position)
        self.buffers.num_decoded.zero_()


class Subject(NamedTuple):
    """One model on the device, and what looks its tokens up, by placement."""

    shape: Shape
    decoder: Decoder
    embeddings: Mapping[str, HostEmbedding]
    device: torch.device

    def sessions(self, batch: int, plan: Plan, first: int = 0) -> dict[str, Session]:
        """Return a session for each placement, ready to replay; they share their buffers and take turns.

        Intermediate values of all lie at the same addresses; the placement of number `first` is captured first.
        """
        buffers = make_buffers(self.shape, batch, plan.prompt, plan.steps, self.device)
        found = {name: Session(self.decoder, embedding, buffers) for name, embedding in self.embeddings.items()}
        pool = torch.cuda.graph_pool_handle() if self.device.type == "cuda" else None
        for session in rotated(list(found.values()), first):
            session.capture(pool)
        return found


def capture_graph(function: Callable[[], object], pool: Any = None) -> torch.cuda.CUDAGraph:
    """Capture a call, which runs once before.

    Graphs of the same `pool` (`torch.cuda.graph_pool_handle()`) have their intermediate values at the same addresses:
    replay one at a time, and keep nothing that the call returns.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        function()  # compiles and loads the kernels, outside of the capture
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        function()
    return graph
