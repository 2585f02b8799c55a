"""The command line: `edge0_runtime COMMAND ...`, also `python -m edge0_runtime`.

    edge0_runtime generate models/nano --prompt "12+34=" --json
    edge0_runtime chat     models/nano --prompt "What is 12+34?"
    edge0_runtime serve    models/nano --port 8080
    edge0_runtime verify   models/nano
    edge0_runtime bench    models/nano
    edge0_runtime bench    models/nano --arms prerouter,on_demand
    edge0_runtime doctor   models/nano
    edge0_runtime inspect  models/nano
    edge0_runtime tiers    35b

`generate` continues raw text, greedily unless told otherwise; `chat` puts turns into the model's chat
template and samples as its generation_config.json says. Errors are a sentence on stderr and exit code 2.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.tier import builtin_tier, builtin_tier_names, read_tier
from edge0_runtime.settings import ARMS, IO_THREADS

if TYPE_CHECKING:
    from edge0_runtime.engine import Engine

BENCH_PROMPTS = ("What is 17 times 4?", "Explain step by step why the sky is blue and sunsets are red.")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    args = _parser().parse_args(argv)
    in_main_thread = threading.current_thread() is threading.main_thread()
    # Unhandled, the signal kills Python before its cleanup.
    before = signal.signal(signal.SIGTERM, _terminate) if in_main_thread else None
    logging.basicConfig(format="%(message)s", stream=sys.stderr)
    logging.getLogger("edge0_runtime").setLevel(logging.INFO)  # the engine says what it loaded
    try:
        return args.run(args) or 0
    except Edge0Error as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output (head, less) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)


def _terminate(number: int, _: object) -> None:
    sys.exit(128 + number)


# -- commands ----------------------------------------------------------------------------------------------
# MLX and FastAPI are imported by the commands that need them: `tiers` and `inspect` run on any machine.


def _generate(args: argparse.Namespace) -> None:
    from edge0_runtime.generation import expert_trace, run
    from edge0_runtime.server.sampling import Sampling

    sampling = Sampling(args.max_tokens, args.temperature, args.top_p, seed=args.seed)
    with _load(args) as engine:
        prompt_ids = engine.tokenizer.encode(args.prompt) if args.prompt_ids is None else args.prompt_ids
        with expert_trace(args.trace, engine.model.tier, prompt_ids) as record:
            result = run(engine, prompt_ids, sampling, _shower(args.json), args.ignore_eos, record)
    print(json.dumps(result.to_dict()) if args.json else "")


def _chat(args: argparse.Namespace) -> None:
    from edge0_runtime.generation import reply

    if args.json and args.prompt is None:
        raise Edge0Error("--json: a conversation has no one result; give --prompt too")
    with _load(args) as engine:
        if args.prompt is not None:
            result = reply(engine, [{"role": "user", "content": args.prompt}], args, _shower(args.json))
            print(json.dumps(result.to_dict()) if args.json else "")
            return
        turns: list[dict[str, str]] = []
        print("Ctrl-D ends the conversation.", file=sys.stderr)
        while (text := _ask()) is not None:
            if not text.strip():
                continue
            turns.append({"role": "user", "content": text})
            result = reply(engine, turns, args, _shower(False))
            turns.append({"role": "assistant", "content": result.text})
            print()


def _serve(args: argparse.Namespace) -> None:
    from edge0_runtime.server.app import bind, serve

    with bind(args.host, args.port) as address, _load(args) as engine:
        serve(engine, f"edge0-{engine.model.tier.name}", address)


def _verify(args: argparse.Namespace) -> int:
    from edge0_runtime.contract.traces import read_trace
    from edge0_runtime.measure.verify import verify

    with _load(args) as engine:
        trace = read_trace(args.model_dir / engine.model.tier.file_name("verify"), engine.model.tier)
        report = verify(engine, trace)
    if args.json:
        print(json.dumps(report.to_dict()))
        return 0 if report.ok else 1
    print(f"{'prompt':>6} {'rows':>5} {'judged':>6} {'ids':>5} {'routing':>7} {'logits rel L2':>13}")
    for index, prompt in enumerate(report.prompts):
        equal = prompt.free_mismatch is None and prompt.forced_mismatch is None
        print(
            f"{index:>6} {prompt.rows:>5} {prompt.judged_rows:>6} {'same' if equal else 'other':>5}"
            f" {len(prompt.differences) or 'same':>7} {prompt.logits_error:>13.2e}"
        )
    print(f"dropped experts {report.dropped}, requests isolated: {'yes' if report.isolated else 'no'}")
    for problem in report.problems():
        print(f"  {problem}")
    print("PASS" if report.ok else "FAIL")
    return 0 if report.ok else 1


def _bench(args: argparse.Namespace) -> None:
    from edge0_runtime.measure.ab import compare, table
    from edge0_runtime.measure.bench import bench
    from edge0_runtime.server.text import chat_ids

    with contextlib.ExitStack() as engines:
        engine = engines.enter_context(_load(args))
        texts = args.prompt or BENCH_PROMPTS
        prompts = [chat_ids(engine.tokenizer, [{"role": "user", "content": text}]) for text in texts]
        if args.arms is None:
            runs = bench(engine, prompts, max_tokens=args.max_tokens)
        else:
            resident = None
            if "resident" in args.arms:
                args.arm, args.prerouter = "resident", False
                resident = engines.enter_context(_load(args))
            runs = compare(
                engine, prompts, arms=args.arms, max_tokens=args.max_tokens, rounds=args.rounds,
                page_cache=args.page_cache, resident=resident,
            )  # fmt: skip
        rows = []
        for row in runs:
            rows.append(row)
            if args.json:
                print(json.dumps(row), flush=True)
            elif args.arms is None:
                shown = {key: value for key, value in row.items() if not isinstance(value, (list, dict))}
                print("\n".join(f"{key:>28}: {value}" for key, value in shown.items()), end="\n\n", flush=True)
    if args.arms is not None:
        print(table(rows, args.arms[-1]), file=sys.stderr if args.json else sys.stdout)


def _doctor(args: argparse.Namespace) -> None:
    from edge0_runtime.measure.doctor import doctor, doctor_text

    data = doctor(args.model_dir, args.tier, int(args.read_mib * 2**20))
    print(json.dumps(data, indent=2) if args.json else doctor_text(data))


def _inspect(args: argparse.Namespace) -> None:
    from edge0_runtime.inspection import inspect, inspection_text

    data = inspect(args.model_dir, args.tier)
    print(json.dumps(data, indent=2) if args.json else inspection_text(data))


def _tiers(args: argparse.Namespace) -> None:
    from edge0_runtime.inspection import describe_tier, tier_line, tier_text

    if args.name is not None:
        data = describe_tier(read_tier(args.name))
        print(json.dumps(data, indent=2) if args.json else tier_text(data))
        return
    tiers = [builtin_tier(name).to_dict() for name in builtin_tier_names()]
    print(json.dumps(tiers, indent=2) if args.json else "\n".join(map(tier_line, tiers)))


def _load(args: argparse.Namespace) -> Engine:
    from edge0_runtime.engine import Engine

    return Engine.load(
        args.model_dir,
        prerouter=args.prerouter,
        lora=args.lora,
        arm=args.arm,
        memory_budget=args.memory_budget,
        io_threads=args.io_threads,
        allow_mismatch=args.allow_mismatch,
        tier_name=args.tier,
    )


def _shower(quiet: bool) -> Any:
    """Prints text as it comes, or nothing."""
    return (lambda _: None) if quiet else (lambda text: print(text, end="", flush=True))


def _ask() -> str | None:
    try:
        return input("> ")
    except EOFError:
        return None


# -- arguments ---------------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    description, _, epilog = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        "edge0_runtime", None, description, epilog, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Any, help: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=help, description=help)
        sub.set_defaults(run=run)
        return sub

    generate = command("generate", _generate, "continue a text")
    _add_engine_options(generate)
    prompt = generate.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help="raw text, without the chat template")
    prompt.add_argument("--prompt-ids", type=_ids, metavar="1,2,3", help="token ids")
    generate.add_argument("--max-tokens", type=int, default=128, metavar="N")
    generate.add_argument("--temperature", type=float, default=0.0, help="default 0: the most likely token")
    generate.add_argument("--top-p", type=float, default=1.0)
    generate.add_argument("--seed", type=int, help="of the sampling; drawn if left out")
    generate.add_argument("--ignore-eos", action="store_true", help="go on after an end token")
    generate.add_argument("--json", action="store_true", help="one object with ids, text, usage and timings")
    generate.add_argument(
        "--trace", type=Path, metavar="FILE", help="write the executed experts of every step as JSON lines"
    )

    chat = command("chat", _chat, "talk to the model in its chat template")
    _add_engine_options(chat)
    chat.add_argument("--prompt", metavar="TEXT", help="one question, one answer, no conversation")
    chat.add_argument("--max-tokens", type=int, metavar="N", help="of one answer; default: what the context holds")
    chat.add_argument("--temperature", type=float, help="default: the model's generation_config.json, else 1")
    chat.add_argument("--top-p", type=float, help="default: the model's generation_config.json, else 1")
    chat.add_argument("--seed", type=int, help="of the sampling; drawn if left out")
    chat.add_argument("--json", action="store_true", help="with --prompt: one object, as from generate")

    serve = command("serve", _serve, "serve OpenAI's chat API over HTTP")
    _add_engine_options(serve)
    serve.add_argument("--host", default="127.0.0.1", help="another one needs an API key in EDGE0_API_KEY")
    serve.add_argument("--port", type=int, default=8080)

    verify = command("verify", _verify, "check that the directory serves as it was trained")
    _add_engine_options(verify)
    verify.add_argument("--json", action="store_true")

    bench = command("bench", _bench, "measure speed and memory")
    _add_engine_options(bench)
    bench.add_argument("--prompt", action="append", metavar="TEXT", help="may be repeated; default: two questions")
    bench.add_argument("--max-tokens", type=int, default=64, metavar="N")
    bench.add_argument(
        "--arms",
        type=_arms,
        metavar="A,B",
        help="compare these on the same tokens, there and back; the last is the measure",
    )
    bench.add_argument("--rounds", type=int, default=2, metavar="N", help="with --arms: times there and back")
    bench.add_argument(
        "--page-cache", choices=("keep", "run", "token"), default="keep",
        help="with --arms: leave it, or drop the experts' files before each run or each token",
    )  # fmt: skip
    bench.add_argument("--json", action="store_true", help="one JSON line per prompt")

    doctor = command("doctor", _doctor, "what this machine and its disk give the engine; loads no weights")
    _add_directory(doctor)
    doctor.add_argument("--read-mib", type=float, default=256, metavar="N", help="experts read at every depth")
    doctor.add_argument("--json", action="store_true")

    inspect = command("inspect", _inspect, "contract and provenance of a model directory; loads no weights")
    _add_directory(inspect)
    inspect.add_argument("--json", action="store_true")

    tiers = command("tiers", _tiers, "the built-in tiers, or all tensors of one")
    tiers.add_argument("name", nargs="?", metavar="NAME", help="a built-in tier, or a file ending in .yaml")
    tiers.add_argument("--json", action="store_true")
    return parser


def _add_directory(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model_dir", type=Path, metavar="MODEL_DIR", help="int4 base, tokenizer and adapter files")
    parser.add_argument("--tier", metavar="NAME", help="which adapter files, if the directory holds several or none")


def _add_engine_options(parser: argparse.ArgumentParser) -> None:
    _add_directory(parser)
    parser.add_argument("--no-prerouter", dest="prerouter", action="store_false", help="layers keep their own gates")
    parser.add_argument("--no-lora", dest="lora", action="store_false", help="serve without the recovery LoRA")
    parser.add_argument(
        "--memory-budget",
        type=float,
        metavar="GIB",
        help="for weights, adapters, activations and experts; default: a quarter of the machine's",
    )
    parser.add_argument(
        "--arm", choices=ARMS, help="how experts are routed and read, to be measured against each other"
    )
    parser.add_argument(
        "--io-threads", type=int, default=IO_THREADS, metavar="N", help="that read experts (default %(default)s)"
    )
    parser.add_argument("--allow-mismatch", action="store_true", help="serve files that were not made together")


def _arms(text: str) -> list[str]:
    arms = text.split(",")
    if unknown := [arm for arm in arms if arm not in ARMS]:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: choose of {', '.join(ARMS)}")
    return arms


def _ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as problem:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of token ids such as 1,2,3") from problem
