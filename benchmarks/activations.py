"""The allocator's peak in parts of a layer, beside what `edge0_runtime.activations` says: its numbers of copies come from here.

python scripts/make_synthetic_checkpoint.py 35b models/layers --layers 9 --experts 32 --vocab 4096 --overlap 0.3
python benchmarks/activations.py models/layers --chunks 32,128 --contexts 0,1024,4096
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.base import create_attention_mask

from edge0_runtime.activations import pass_bytes
from edge0_runtime.engine import Engine
from edge0_runtime.libraries import make_prompt_cache
from edge0_runtime.step import Step


def peak(compute: Callable[[], Any]) -> float:
    """MiB over what is held before."""
    gc.collect()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(compute())
    return (mx.get_peak_memory() - before) / 2**20


def filled(cache: Any, context: int) -> Any:
    """An attention's cache, with zeros for that many tokens."""
    keys, values = (mx.zeros((*array.shape[:2], context + 256, array.shape[3])) for array in (cache.keys, cache.values))
    mx.eval(keys, values)
    cache.keys, cache.values, cache.offset = keys, values, context
    return cache


def main() -> None:
    """One line a chunk and context."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("--chunks", default="32,128")
    parser.add_argument("--contexts", default="0,1024")
    args = parser.parse_args()
    chunks, contexts = ([int(part) for part in text.split(",")] for text in (args.chunks, args.contexts))
    with Engine.load(args.model_dir, arm="resident") as engine:
        model = engine.model
        model.running.step = Step(route=model.arm.route)
        layers = list(enumerate(model.network.layers))
        linear = next((found for found in layers[1:] if getattr(found[1], "is_linear", False)), None)
        number, full = next(found for found in layers if not getattr(found[1], "is_linear", False))
        attention = getattr(full, "self_attn", None) or full.attention
        for tokens in chunks:
            x = mx.random.normal((1, tokens, model.tier.hidden_size))
            mx.eval(x)
            parts = {"experts": peak(lambda x=x: full.mlp(x))}
            if linear is not None:
                cache = make_prompt_cache(model.network)[linear[0]]
                mixer = getattr(linear[1], "linear_attn", None) or linear[1].attention
                parts["recurrence"] = peak(lambda x=x, mixer=mixer, cache=cache: (mixer(x, None, cache), cache.state))
            for context in contexts:
                cache = make_prompt_cache(model.network)[number]
                mx.eval(attention(x[:, :1], None, cache), cache.state)
                cache = filled(cache, context)
                mask = create_attention_mask(x, cache, return_array=model.tier.layout.name == "bailing_moe_v3")
                parts["attention"] = peak(lambda x=x, mask=mask, cache=cache: (attention(x, mask, cache), cache.state))
                said = pass_bytes(model.tier, tokens, context + tokens, 0) / 2**20
                measured = ", ".join(f"{name} {value:.1f}" for name, value in parts.items())
                print(f"{tokens} tokens after {context}: {measured}; said {said:.1f} MiB", flush=True)


if __name__ == "__main__":
    main()
