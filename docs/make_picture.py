"""Makes inspect.svg, the picture of the README: what `ftw inspect` prints and plots for a model's real shapes.

    python docs/make_picture.py            # needs rich and matplotlib, and takes two seconds

The checkpoint is Qwen3-30B-A3B's, with the names and shapes of all its tensors and a hole for their bytes, so that it
takes a few MB of the disk. What is printed and plotted is the command's own output.
"""

from __future__ import annotations

import io
import itertools
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from ftw.bench.checkpoints import write_hollow_checkpoint
from rich.console import Console
from rich.text import Text

PICTURE = Path(__file__).with_name("inspect.svg")
NAME, VRAM = "Qwen3-30B-A3B", "8GiB"
CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "tie_word_embeddings": False,
    "vocab_size": 151_936, "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
    "moe_intermediate_size": 768, "intermediate_size": 6144, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
MARGIN = 20


def make_shapes() -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of all tensors."""
    hidden, inner, head_dim = 2048, 768, 128
    layer = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (32 * head_dim, hidden),
        "self_attn.k_proj": (4 * head_dim, hidden),
        "self_attn.v_proj": (4 * head_dim, hidden),
        "self_attn.o_proj": (hidden, 32 * head_dim),
        "self_attn.q_norm": (head_dim,),
        "self_attn.k_norm": (head_dim,),
        "mlp.gate": (128, hidden),
    }
    for expert in range(128):
        layer |= {
            f"mlp.experts.{expert}.gate_proj": (inner, hidden),
            f"mlp.experts.{expert}.up_proj": (inner, hidden),
            f"mlp.experts.{expert}.down_proj": (hidden, inner),
        }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (151_936, hidden)}
    for number, (name, shape) in itertools.product(range(48), layer.items()):
        shapes[f"model.layers.{number}.{name}.weight"] = shape
    return shapes | {"model.norm.weight": (hidden,), "lm_head.weight": (151_936, hidden)}


def run_inspect(folder: Path) -> tuple[str, str]:
    """Return what the command prints, and the picture that it plots."""
    write_hollow_checkpoint(folder / NAME, make_shapes(), CONFIG)
    command = ["inspect", NAME, "--vram", VRAM, "--plot", "budget.svg"]
    done = subprocess.run(  # noqa: S603 -- our own command
        [sys.executable, "-c", "from ftw.cli.main import run; run()", *command],
        cwd=folder, env={**os.environ, "SOURCE_DATE_EPOCH": "0"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode or done.stderr:
        raise SystemExit(done.stderr or f"ftw inspect: exit status {done.returncode}")
    shown = f"$ ftw {' '.join(command[:4])}\n{done.stdout}"
    return "\n".join(line.rstrip() for line in shown.splitlines()), (folder / "budget.svg").read_text(encoding="utf-8")


def draw_terminal(text: str) -> str:
    """Return the text as an SVG in the style of a terminal; no font is fetched from elsewhere."""
    console = Console(record=True, width=max(map(len, text.splitlines())) + 1, file=io.StringIO())
    console.print(Text(text), soft_wrap=True)
    svg = console.export_svg(title="ftw inspect", unique_id="terminal")
    return re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL)


def steady(svg: str) -> str:
    """Return an SVG of matplotlib's without its prolog, and with the same names each time."""
    svg = svg[svg.index("<svg") :]
    for number, name in enumerate(dict.fromkeys(re.findall(r'id="([a-z][0-9a-f]{10})"', svg))):
        svg = svg.replace(name, f"plot{number}")
    return svg


def stack(*pictures: str) -> str:
    """Return one SVG with pictures below each other, none wider than the first."""
    sizes = [[float(size) for size in re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg).groups()] for svg in pictures]
    width, top, parts = sizes[0][0], 0.0, []
    for svg, (own_width, own_height) in zip(pictures, sizes, strict=True):
        scale = min(width / own_width, 1.6)
        tag = re.match(r"<svg[^>]*>", svg)[0]
        place = f'x="{(width - own_width * scale) / 2:.1f}" y="{top:.1f}" width="{own_width * scale:.1f}"'
        placed = f'<svg {place} height="{own_height * scale:.1f}" viewBox="0 0 {own_width} {own_height}"'
        parts.append(svg.replace(tag, f'{placed} xmlns:xlink="http://www.w3.org/1999/xlink">', 1))
        top += own_height * scale + MARGIN
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.1f} {top - MARGIN:.1f}">'
    paper = '<rect width="100%" height="100%" fill="#ffffff"/>'
    return "\n".join([head, paper, *parts, "</svg>\n"])


def main() -> None:
    """Write the picture."""
    with tempfile.TemporaryDirectory() as name:
        text, plot = run_inspect(Path(name))
    PICTURE.write_text(stack(draw_terminal(text), steady(plot)), encoding="utf-8")


if __name__ == "__main__":
    main()
