"""Models by name on one base: each answers bit for bit as an engine that was loaded alone, and the base is in memory once."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import mlx.core as mx
import numpy as np
import openai
import pytest

from edge0_runtime.catalog import Catalog, Entry
from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.tier import builtin_tier
from edge0_runtime.engine import Engine
from edge0_runtime.serving import Serving
from edge0_runtime.text import chat_ids
from edge0_train.base import quantize_checkpoint
from tests.mlx_memory import mlx_bytes
from tests.random_adapters import random_heads, write_adapters
from tests.runtime.conftest import NANO_ASSETS, TIER, write_base
from tests.runtime.scripted_server import live

WAYS = {
    "both": Serving(),
    "heads": Serving(lora=False),
    "lora": Serving(prerouter=False),
    "base": Serving(prerouter=False, lora=False),
    "lookahead": Serving(lora=False, arm="lookahead"),
}
Answer = tuple[list[int], np.ndarray, list[float]]


def answer(engine: Engine, prompt: list[int], **sampling: Any) -> Answer:
    """(ids, logits [T, V], logprobs) of eight tokens."""
    steps = list(engine.generate(prompt, max_tokens=8, ignore_eos=True, trace=True, **sampling))
    return [step.token for step in steps], np.stack([step.logits for step in steps]), [step.logprob for step in steps]


def same(one: Answer, two: Answer) -> bool:
    return one[0] == two[0] and one[1].tobytes() == two[1].tobytes() and one[2] == two[2]


def entries(directory: Path) -> dict[str, Entry]:
    return {name: Entry(directory, serving) for name, serving in WAYS.items()}


def alone(directory: Path, serving: Serving, **options: Any) -> Engine:
    return Engine.load(directory, prerouter=serving.prerouter, lora=serving.lora, arm=serving.arm, **options)


@pytest.fixture(scope="module")
def other_training(base_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another model directory of the same base, with adapters of another training."""
    directory = tmp_path_factory.mktemp("other") / "model"
    shutil.copytree(base_dir, directory)
    write_adapters(directory, TIER, random_heads(TIER, seed=9))
    return directory


@pytest.mark.parametrize("slots", [None, 3])
def test_each_name_answers_as_an_engine_loaded_alone(tiny_dir, budget, prompts, slots):
    prompts = prompts[:1] + prompts[3:] if slots is None else prompts[2:3]
    gib = None if slots is None else budget(tiny_dir, slots)
    sampled = {"temperature": 1.5, "seed": 7}
    wanted = {}
    for name, serving in WAYS.items():
        with alone(tiny_dir, serving, memory_budget=gib) as engine:
            wanted[name] = [(answer(engine, prompt), answer(engine, prompt, **sampled)) for prompt in prompts]
    assert len({tuple(answers[-1][0][0]) for answers in wanted.values()}) == 4, (
        "the on-demand arms are one, all else differs"
    )
    with Catalog.load(entries(tiny_dir), memory_budget=gib) as catalog:
        for index, prompt in enumerate(prompts):  # the names take turns
            for name, engine in catalog.items():
                greedy, drawn = wanted[name][index]
                assert same(answer(engine, prompt), greedy), name
                assert same(answer(engine, prompt, **sampled), drawn), name


@pytest.mark.parametrize("tier_name", ["nano", "nano-ling"])
def test_the_names_of_a_nano_answer_as_alone_in_turns(tier_name, tmp_path, budget, prompts):
    """The embedded teachers in int4, with random adapters, in a budget that holds a part of the experts."""
    tier, directory = builtin_tier(tier_name), tmp_path / "model"
    quantize_checkpoint(NANO_ASSETS.with_name(f"{tier_name}-teacher"), directory, tier)
    write_adapters(directory, tier)
    names = {name: entry for name, entry in entries(directory).items() if name in ("both", "heads", "base")}
    gib, prompts = budget(directory, 100), prompts[1:3]
    wanted = {}
    for name, entry in names.items():
        with alone(directory, entry.serving, memory_budget=gib) as engine:
            assert not engine.model.never_waits
            wanted[name] = [answer(engine, prompt, temperature=0.8, seed=1) for prompt in prompts]
    with Catalog.load(names, memory_budget=gib) as catalog:
        for index, prompt in enumerate(prompts):
            for name, engine in catalog.items():
                assert same(answer(engine, prompt, temperature=0.8, seed=1), wanted[name][index]), name


def test_two_trainings_of_one_base_stand_side_by_side(tiny_dir, make_dir, other_training, prompts):
    """A directory of its own, adapters alone, and a tier with another K; the order of loading is not the order of names."""
    wider = make_dir(k=3)
    names = {
        "one": Entry(tiny_dir),
        "two": Entry(other_training),
        "two's adapters": Entry(tiny_dir, Serving(adapters=other_training)),
        "wider": Entry(tiny_dir, Serving(adapters=wider)),
    }
    with Catalog.load(names) as catalog:
        assert list(catalog) == list(names) and catalog.default == "one"
        found = {name: answer(engine, prompts[3]) for name, engine in catalog.items()}
        assert [engine.model.tier.k for engine in catalog.values()] == [2, 2, 2, 3]
    for name, directory in (("one", tiny_dir), ("two", other_training), ("wider", wider)):
        with Engine.load(directory) as engine:
            assert same(found[name], answer(engine, prompts[3])), name
    assert same(found["two"], found["two's adapters"]) and not same(found["one"], found["two"])


@pytest.mark.parametrize("arm", [None, "resident"])
def test_the_base_and_equal_adapters_are_in_memory_once(tiny_dir, arm):
    ways = WAYS if arm is None else {"lora": Serving(prerouter=False, arm=arm), "base": Serving(False, False, arm)}
    with Catalog.load({name: Entry(tiny_dir, serving) for name, serving in ways.items()}) as catalog:
        models = [engine.model for engine in catalog.values()]
        first = models[0]
        for model in models[1:]:
            assert model.memory is first.memory and model.store is first.store
            for path, module in model.base.items():
                if arm is not None or ".switch_mlp." not in path:  # views of the one pool
                    for name, value in module.items():
                        assert not isinstance(value, mx.array) or value is first.base[path][name], f"{path}.{name}"
        loras = [
            [module.lora_a for module in model.network.modules() if "lora_a" in module]
            for model in models
            if model.identity.lora_sha256
        ]
        assert all(one is two for other in loras for one, two in zip(loras[0], other, strict=True))
        assert len({id(model.heads) for model in models if model.heads}) <= 1
        together = first.plan
    if arm is None:
        with Engine.load(tiny_dir) as engine:
            assert together is not None and together.adapter_bytes == engine.model.plan.adapter_bytes
            assert together.widened_bytes == engine.model.plan.widened_bytes


def test_five_names_take_the_memory_of_one(tiny_dir):
    before = mlx_bytes()
    with Engine.load(tiny_dir):
        one = mlx_bytes() - before
    before = mlx_bytes()
    with Catalog.load(entries(tiny_dir)):
        assert one <= mlx_bytes() - before <= 1.01 * one


def test_adapters_that_differ_are_planned_for_both(tiny_dir, other_training):
    with Engine.load(tiny_dir) as engine:
        one = engine.model.plan
    with Catalog.load({"one": Entry(tiny_dir), "two": Entry(other_training)}) as catalog:
        both = catalog["two"].model.plan
    assert both.adapter_bytes == 2 * one.adapter_bytes and both.widened_bytes > one.widened_bytes


def test_one_request_at_a_time_runs_on_all_of_them(tiny_dir, prompts):
    with Catalog.load({"a": Entry(tiny_dir), "b": Entry(tiny_dir, Serving(lora=False))}) as catalog:
        running = catalog["a"].generate(prompts[2], max_tokens=4, ignore_eos=True)
        next(running)
        with pytest.raises(Edge0Error, match="a request is running"):
            next(catalog["b"].generate(prompts[2], max_tokens=4))
        list(running)
        assert len(list(catalog["b"].generate(prompts[2], max_tokens=4, ignore_eos=True))) == 4
        with pytest.raises(Edge0Error, match="memory_budget: several models share it"):
            catalog["a"].set_memory_budget(1.0)


def test_another_base_is_refused(tiny_dir, tmp_path):
    write_base(tmp_path, tied=False)
    with pytest.raises(
        Edge0Error, match=rf"--model: {tmp_path} holds another base than {tiny_dir}.* on another --port"
    ):
        Catalog.load({"a": Entry(tiny_dir), "b": Entry(tmp_path, Serving(prerouter=False, lora=False))})


def test_an_arm_that_holds_all_experts_beside_one_that_streams_is_refused(tiny_dir):
    names = {"a": Entry(tiny_dir), "b": Entry(tiny_dir, Serving(prerouter=False, arm="resident"))}
    with pytest.raises(Edge0Error, match="arm: prerouter, resident: one holds all experts and another streams them"):
        Catalog.load(names)


# -- adapters of their own ---------------------------------------------------------------------------------------------


@pytest.fixture
def apart(other_training: Path, tmp_path: Path) -> Path:
    """The other training's adapters alone."""
    for file in other_training.glob("*_edge0_*.safetensors"):
        shutil.copy(file, tmp_path)
    return tmp_path


def test_adapters_beside_a_base_serve_as_in_one_directory(base_dir, other_training, apart, prompts):
    with Engine.load(other_training) as engine:
        wanted = answer(engine, prompts[3])
    with Engine.load(base_dir, adapters=apart) as engine:
        assert same(answer(engine, prompts[3]), wanted)


def test_adapters_of_another_base_are_refused(apart, tmp_path_factory):
    base = tmp_path_factory.mktemp("untied")
    write_base(base, tied=False)
    with pytest.raises(Edge0Error, match=r"was trained for base \w{64}, the base served is \w{64}"):
        Engine.load(base, adapters=apart)


def test_adapters_that_are_not_there_are_named(base_dir, tmp_path):
    with pytest.raises(Edge0Error, match="nowhere: not a directory; give the one that holds the adapter files"):
        Engine.load(base_dir, adapters=tmp_path / "nowhere")
    with pytest.raises(Edge0Error, match=rf"{tmp_path}/prerouter_edge0_<tier>.safetensors: file not found"):
        Engine.load(base_dir, adapters=tmp_path)


# -- one endpoint ------------------------------------------------------------------------------------------------------


def test_requests_choose_a_model_by_its_name(tiny_dir):
    """Through OpenAI's own client, whole and streamed, in turns; each answer is that of its engine alone."""
    question = [{"role": "user", "content": "1+1"}]
    names = {name: entry for name, entry in entries(tiny_dir).items() if name in ("both", "base")}
    wanted = {}
    for name, entry in names.items():
        with alone(tiny_dir, entry.serving) as engine:
            ids = chat_ids(engine.tokenizer, question)
            tokens = [step.token for step in engine.generate(ids, max_tokens=12)]
            wanted[name] = engine.tokenizer.decode([token for token in tokens if token not in engine.eos_ids])
    assert wanted["both"] != wanted["base"]
    with (
        Catalog.load(names) as catalog,
        live(catalog) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="x") as client,
    ):
        assert [model.id for model in client.models.list()] == ["both", "base"]
        for _ in range(2):
            for name, text in wanted.items():
                asked = {"messages": question, "temperature": 0, "max_tokens": 12}
                answer = client.chat.completions.create(model=name, **asked)
                assert (answer.model, answer.choices[0].message.content) == (name, text)
                chunks = client.chat.completions.create(model=name, stream=True, **asked)
                assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
        with pytest.raises(openai.NotFoundError, match="model"):
            client.chat.completions.create(model="heads", **asked)


def test_serve_takes_several_models_and_says_where_it_listens(tiny_dir):
    command = [sys.executable, "-m", "edge0_runtime", "serve", "--port", "0", "--json"]
    command += ["--model", f"base={tiny_dir},no-prerouter,no-lora", "--model", f"both={tiny_dir}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        told = json.loads(process.stdout.readline())
        assert told["models"] == ["base", "both"] and told["pid"] == process.pid
        with httpx.Client(base_url=told["url"], timeout=60) as client:
            body = {"messages": [{"role": "user", "content": "1+1"}], "max_tokens": 4}
            names = [
                client.post("/v1/chat/completions", json=body | more).json()["model"]
                for more in ({}, {"model": "both"})
            ]
        assert names == ["base", "both"]
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0 and out == "" and "Traceback" not in err
