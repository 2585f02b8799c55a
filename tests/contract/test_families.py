"""The families: data of one file each, complete, and nothing of them elsewhere."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from edge0_runtime.contract import families as registry
from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.families import Family, families, family
from edge0_runtime.contract.tier import builtin_tier, builtin_tier_names

ROOT = Path(__file__).parents[2]
FOLDER = Path(registry.__file__).parent
EVERY = pytest.mark.parametrize("layout", families(), ids=lambda layout: layout.name)
PLAIN = {
    "model",
    "layers",
    "norm",
    "mlp",
    "experts",
    "gate",
    "weight",
    "bias",
    "{n}",
    "{e}",
    "lm_head",
    "dense",
    "expert_bias",
}
"""Parts of names that are words of ours too, or the same in every causal language model."""
PATHS = ("model.layers", "mlp.gate", "mlp.experts")


def test_the_folder_is_the_registry():
    modules = {path.stem for path in FOLDER.glob("*.py") if not path.name.startswith("_")}
    assert {layout.name for layout in families()} == modules
    assert all(family(name).name == name for name in modules)
    with pytest.raises(
        Edge0Error, match=r"family: '_blocks' is not supported; choose one of bailing_moe_v3, .*qwen3_next"
    ):
        family("_blocks")


def test_a_file_put_into_the_folder_is_a_family(tmp_path):
    """A copy of the contract, with one file more."""
    package = tmp_path / "edge0_runtime"
    package.mkdir()
    (package / "__init__.py").touch()
    subprocess.run(["cp", "-r", str(ROOT / "edge0_runtime/contract"), str(package)], check=True)
    text = (FOLDER / "qwen3_moe.py").read_text().replace('"qwen3_moe"', '"mine"')
    (package / "contract/families/mine.py").write_text(text)
    code = (
        "from edge0_runtime.contract.families import family; print(family('mine').moe_layers({'num_hidden_layers': 2}))"
    )
    run = [sys.executable, "-c", code]
    done = subprocess.run(run, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True)
    assert done.stdout == "(0, 1)\n"


@EVERY
def test_the_table_has_the_paths_that_the_family_names(layout: Family):
    """Layers, router and expert bias, in both spellings: one row each, of that very module."""
    rows = {link.hf: link for link in layout.table}
    router = rows[f"{layout.hf_layer_prefix}.{layout.hf_router}.weight"]
    assert router.mlx == (f"{layout.layer_prefix}.{layout.router}.weight",)
    bias = rows.get(f"{layout.hf_layer_prefix}.{layout.hf_router}.{layout.hf_expert_bias}")
    assert (bias is None) == (layout.expert_bias is None) == (layout.router_kind == "softmax_topk")
    assert bias is None or bias.mlx == (f"{layout.layer_prefix}.{layout.router}.{layout.expert_bias}",)
    stacked = {name for link in layout.table if link.per_expert for name in link.mlx}
    for path in (layout.experts, *layout.other_experts):
        assert f"{layout.layer_prefix}.{path}.up_proj.weight" in stacked
    assert any(link.mlx == (f"{layout.embedding}.weight",) for link in layout.table)
    recurrent = [
        link for link in layout.table if link.hf.startswith(f"{layout.hf_layer_prefix}.{layout.hf_recurrent}.")
    ]
    assert not layout.hf_recurrent or recurrent


@pytest.mark.parametrize("name", builtin_tier_names())
def test_a_tier_has_its_family_s_kind_of_router_and_may_have_its_default_targets(name: str):
    tier = builtin_tier(name)
    layout = tier.layout
    assert tier.router.kind == layout.router_kind
    assert set(tier.lora.targets) == set(layout.default_targets(tier.architecture))
    assert set(layout.default_targets(tier.architecture)).isdisjoint(layout.spared)


def test_recurrent_mixers_are_those_of_layers_without_full_attention():
    qwen, ling, plain = builtin_tier("nano"), builtin_tier("nano-ling"), family("olmoe")
    layers = (0, 1, 2, 4, 5, 6)
    assert qwen.layout.hf_recurrent_paths(qwen.architecture) == tuple(f"model.layers.{n}.linear_attn" for n in layers)
    assert ling.layout.hf_recurrent_paths(ling.architecture) == tuple(f"model.layers.{n}.self_attn" for n in layers)
    assert plain.hf_recurrent_paths({"num_hidden_layers": 4}) == ()


# -- nothing of a family elsewhere -------------------------------------------------------------------------------------


def names_of_modules() -> set[str]:
    """Every part of every name in the families' tables, but the plain ones."""
    names = {name for layout in families() for link in layout.table for name in (link.hf, *link.mlx, *link.disk)}
    return {part for name in names for part in name.split(".")} - PLAIN


def said_in(source: str) -> Iterator[str]:
    """Attributes, names and strings of a module's code; comments and docstrings may speak of families."""
    tree = ast.parse(source)
    spoken = {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in spoken:
            yield node.value


def family_words(source: str) -> set[str]:
    words = names_of_modules()
    return {
        said
        for said in said_in(source)
        if words & set(said.split(".")) or any(f".{path}" in f".{said}" for path in PATHS)
    }


def test_no_module_name_of_a_family_is_outside_the_families():
    shared = {FOLDER.parent / "family.py", FOLDER.parent / "links.py"}  # what they are made of
    files = [*(ROOT / "edge0_train/student").rglob("*.py"), *(ROOT / "edge0_runtime").rglob("*.py")]
    found = {
        str(path.relative_to(ROOT)): words
        for path in files
        if FOLDER not in path.parents and path not in shared and (words := family_words(path.read_text()))
    }
    assert found == {}


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("layer.linear_attn", {"linear_attn"}),
        ("name.endswith('.kv_b_proj.scales')", {".kv_b_proj.scales"}),
        ("getattr(gate, 'e_score_correction_bias')", {"e_score_correction_bias"}),
        ("model.get_submodule('model.layers.3')", {"model.layers.3"}),
        ("def f():\n    '''of mlp.gate'''\n    return block.gate  # self_attn", set()),
    ],
)
def test_the_search_finds_what_it_is_for(code: str, found: set[str]):
    assert family_words(code) == found
