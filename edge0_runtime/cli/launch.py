"""edge0_runtime launch: how other programs find the server. It prints what to set, and never writes a file of theirs."""

from __future__ import annotations

import argparse
import json
import os
from string import Template
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.files import one_line, printable, strict_json

HELP = "print how another program finds the server; changes nothing"
EXAMPLES = """\
edge0_runtime launch                                  # the programs that it knows
edge0_runtime launch aider                            # asks the running server what it serves
edge0_runtime launch zed --model edge0-nano --url http://127.0.0.1:8080"""
KEY_VARIABLE = "EDGE0_API_KEY"
ANSWER_S = 5.0
MAX_ANSWER = 2**20


class Tool(NamedTuple):
    """A program: where its settings belong, and what they are.

    In `text` $url is the server's, $base the same with /v1, $model what it serves, $key the API key or what stands for it.
    """

    where: str
    text: str


TOOLS = {
    "curl": Tool(
        "a shell",
        """\
curl $base/chat/completions -H "Content-Type: application/json" -H "Authorization: Bearer $key" \\
  -d '{"model": "$model", "messages": [{"role": "user", "content": "Hello"}]}'""",
    ),
    "openai": Tool(
        "Python, with the package openai",
        """\
from openai import OpenAI
client = OpenAI(base_url="$base", api_key="$key")
client.chat.completions.create(model="$model", messages=[{"role": "user", "content": "Hello"}])""",
    ),
    "anthropic": Tool(
        "Python, with the package anthropic (its base URL has no /v1)",
        """\
from anthropic import Anthropic
client = Anthropic(base_url="$url", api_key="$key")
client.messages.create(model="$model", max_tokens=256, messages=[{"role": "user", "content": "Hello"}])""",
    ),
    "langchain": Tool(
        "Python, with the package langchain-openai",
        """\
from langchain_openai import ChatOpenAI
ChatOpenAI(base_url="$base", api_key="$key", model="$model").invoke("Hello")""",
    ),
    "litellm": Tool(
        "Python, with the package litellm; or the same three in its proxy's config.yaml",
        """\
import litellm
litellm.completion(
    model="openai/$model", api_base="$base", api_key="$key", messages=[{"role": "user", "content": "Hello"}]
)""",
    ),
    "llm": Tool(
        "extra-openai-models.yaml in the folder of `llm logs path`; then `llm -m edge0 Hello`",
        """\
- model_id: edge0
  model_name: $model
  api_base: $base
  # where the server has an API key, `llm keys set edge0`, and:
  # api_key_name: edge0""",
    ),
    "open-webui": Tool(
        "the environment of Open WebUI, or Admin Settings > Connections > OpenAI. In a container 127.0.0.1 is the container:"
        " serve with --host and an API key, and write this machine's address",
        """\
OPENAI_API_BASE_URL=$base
OPENAI_API_KEY=$key""",
    ),
    "continue": Tool(
        "config.yaml of Continue, below `models:`",
        """\
- name: edge0
  provider: openai
  model: $model
  apiBase: $base
  apiKey: $key
  roles: [chat, edit, apply]""",
    ),
    "aider": Tool(
        "a shell",
        """\
export OPENAI_API_BASE=$base
export OPENAI_API_KEY=$key
aider --model openai/$model""",
    ),
    "zed": Tool(
        "settings.json of Zed; it takes the key from the environment variable EDGE0_API_KEY, or asks for it",
        """\
"language_models": {
  "openai_compatible": {
    "edge0": {
      "api_url": "$base",
      "available_models": [{"name": "$model", "display_name": "edge0", "max_tokens": 4096}]
    }
  }
}""",
    ),
    "cursor": Tool(
        "Settings > Models of Cursor. Its own servers send the requests, so they must reach yours: not a loopback address",
        """\
Override OpenAI Base URL: $base
OpenAI API Key: $key
Add model: $model""",
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which program, and which server it is to find."""
    parser.add_argument("tool", nargs="?", choices=TOOLS, metavar="TOOL", help=", ".join(TOOLS))
    parser.add_argument("--url", default="http://127.0.0.1:8080", help="of the server (default %(default)s)")
    parser.add_argument(
        "--model", metavar="NAME", help="what to ask for; default: the first that the running server has"
    )
    parser.add_argument("--json", action="store_true", help="one object: where, settings, base_url, model")


def run(args: argparse.Namespace) -> None:
    """Print one program's settings, or without one the programs that are known. Raises Edge0Error where no server answers."""
    if args.tool is None:
        rows = {name: tool.where for name, tool in TOOLS.items()}
        print(
            json.dumps(rows, indent=2) if args.json else "\n".join(f"{name:<12}{where}" for name, where in rows.items())
        )
        return
    url = _checked(args.url)
    model = printable(args.model or _first_model(url))
    key = f"<the value of {KEY_VARIABLE}>" if os.environ.get(KEY_VARIABLE) else "none-needed"
    tool = TOOLS[args.tool]
    values = {"url": url, "base": f"{url}/v1", "model": model, "key": key}
    settings = Template(tool.text).substitute(values)
    if args.json:
        print(json.dumps({"where": tool.where, "settings": settings, "base_url": values["base"], "model": model}))
    else:
        print(f"In {tool.where}:\n\n{settings}")


def _checked(url: str) -> str:
    """Without a slash or /v1 at the end. Raises Edge0Error where it is no address of a server."""
    try:
        parts = urlsplit(url)
        found = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        found = False
    if not found:
        raise Edge0Error(f"--url {url}: is no address of a server; write it like http://127.0.0.1:8080")
    return url.rstrip("/").removesuffix("/v1")


def _first_model(url: str) -> str:
    import urllib.error
    import urllib.request

    request = urllib.request.Request(f"{url}/v1/models")
    if key := os.environ.get(KEY_VARIABLE):
        request.add_header("Authorization", f"Bearer {key}")
    try:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # it is a server of the user's own
        with opener.open(request, timeout=ANSWER_S) as response:
            answer: Any = strict_json(response.read(MAX_ANSWER))
        return str(answer["data"][0]["id"])
    except urllib.error.HTTPError as error:
        fix = f"set {KEY_VARIABLE} to its API key" if error.code == 401 else "is it another program's server?"
        raise Edge0Error(f"--url {url}: answers /v1/models with {error.code}; {fix}") from error
    except (OSError, ValueError, LookupError, TypeError) as error:
        reason = getattr(error, "reason", None)
        told = one_line(reason if isinstance(reason, BaseException) else error)
        raise Edge0Error(
            f"--url {url}: no server says there what it serves ({told}); start `edge0_runtime serve`, or give --model NAME"
        ) from error
