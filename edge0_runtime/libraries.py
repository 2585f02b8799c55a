"""What the runtime uses of mlx-lm and transformers. Both are imported here alone, and without torch and wandb.

Where training is installed too, transformers would import torch and mlx-lm wandb, for functions that serving never calls: 60 % of
the time to the first token.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import pkgutil
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from edge0_runtime.scanning import scan_kept


class _Later(ModuleType):
    """Stands for a module until somebody asks it for something; from then on it has all that the module has."""

    def __getattr__(self, name: str) -> Any:
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        module = importlib.import_module(self.__name__)
        self.__dict__.update(vars(module))
        return getattr(module, name)


@contextlib.contextmanager
def postponed(*names: str) -> Iterator[None]:
    """Inside the block these modules are imported in name only, where they are installed and not imported yet."""
    specs = {name: importlib.util.find_spec(name) for name in names if name not in sys.modules}
    stand_ins = {name: _Later(name) for name, spec in specs.items() if spec is not None}
    for name, module in stand_ins.items():
        module.__spec__ = specs[name]
    sys.modules.update(stand_ins)
    try:
        yield
    finally:
        for name, module in stand_ins.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]


# huggingface_hub's HTTP client imports trio for those who use it: a tenth of a second.
with scan_kept(), postponed("torch", "wandb", "trio"):
    from mlx_lm import tool_parsers
    from mlx_lm.generate import TextStateMachine, make_text_state_machine
    from mlx_lm.models.cache import make_prompt_cache
    from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchGLU
    from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p, make_logits_processors
    from mlx_lm.tokenizer_utils import TokenizerWrapper, _infer_tool_parser
    from mlx_lm.tuner.lora import LoRALinear
    from mlx_lm.utils import load_model
    from transformers import CONFIG_MAPPING, AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase
    from transformers.utils import logging as transformers_logging


def tool_parser(tokenizer: PreTrainedTokenizerBase) -> ModuleType | None:
    """mlx-lm's module that parses the tool calls of a tokenizer's model, None where it knows none.

    It has `parse_tool_call`, `tool_call_start` and `tool_call_end`.
    """
    kind = tokenizer.init_kwargs.get("tool_parser_type") or _infer_tool_parser(tokenizer)
    if kind not in [module.name for module in pkgutil.iter_modules(tool_parsers.__path__)]:
        return None  # the file may say anything
    return importlib.import_module(f"{tool_parsers.__name__}.{kind}")


__all__ = [
    "CONFIG_MAPPING",
    "AutoTokenizer",
    "LoRALinear",
    "PreTrainedConfig",
    "PreTrainedTokenizerBase",
    "QuantizedSwitchLinear",
    "SwitchGLU",
    "TextStateMachine",
    "TokenizerWrapper",
    "apply_min_p",
    "apply_top_k",
    "apply_top_p",
    "load_model",
    "make_logits_processors",
    "make_prompt_cache",
    "make_text_state_machine",
    "postponed",
    "tool_parser",
    "transformers_logging",
]
