"""Where training is installed too, serving does without its libraries, and whoever wants them afterwards has them whole."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import edge0_runtime
from edge0_runtime.libraries import postponed

GENERATE = """
import sys
from edge0_runtime.cli import main
from edge0_runtime.engine import Engine
code = main(["generate", sys.argv[1], "--prompt", "1+1", "--max-tokens", "2"])
print(code, sorted({name.partition(".")[0] for name in sys.modules} & {"torch", "wandb", "datasets", "pandas"}))
"""
AFTERWARDS = """
import edge0_runtime.engine
import torch.nn
from transformers import AutoConfig, AutoModelForCausalLM
config = AutoConfig.for_model("olmoe", hidden_size=32, num_hidden_layers=1, vocab_size=64, intermediate_size=32,
                              num_attention_heads=2, num_experts=8, pad_token_id=0, eos_token_id=1, bos_token_id=0)
model = AutoModelForCausalLM.from_config(config)
print(model(torch.zeros(1, 3, dtype=torch.long)).logits.shape, torch.nn.Linear is type(model.lm_head), torch.__file__ is not None)
"""


def python(script: str, *arguments: object) -> str:
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1]


def test_generate_imports_no_library_of_training(tiny_dir):
    assert python(GENERATE, tiny_dir) == "0 []"


def test_torch_is_whole_after_the_runtime_was_imported():
    assert python(AFTERWARDS) == "torch.Size([1, 3, 64]) True True"


def test_a_postponed_module_is_imported_when_it_is_used(tmp_path, monkeypatch):
    (tmp_path / "slow_library.py").write_text("imported = True\nvalue = 7\n")
    monkeypatch.syspath_prepend(tmp_path)
    with postponed("slow_library", "a_library_that_is_not_installed"):
        import slow_library

        assert "imported" not in vars(slow_library)
    assert "slow_library" not in sys.modules
    assert slow_library.value == 7 and sys.modules["slow_library"].value == 7
    assert "a_library_that_is_not_installed" not in sys.modules


def test_one_module_alone_imports_mlx_lm_and_transformers():
    """Another could do so first, with torch."""
    package = Path(edge0_runtime.__file__).parent
    found = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])
        if name.partition(".")[0] in ("mlx_lm", "transformers")
    }
    assert found == {"libraries.py"}
