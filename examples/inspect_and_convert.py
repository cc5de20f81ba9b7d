"""From a safetensors checkpoint to rows on the GPU: inspect, convert, verify, load, look up.

python examples/inspect_and_convert.py               # on a tiny checkpoint that it makes
python examples/inspect_and_convert.py SOURCE DIR    # on one of yours, converted into DIR
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

import ftw


def make_checkpoint(folder: Path) -> Path:
    """Write a tiny untied Llama, as transformers would, and return the folder."""
    folder.mkdir(parents=True)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 1000, "hidden_size": 64,
        "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False,
    }  # fmt: skip
    shapes = {
        "model.embed_tokens.weight": (1000, 64),
        "model.layers.0.self_attn.q_proj.weight": (64, 64),
        "lm_head.weight": (1000, 64),
    }
    save_file({name: torch.randn(shape).bfloat16() for name, shape in shapes.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def run(source: Path | str, target: Path) -> torch.Tensor:
    """Take a checkpoint the whole way, and return the rows of three ids."""
    report = ftw.inspect(source).to_dict()
    table = report["tables"][0]
    print(f"{table['name']}: {table['rows']} x {table['columns']} {table['dtype']}, {table['nbytes']} bytes")
    print(f"may leave the GPU: {table['eligible']}, {table['detail']}")

    result = ftw.convert(source, target, embed="auto")
    print(f"converted into {target}: {result.to_dict()['num_tensors']} tensors")
    check = ftw.verify(target, against=source)
    print(f"verified: {len(check.problems)} problems")
    if check.problems:
        raise SystemExit("\n".join(map(str, check.problems)))

    with ftw.load(target, embed="auto") as model:
        ids = torch.tensor([0, 1, table["rows"]], device=model.device)  # the last one is outside of the table
        rows: torch.Tensor = model.embedding(ids)
        weights = dict(model.weights())
        print(f"token embedding on the {model.memory.placement}, {len(weights)} other tensors on {model.device}")
        print(f"rows {tuple(rows.shape)} {rows.dtype}, of the id outside only zeros: {not rows[2].any()}")
        return rows.clone()


def main() -> None:
    """Run on what the command line names, or on a tiny checkpoint."""
    parser = argparse.ArgumentParser(description="inspect, convert, verify, load, look up")
    parser.add_argument(
        "source", nargs="?", help="folder, file or hub id of a checkpoint; without it a tiny one is made"
    )
    parser.add_argument("target", nargs="?", type=Path, metavar="DIR", help="new folder for what is converted")
    options = parser.parse_args()
    if options.source:
        if options.target is None:
            parser.error("SOURCE needs DIR, a new folder for what is converted")
        run(options.source, options.target)
        return
    with tempfile.TemporaryDirectory() as name:
        run(make_checkpoint(Path(name) / "llama"), Path(name) / "converted")


if __name__ == "__main__":
    try:
        main()
    except (ftw.FtwError, OSError) as error:  # a path that is not there, a folder that is: one line says all
        raise SystemExit(f"error: {error}") from error
