"""Who completes prompts: transformers on the path of training, or vLLM. Ids in, ids out; nothing is tokenised on the way."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from edge0_runtime.contract.errors import Edge0Error
from edge0_train.config import Config, Sample
from edge0_train.student import Completion, Decoding, StudentPath, generate


class Writer(Protocol):
    """Completes prompts as `config.sample` says."""

    def __call__(self, prompts: Sequence[Sequence[int]], seed: int) -> list[Completion]:
        """One completion a prompt, in order; the same prompts and seed give the same completions."""
        ...


@dataclass(frozen=True)
class PathWriter:
    """A `StudentPath` writes: the student under its timeline (native_k None), or a base by its own gates."""

    path: StudentPath
    sample: Sample
    end_ids: tuple[int, ...]
    pad_id: int
    native_k: int | None

    def __call__(self, prompts: Sequence[Sequence[int]], seed: int) -> list[Completion]:
        """By `generate`; one generator, seeded anew, draws for all prompts of a call."""
        generator = torch.Generator(device=self.path.model.device)
        generator.manual_seed(seed)
        sample = self.sample
        return generate(
            self.path,
            prompts,
            Decoding(sample.max_new_tokens, sample.temperature, sample.top_p),
            end_ids=self.end_ids,
            pad_id=self.pad_id,
            native_k=self.native_k,
            generator=generator,
        )


@dataclass(frozen=True)
class VllmWriter:
    """A teacher in vLLM, which is much faster on long completions; it routes by its own gates, as published."""

    engine: Any
    library: Any
    sample: Sample
    end_ids: tuple[int, ...]
    allowed_ids: list[int] | None = None

    @classmethod
    def open(cls, config: Config, end_ids: tuple[int, ...], cut: int | None) -> VllmWriter:
        """Load `teacher.directory` on all GPUs of this process.

        Args:
            cut: only ids below it are written (the teacher's vocabulary is padded beyond); None: all.

        Raises Edge0Error when vLLM cannot be imported.
        """
        try:
            vllm = importlib.import_module("vllm")
        except ImportError as error:
            raise Edge0Error(
                f"sample.backend: vllm cannot be imported ({error}); pip install vllm, or set sample.backend=transformers"
            ) from error
        engine = vllm.LLM(
            model=config.teacher.directory,
            dtype=config.base.dtype,
            seed=config.seed,
            max_model_len=config.text.max_length + config.sample.max_new_tokens,
            tensor_parallel_size=max(1, torch.cuda.device_count()),
            generation_config="vllm",  # else the model's file would change top-k and temperature behind our back
        )
        return cls(engine, vllm, config.sample, end_ids, None if cut is None else list(range(cut)))

    def __call__(self, prompts: Sequence[Sequence[int]], seed: int) -> list[Completion]:
        """By vLLM; prompt n of a call draws with seed + n."""
        sample = self.sample
        settings = [
            self.library.SamplingParams(
                temperature=sample.temperature,
                top_p=sample.top_p,
                max_tokens=sample.max_new_tokens,
                stop_token_ids=list(self.end_ids),
                seed=(seed + number) % 2**31,  # one seed for all prompts would give all of them the same noise
                detokenize=False,
                allowed_token_ids=self.allowed_ids,
            )
            for number in range(len(prompts))
        ]
        requests = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        outputs = self.engine.generate(requests, settings, use_tqdm=False)
        return [self._completion(output.outputs[0]) for output in outputs]

    def _completion(self, output: Any) -> Completion:
        """Ids up to and with the end token, whether or not vLLM left that one in."""
        ids = tuple(output.token_ids)
        if output.finish_reason == "length":
            return Completion(ids, "length")
        if output.finish_reason != "stop":
            raise Edge0Error(
                f"sample.backend: vllm ended a completion with {output.finish_reason!r}; run the phase again"
            )
        if not ids or ids[-1] not in self.end_ids:
            ended_by = output.stop_reason if output.stop_reason in self.end_ids else self.end_ids[0]
            ids = (*ids, ended_by)
        return Completion(ids, "stop")
