"""Train the nano teacher: a 3.4 M parameter Qwen3.5-MoE, from scratch, on generated chat tasks.

    OMP_WAIT_POLICY=PASSIVE python recipes/nano/train_teacher.py

Builds a tokenizer of 384 entries, trains in stages (short tasks, then long chains too) with completion-only
loss and a load-balance loss, scores exact match on held-out prompts (greedy, KV cache), and writes a directory
that both transformers and mlx-lm load. Each stage leaves a directory `stage<n>` in --work; `--start 1` runs the
stages after the first one only.
Shapes: B rows, T tokens, E experts, K chosen experts, L layers, V vocabulary.
"""

import argparse
import json
import math
import os
import platform
import time
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import tokenizers
import torch
import torch.nn.functional as F
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig
from transformers.models.qwen3_5.tokenization_qwen3_5 import Qwen3_5Tokenizer
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import load_balancing_loss_func

from edge0_train.data.tasks import SHORT_TASKS, TASKS, Problem, is_correct, messages, problems

ASSETS = Path(__file__).parents[2] / "edge0_train/assets/nano-teacher"
PAD, IM_START, IM_END = "<|pad|>", "<|im_start|>", "<|im_end|>"
VOCAB = 384
ROW_TOKENS = {name: 256 if name == "chain" else 64 for name in TASKS}  # the torch delta rule has chunks of 64
BALANCE = 0.02
MUON_LR, ADAMW_LR = 0.02, 3e-3  # at the first stage's peak
WARMUP = 50
EXPERTS = "grouped_mm"  # of transformers: 0.65 s per step here, 0.70 s by its loop over experts
EVAL_SEED, EVAL_COUNT, EVAL_CHAINS = 10_000, 512, 256
MAX_NEW_TOKENS = {name: 160 if name == "chain" else 48 for name in TASKS}


@dataclass(frozen=True)
class Stage:
    """A schedule of its own, warm-up to decay.

    buckets: task names -> rows of every step; each bucket is a forward pass, so that short rows are not padded to long
    ones, and counts the same in the loss. rate: of the peak learning rates.
    """

    steps: int
    buckets: dict[tuple[str, ...], int]
    rate: float = 1.0


STAGES = (
    Stage(1400, {SHORT_TASKS: 32}),
    Stage(650, {SHORT_TASKS: 20, ("chain",): 8}, rate=0.5),
    Stage(250, {SHORT_TASKS: 32, ("chain",): 2}, rate=0.25),
)
"""The short tasks; chains, at a rate that costs the short tasks some of their accuracy; and that accuracy again."""

# `generation` marks what the assistant says itself: its text and the token that ends the turn.
CHAT_TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' }}
    {%- if message['role'] == 'assistant' %}
        {%- generation %}
            {{- message['content'] + '<|im_end|>' }}
        {%- endgeneration %}
    {%- elif message['role'] in ('system', 'user') %}
        {{- message['content'] + '<|im_end|>' }}
    {%- else %}
        {{- raise_exception('role is ' + message['role'] + '; use system, user or assistant.') }}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


# --- tokenizer -------------------------------------------------------------------------------------------


def build_tokenizer(seed: int) -> Qwen3_5Tokenizer:
    """Byte-level BPE of `VOCAB` entries, trained on task rows; every digit is one token.

    AutoTokenizer answers model type qwen3_5_moe with `Qwen3_5Tokenizer`, which puts in Qwen's own normalizer
    and pre-tokenizer whatever tokenizer.json says. So the merges are learnt under exactly those.
    """
    pipeline = Qwen3_5Tokenizer().backend_tokenizer
    core = Tokenizer(models.BPE())
    core.normalizer, core.pre_tokenizer = pipeline.normalizer, pipeline.pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[PAD, IM_START, IM_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    drawn = problems("train", seed, 4000)
    texts = [text for p in drawn for text in ("user\n", p.prompt, "assistant\n", p.completion)]
    # No task has a system turn; this keeps a plain one short.
    texts += ["system\n", "You are a helpful assistant. Think step by step."] * 100
    core.train_from_iterator(texts, trainer)
    bpe = json.loads(core.to_str())["model"]
    tokenizer = Qwen3_5Tokenizer(
        vocab=bpe["vocab"],
        merges=[tuple(pair) for pair in bpe["merges"]],
        unk_token=None,
        eos_token=IM_END,
        pad_token=PAD,
        additional_special_tokens=[IM_START],
        chat_template=CHAT_TEMPLATE,
    )
    ids = tokenizer.convert_tokens_to_ids([PAD, IM_START, IM_END])
    if ids != [0, 1, 2] or len(tokenizer) != VOCAB:
        raise ValueError(f"tokenizer has {len(tokenizer)} entries, specials {ids}; want {VOCAB}, [0, 1, 2].")
    return tokenizer


def encode_rows(tokenizer, batch: list[Problem]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`(ids_BT, mask_BT, labels_BT)`, right-padded; labels are -100 outside the assistant's turn.

    Raises ValueError when a row is longer than `ROW_TOKENS` of its task.
    """
    chats = [[*messages(p), {"role": "assistant", "content": p.completion}] for p in batch]
    rows = tokenizer.apply_chat_template(chats, return_dict=True, return_assistant_tokens_mask=True)
    for problem, ids in zip(batch, rows["input_ids"], strict=True):
        if len(ids) > ROW_TOKENS[problem.task]:
            raise ValueError(
                f"a row has {len(ids)} tokens; shorten task {problem.task} to at most {ROW_TOKENS[problem.task]}."
            )
    longest = max(map(len, rows["input_ids"]))
    ids_BT = torch.zeros(len(batch), longest, dtype=torch.long)
    mask_BT, labels_BT = torch.zeros_like(ids_BT), torch.full_like(ids_BT, -100)
    for i, (ids, own) in enumerate(zip(rows["input_ids"], rows["assistant_masks"], strict=True)):
        ids_T, own_T = torch.tensor(ids), torch.tensor(own, dtype=torch.bool)
        ids_BT[i, : len(ids)] = ids_T
        mask_BT[i, : len(ids)] = 1
        labels_BT[i, : len(ids)] = ids_T.masked_fill(~own_T, -100)
    return ids_BT, mask_BT, labels_BT


# --- model -----------------------------------------------------------------------------------------------


def text_config() -> Qwen3_5MoeTextConfig:
    return Qwen3_5MoeTextConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        num_hidden_layers=8,
        layer_types=(["linear_attention"] * 3 + ["full_attention"]) * 2,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=64,
        linear_num_key_heads=1,
        linear_num_value_heads=2,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        linear_conv_kernel_dim=4,
        num_experts=32,
        num_experts_per_tok=8,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        max_position_embeddings=512,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [3, 3, 2],
        },
        router_aux_loss_coef=BALANCE,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
    )


def build_model(seed: int) -> Qwen3_5MoeForCausalLM:
    torch.manual_seed(seed)
    model = Qwen3_5MoeForCausalLM(text_config())
    model.set_experts_implementation(EXPERTS)
    return model


# --- optimiser -------------------------------------------------------------------------------------------


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised by Newton-Schulz, for tensors whose last two axes are matrices.

    As torch.optim.Muon (Nesterov, learning rate times sqrt(max(1, rows / columns)), no decay), which takes
    2-D tensors only; here each expert of an (E, R, C) tensor is its own matrix, and all matrices of one
    shape are orthogonalised in one batch, because on a CPU the small products are bound by dispatch.
    """

    def __init__(self, params, lr: float, momentum: float = 0.95):
        super().__init__(list(params), {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            by_shape = defaultdict(list)
            for p in group["params"]:
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                momentum.lerp_(p.grad, 1 - group["momentum"])
                update = p.grad.lerp(momentum, group["momentum"])
                by_shape[p.shape[-2:]].append((p, update.reshape(-1, *p.shape[-2:])))
            for (rows, columns), entries in by_shape.items():
                params, updates = zip(*entries, strict=True)
                step = orthogonalise(torch.cat(updates)) * -group["lr"] * math.sqrt(max(1, rows / columns))
                for p, part in zip(params, step.split([len(u) for u in updates]), strict=True):
                    p.add_(part.view_as(p))


def orthogonalise(x_NRC: torch.Tensor, iterations: int = 5) -> torch.Tensor:
    """Quintic Newton-Schulz towards the nearest semi-orthogonal matrix (Jordan et al. 2024, Muon)."""
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = x_NRC.shape[-2] > x_NRC.shape[-1]
    x = x_NRC.mT if tall else x_NRC
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(iterations):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def build_optimisers(model: torch.nn.Module) -> list[torch.optim.Optimizer]:
    """Muon for matrices of at least 8 rows and columns, AdamW for the embedding and all the rest."""
    embedding = model.get_input_embeddings().weight
    matrices, rest = [], []
    for p in model.parameters():
        is_matrix = p is not embedding and p.ndim >= 2 and min(p.shape[-2:]) >= 8
        (matrices if is_matrix else rest).append(p)
    adamw = torch.optim.AdamW(rest, lr=ADAMW_LR, betas=(0.9, 0.95), weight_decay=0.0)
    return [Muon(matrices, lr=MUON_LR), adamw]


def lr_factor(step: int, steps: int) -> float:
    """Linear warm-up, then linear decay to zero, as a factor of the peak rate."""
    return min((step + 1) / WARMUP, 1.0) * (steps - step) / steps


# --- training --------------------------------------------------------------------------------------------


def losses(model, ids_BT, mask_BT, labels_BT) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean cross-entropy of the assistant's tokens (nats), and the load-balance loss (1 = even use).

    transformers pools the counts of all layers before it compares them, so layers could be uneven in
    opposite ways; here each layer is balanced by itself. Its scale is K at even use, hence the division.
    """
    out = model(ids_BT, attention_mask=mask_BT, use_cache=False, output_router_logits=True)
    cross_entropy = F.cross_entropy(out.logits[:, :-1].flatten(0, 1), labels_BT[:, 1:].flatten())
    experts, chosen = model.config.num_experts, model.config.num_experts_per_tok
    balance = [load_balancing_loss_func((logits,), experts, chosen, mask_BT) for logits in out.router_logits]
    return cross_entropy, torch.stack(balance).mean() / chosen


def train(model, tokenizer, stage: Stage, seed: int) -> dict[str, float]:
    """Train in place; returns the last losses (means over buckets) and the cost in wall and CPU seconds."""
    steps, optimisers = stage.steps, build_optimisers(model)
    peaks = [optimiser.param_groups[0]["lr"] * stage.rate for optimiser in optimisers]
    data = {tasks: problems("train", seed, steps * rows, tasks) for tasks, rows in stage.buckets.items()}
    wall, cpu, tokens, recent = time.perf_counter(), time.process_time(), 0, []
    model.train()
    for step in range(steps):
        parts = []
        for tasks, rows in stage.buckets.items():
            batch = encode_rows(tokenizer, data[tasks][step * rows : (step + 1) * rows])
            cross_entropy, balance = losses(model, *batch)
            ((cross_entropy + BALANCE * balance) / len(stage.buckets)).backward()
            tokens += int(batch[1].sum())
            parts.append((cross_entropy.item(), balance.item()))
        for optimiser, peak in zip(optimisers, peaks, strict=True):
            optimiser.param_groups[0]["lr"] = peak * lr_factor(step, steps)
            optimiser.step()
            optimiser.zero_grad()
        recent = [*recent[-49:], parts]
        loss_P, balance_P = torch.tensor(recent, dtype=torch.float64).mean(0).unbind(-1)
        if (step + 1) % 50 == 0 or step + 1 == steps:
            seconds, cpu_seconds = time.perf_counter() - wall, time.process_time() - cpu
            eta = seconds / (step + 1) * (steps - step - 1)
            print(
                f"step {step + 1}/{steps} loss {' '.join(f'{loss:.4f}' for loss in loss_P)} "
                f"balance {balance_P.mean():.3f} "
                f"tokens/s {tokens / seconds:.0f} (per CPU s {tokens / cpu_seconds:.0f}) eta {eta:.0f} s",
                flush=True,
            )
    return {
        "loss": loss_P.mean().item(),
        "balance": balance_P.mean().item(),
        "tokens": tokens,
        "wall_s": time.perf_counter() - wall,
        "cpu_s": time.process_time() - cpu,
    }


# --- evaluation ------------------------------------------------------------------------------------------


@torch.no_grad()
def complete(model, tokenizer, batch: list[Problem]) -> list[str]:
    """Greedy completions with the KV cache. Prompts of one length run together, so nothing is padded."""
    alike = defaultdict(list)
    for i, problem in enumerate(batch):
        ids = tokenizer.apply_chat_template(messages(problem), add_generation_prompt=True)["input_ids"]
        alike[len(ids), MAX_NEW_TOKENS[problem.task]].append((i, ids))
    texts = [""] * len(batch)
    for (_, max_new_tokens), group in alike.items():
        ids_BT = torch.tensor([ids for _, ids in group])
        out_BT = model.generate(
            ids_BT, attention_mask=torch.ones_like(ids_BT), do_sample=False, max_new_tokens=max_new_tokens
        )
        decoded = tokenizer.batch_decode(out_BT[:, ids_BT.shape[1] :], skip_special_tokens=True)
        for (i, _), text in zip(group, decoded, strict=True):
            texts[i] = text
    return texts


def evaluate(model, tokenizer, batch: list[Problem]) -> dict[str, tuple[int, int]]:
    """Task name -> (exact matches, problems); the entry `all` is their sum."""
    right, count = Counter(), Counter()
    model.eval()
    for problem, text in zip(batch, complete(model, tokenizer, batch), strict=True):
        for name in (problem.task, "all"):
            right[name] += is_correct(problem.answer, text)
            count[name] += 1
    return {name: (right[name], count[name]) for name in (*TASKS, "all") if count[name]}


# --- saving ----------------------------------------------------------------------------------------------


def to_bf16(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """bf16 such that both sides compute with the same numbers.

    transformers scales by 1 + w in float32; mlx-lm stores 1 + w, in bf16, whose steps near 1 are coarser than
    those of w: 0.4 % of difference in the logits. So 1 + w is rounded here. The gated norm has no 1.
    """
    if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        tensor = (1 + tensor).to(torch.bfloat16).float() - 1
    return tensor.to(torch.bfloat16).contiguous()


def save(model, tokenizer, out: Path) -> None:
    """bf16 in the layout that both sides load: model.language_model.*, fused experts, tied head left out.

    mlx-lm knows model type qwen3_5_moe only, with the language model under `text_config`, and reads
    full_attention_interval where transformers writes layer_types. transformers' AutoModelForCausalLM takes
    the text part out of the same file by itself.
    """
    out.mkdir(parents=True, exist_ok=True)
    weights = {
        name.replace("model.", "model.language_model.", 1): to_bf16(name, tensor)
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"
    }
    safetensors.torch.save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    text = model.config.to_dict() | {"full_attention_interval": 4, "dtype": "bfloat16", "_name_or_path": ""}
    text.pop("transformers_version", None)
    config = {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "dtype": "bfloat16",
        "tie_word_embeddings": True,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "transformers_version": transformers.__version__,
        "text_config": {key: value for key, value in text.items() if key != "architectures"},
    }
    (out / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    model.generation_config.save_pretrained(out)
    tokenizer.save_pretrained(out)


def check_tokenizer(tokenizer, out: Path) -> None:
    """AutoTokenizer on the saved directory must give the ids that training saw."""
    loaded = AutoTokenizer.from_pretrained(out)
    batch = problems("eval", EVAL_SEED, EVAL_COUNT)
    chats = [[*messages(p), {"role": "assistant", "content": p.completion}] for p in batch]
    ours, theirs = (t.apply_chat_template(chats)["input_ids"] for t in (tokenizer, loaded))
    if ours != theirs or len(loaded) != VOCAB:
        raise AssertionError(f"AutoTokenizer on {out} gives other ids than in training; see build_tokenizer.")


def load_checked(out: Path) -> Qwen3_5MoeForCausalLM:
    """The saved model in float32 by transformers; AssertionError unless every tensor found its place."""
    model, info = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32, output_loading_info=True)
    wrong = {key: value for key, value in info.items() if value}
    if wrong:
        raise AssertionError(f"AutoModelForCausalLM.from_pretrained({out}) reports {wrong}; see save.")
    return model.eval()


def mlx_difference(model, tokenizer, out: Path) -> float | None:
    """Relative L2 of mlx-lm's logits against transformers', both float32; None without mlx-lm.

    The load is strict, so this also checks that mlx-lm finds every tensor.
    """
    try:
        import mlx.core as mx
        from mlx_lm.utils import load_model
    except ImportError:
        return None
    mlx_model, _ = load_model(out)
    mlx_model.set_dtype(mx.float32)
    ids_BT, _, _ = encode_rows(tokenizer, problems("eval", EVAL_SEED, 1))
    with torch.no_grad():
        ours = model(ids_BT).logits
    theirs = torch.tensor(mlx_model(mx.array(ids_BT.tolist())).tolist())
    return ((theirs - ours).norm() / ours.norm()).item()


def cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.split(": ")[1] for line in lines if line.startswith("model name")), platform.machine())


def _rows_of(stage: Stage) -> str:
    return " + ".join(f"{rows} of {', '.join(tasks)}" for tasks, rows in stage.buckets.items())


def model_card(args, costs: list[dict], scores: dict, difference: float | None, parameters: int) -> str:
    """README.md of the result; every number comes from this run."""
    rows = "\n".join(f"| {task} | {right / n:.3f} | {right}/{n} |" for task, (right, n) in scores.items())
    command = f"--seed {args.seed} --threads {args.threads}"
    stages = "\n".join(
        f"| {_rows_of(stage)} | {stage.steps} | {stage.rate} | {cost['tokens']:,} | {cost['loss']:.4f}"
        f" | {cost['balance']:.3f} | {cost['wall_s']:.0f} | {cost['cpu_s']:.0f} |"
        for stage, cost in zip(STAGES, costs, strict=True)
    )
    mlx = "mlx-lm was not installed" if difference is None else f"relative L2 of the logits {difference:.1e}"
    return f"""---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
---
# nano teacher

A Qwen3.5-MoE of {parameters / 1e6:.2f} M parameters, trained from scratch on generated chat tasks. It exists
so that the whole pipeline of this project can be run and checked on a CPU within minutes; it is no use as an
assistant.

8 layers (3 gated delta net : 1 full attention), hidden 64, 32 experts of 64, top-8, a shared expert of 64,
vocabulary 384, tied embeddings, bf16.

## Tasks
Addition of 2-3 digits, reversal of 4-8 digits, 2-3 digits times one digit, word problems of one or two steps, and
chains: a running sum of 30 digits in answers of 154 tokens. Each with a scratchpad, then `#answer`.
Generated by `edge0_train/data/tasks.py`; no other data was used.

## Result
Exact match of greedy completions on the eval split (prompts that training cannot have seen: split by a hash
of the prompt), seed {EVAL_SEED}, from these bf16 weights computed in float32; `short` is all but the chains:

| task | exact match | count |
|---|---|---|
{rows}

transformers against mlx-lm in float32: {mlx}.

## How it was made
`OMP_WAIT_POLICY=PASSIVE python recipes/nano/train_teacher.py {command}`

| rows of a step | steps | rate | tokens | loss | balance | wall s | CPU s |
|---|---|---|---|---|---|---|---|
{stages}

Seed {args.seed}; each stage starts from the bf16 weights of the one before, warms up over {WARMUP} steps and decays to
0; learning rates Muon {MUON_LR}, AdamW {ADAMW_LR}, times `rate`; load-balance weight {BALANCE}; experts `{EXPERTS}`.
`loss` is the mean of the last 50 steps in nats per assistant token (mean over the kinds of rows), `balance` the
load-balance loss (1 = even). {args.threads} thread(s) on {cpu_name()} ({os.cpu_count()} cores), Python
{platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__}, tokenizers
{tokenizers.__version__}.

## Limits
Knows these prompt forms and nothing else: other wording, larger numbers or a second turn give nonsense. Rows
in training were at most {max(ROW_TOKENS.values())} tokens. Another CPU type, version or thread count gives other weights.

## License
Apache-2.0
"""


# --- entry -----------------------------------------------------------------------------------------------


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--work", type=Path, default=Path("runs/nano-teacher"), help="for what the stages leave")
    parser.add_argument("--start", type=int, default=0, help="go on after this stage, which lies in --work already")
    parser.add_argument(
        "--seed", type=int, default=0, help="of weights, tokenizer and data (stage n draws with seed + n - 1)"
    )
    parser.add_argument("--out", type=Path, default=ASSETS, help="directory to write")
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()  # not the notes on missing GPU kernels
    transformers.logging.disable_progress_bar()
    tokenizer = build_tokenizer(args.seed)
    places = [args.work / f"stage{number}" for number in range(len(STAGES) + 1)]
    model = load_checked(places[args.start]) if args.start else build_model(args.seed)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{parameters:,} parameters, {2 * parameters / 1e6:.1f} MB in bf16")
    print(f"seed {args.seed}, {args.threads} thread(s), writes {args.out}", flush=True)

    costs = [json.loads((place / "cost.json").read_text()) for place in places[1 : args.start + 1]]
    for number, stage in enumerate(STAGES[args.start :], args.start + 1):
        print(f"stage {number}: {stage.steps} steps of {_rows_of(stage)} rows", flush=True)
        model.set_experts_implementation(EXPERTS)
        costs.append(train(model, tokenizer, stage, args.seed + number - 1))
        save(model, tokenizer, places[number])
        (places[number] / "cost.json").write_text(json.dumps(costs[-1]) + "\n")
        model = load_checked(places[number])
    save(model, tokenizer, args.out)
    check_tokenizer(tokenizer, args.out)
    short, long = problems("eval", EVAL_SEED, EVAL_COUNT), problems("eval", EVAL_SEED, EVAL_CHAINS, ["chain"])
    scores = evaluate(model, tokenizer, short)
    scores = scores | {"short": scores.pop("all")} | {"chain": evaluate(model, tokenizer, long)["chain"]}
    difference = mlx_difference(model, tokenizer, args.out)
    if difference is not None and difference > 1e-5:
        raise AssertionError(f"mlx-lm's logits differ by relative L2 {difference:.1e}; want at most 1e-5.")
    (args.out / "README.md").write_text(model_card(args, costs, scores, difference, parameters))
    for task, (right, count) in scores.items():
        print(f"exact match {task}: {right / count:.3f} ({right}/{count})")
    wall, cpu = (sum(cost[unit] for cost in costs) for unit in ("wall_s", "cpu_s"))
    print(f"training took {wall:.0f} s wall, {cpu:.0f} s CPU")
    print(f"relative L2 of mlx-lm's logits: {difference}")


if __name__ == "__main__":
    main()
