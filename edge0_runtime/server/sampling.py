"""How a token is chosen: what `Engine.generate` is told, and what a model says where nobody else does."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from edge0_runtime.contract.errors import Edge0Error


@dataclass(frozen=True)
class Sampling:
    """Arguments of `Engine.generate`."""

    max_tokens: int
    temperature: float
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None


@dataclass(frozen=True)
class Defaults:
    """Sampling where a request says nothing: the model's generation_config.json, else OpenAI's values."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0

    @classmethod
    def of_model(cls, model_dir: Path) -> Defaults:
        path = model_dir / "generation_config.json"
        try:
            config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        except ValueError as problem:
            raise Edge0Error(f"{path}: not valid JSON: {problem}; correct or remove it") from problem
        found = {name: config[name] for name in cls.__dataclass_fields__ if config.get(name) is not None}
        strangers = {name: value for name, value in found.items() if type(value) not in (int, float)}
        if strangers:
            raise Edge0Error(f"{path}: {strangers} must be numbers; correct or remove them")
        return cls(**found)
