"""A tiny random Qwen3.5-MoE checkpoint in MLX int4, with random heads and LoRA: all paths in milliseconds.

4 layers (3 linear, 1 full attention), hidden 64, 8 experts of which the base takes 4 and the tier 2. Owners
0..2, layers 1 and 2 predicted; like in the 35b tier the last owner's output has no use and the last layer
keeps its gate.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models import qwen3_5_moe
from mlx_lm.utils import load_model, quantize_model, save_config, save_model

from benchmarks.budgets import budget_for
from edge0_runtime.contract.checkpoint import Checkpoint
from edge0_runtime.contract.tier import Sticky, Tier
from edge0_runtime.engine import Engine
from edge0_runtime.experts.pool import SlotPool
from edge0_runtime.experts.reader import Reader
from edge0_runtime.experts.store import ExpertStore
from edge0_runtime.serving import find_adapters
from tests.random_adapters import write_adapters

ROOT = Path(__file__).parents[2]
NANO_ASSETS = ROOT / "edge0_train" / "assets" / "nano-teacher"

ARCHITECTURE = {
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "vocab_size": 384,
    "num_experts": 8,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 64,
    "full_attention_interval": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "linear_num_key_heads": 1,
    "linear_key_head_dim": 32,
    "linear_num_value_heads": 2,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
}
CONTEXT = 256
TIER = Tier.from_dict(
    {
        "name": "tiny",
        "model": "tiny-random",
        "family": "qwen3_5_moe",
        "architecture": ARCHITECTURE,
        "k": 2,
        "router": {"kind": "softmax_topk"},
        "feature_topk": "executed",
        "first_token": "gate",
        "owners": [0, 1, 2],
        "consumers": [1, 2],
        "head_width": 32,
        "lora": {
            "r": 4,
            "alpha": 8,
            "targets": [
                "linear_attn.in_proj_qkv", "linear_attn.in_proj_z", "linear_attn.in_proj_a", "linear_attn.in_proj_b",
                "linear_attn.out_proj", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
                "mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj", "mlp.shared_expert.down_proj",
            ],
        },
    }
)  # fmt: skip


def write_base(directory: Path, *, tied: bool = True) -> None:
    """The int4 base and its tokenizer; `tied`: its output layer is the embedding."""
    text = ARCHITECTURE | {
        "model_type": "qwen3_5_moe_text",
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": tied,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
    }
    config = {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "text_config": text,
        "eos_token_id": 2,
    }
    mx.random.seed(0)
    model = qwen3_5_moe.Model(qwen3_5_moe.ModelArgs.from_dict(config))
    # mlx-lm initialises for training; larger weights make every token's routing and text differ.
    weights = [
        (name, value * (4.0 if "gate.weight" in name else 2.0) if value.ndim > 1 else value)
        for name, value in tree_flatten(model.parameters())
    ]
    model.update(tree_unflatten(weights))
    model.set_dtype(mx.bfloat16)
    model, config = quantize_model(model, config, group_size=64, bits=4)
    save_model(directory, model)
    save_config(config, directory / "config.json")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy(NANO_ASSETS / name, directory / name)


@pytest.fixture(scope="session")
def base_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The base alone, without adapter files."""
    directory = tmp_path_factory.mktemp("base")
    write_base(directory)
    return directory


@pytest.fixture(scope="session")
def make_dir(base_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """make_dir(**changes to the tier) -> a model directory with adapters for that tier, made once."""
    made: dict[str, Path] = {}

    def make(**changes: object) -> Path:
        tier = dataclasses.replace(TIER, **changes)
        name = repr(sorted(changes.items()))
        if name not in made:
            directory = tmp_path_factory.mktemp("tiny") / "model"
            shutil.copytree(base_dir, directory)
            write_adapters(directory, tier)
            made[name] = directory
        return made[name]

    return make


@pytest.fixture(scope="session")
def tiny_dir(make_dir: Callable[..., Path]) -> Path:
    """The tier as it is above."""
    return make_dir()


@pytest.fixture
def two_tiers(make_dir: Callable[..., Path], tmp_path: Path) -> Path:
    """A folder like those of benchmarks/disk_bound.py, K = 2: a tiny checkpoint with a plain and a sticky tier."""
    plain = dataclasses.replace(TIER, name="disk-bound-synthetic")
    router = dataclasses.replace(plain.router, sticky=Sticky(2.0, 2))
    directory = tmp_path / "models" / "disk-bound-k2"
    shutil.copytree(make_dir(name=plain.name), directory)
    write_adapters(directory, dataclasses.replace(plain, name=f"{plain.name}-sticky", router=router))
    return directory.parent


@pytest.fixture(scope="session")
def plain_model() -> Callable[[Path, int], Any]:
    """plain_model(directory, k) -> mlx-lm's own model, all resident, float32, taking k experts."""

    def load(directory: Path, k: int) -> Any:
        model, _ = load_model(directory)
        model.set_dtype(mx.float32)
        for layer in model.layers:
            layer.mlp.top_k = k
        return model

    return load


@pytest.fixture(scope="session")
def budget() -> Callable[..., float]:
    """budget(directory, slots, **flags of Engine.load) -> GiB in which exactly that many experts fit."""
    known: dict[str, float] = {}

    def gib(directory: Path, slots: int, **flags: bool | str) -> float:
        key = repr((directory, slots, sorted(flags.items())))
        if key not in known:
            with Engine.load(directory, **flags) as engine:
                known[key] = budget_for(engine.model, slots) / 2**30
        return known[key]

    return gib


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Headless Chromium's driver; a test that needs it is skipped where there is none."""
    from tests.runtime import browser as chromium

    if not (chromium.CHROMIUM and chromium.DRIVER):
        pytest.skip(chromium.MISSING)
    driver = chromium.start_browser()
    yield driver
    driver.quit()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A `browser.Page`, not opened yet; what it asked for and said is judged at the end."""
    from tests.runtime.browser import Page

    tab = Page(browser)
    yield tab
    tab.check()
    if browser.current_url != "about:blank":
        tab.leave()


@pytest.fixture
def prompts() -> list[list[int]]:
    rng = np.random.default_rng(5)
    return [rng.integers(3, 384, size=n).tolist() for n in (1, 2, 7, 23)]


@pytest.fixture
def store(tiny_dir: Path) -> Iterator[ExpertStore]:
    """The experts of `tiny_dir`, on disk."""
    tier = find_adapters(tiny_dir, prerouter=True, lora=False, tier_name=None).tier
    opened = ExpertStore.open(Checkpoint.open(tiny_dir), tier)
    yield opened
    opened.close()


@pytest.fixture
def reader(store: ExpertStore) -> Iterator[Reader]:
    """Two threads on `store`."""
    opened = Reader(store, threads=2, bound=64)
    yield opened
    opened.close()


@pytest.fixture
def make_pool(store: ExpertStore, reader: Reader) -> Iterator[Callable[..., SlotPool]]:
    """make_pool(slots, spare, float32) -> a pool for all layers of `store`."""
    made = []

    def make(slots: int, spare: int = 0, float32: bool = True) -> SlotPool:
        made.append(SlotPool(store, reader, tuple(store.tensors), slots, spare, float32))
        return made[-1]

    yield make
    for pool in made:
        pool.abandon()
