"""The base checkpoint of a model directory: which tensors lie where, checked before anything is loaded.

mlx-lm loads whatever `model*.safetensors` it finds: a stale shard shows up as wrong text, not as an error.
"""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import io
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge0_runtime.contract.base_config import mathematical_fields
from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.files import (
    MAX_INDEX,
    MAX_JSON,
    open_regular,
    raise_problems,
    read_bytes,
    read_exact,
    read_json,
    sha256_file,
    shown,
)
from edge0_runtime.contract.model_files import COPY, present, read_optional, text_config
from edge0_runtime.contract.strict_safetensors import Header, TensorEntry, read_header
from edge0_runtime.contract.tier import Tier

SHARD_PATTERN = "model*.safetensors"  # mlx-lm's own; leaves out the adapters and macOS's `._model*` companions
INDEX_NAME = "model.safetensors.index.json"
FINGERPRINT_EDGE_BYTES = 4096


@dataclass(frozen=True)
class BaseIdentity:
    """What adapters are bound to.

    Attributes:
        fingerprint: `Checkpoint.fingerprint()`.
        config: `mathematical_fields` of the base's config.json.
    """

    fingerprint: str
    config: Mapping[str, Any]


@dataclass(frozen=True)
class Checkpoint:
    """A base checkpoint whose shards are complete and agree with the index.

    Attributes:
        directory: the model directory.
        config: the parsed config.json.
        entries: {tensor name: (header of its shard, its entry)}.
    """

    directory: Path
    config: dict[str, Any]
    entries: dict[str, tuple[Header, TensorEntry]]

    @classmethod
    def open(cls, directory: str | Path) -> Checkpoint:
        """Read config.json, the index if there is one, and all shards' headers; no tensor is read.

        Raises one Edge0Error that lists everything wrong with the directory: config.json missing; a shard
        missing, truncated, or not a safetensors file; a tensor that the index and the shards disagree about,
        or that lies in two shards. Adapter files, and macOS companions beside real shards, are left out.
        """
        directory = Path(directory)
        if not directory.is_dir():
            raise Edge0Error(f"{directory}: not a directory; give the directory that holds config.json and the shards")
        problems: list[str] = []
        config = _object(directory / "config.json", problems)
        headers: dict[str, Header] = {}
        shards = sorted(directory.glob(SHARD_PATTERN))
        for shard in shards:
            try:
                headers[shard.name] = read_header(shard)
            except Edge0Error as error:
                problems.append(str(error).replace("\n", "\n    "))
        if not shards:
            companions = sorted(path.name for path in directory.glob("._" + SHARD_PATTERN))
            problems.append(
                f"no {SHARD_PATTERN} in it"
                + (f"; {', '.join(companions)}: macOS companion files, not shards" if companions else "")
            )
        entries: dict[str, tuple[Header, TensorEntry]] = {}
        for header in headers.values():
            for name, entry in header.entries.items():
                if name in entries:
                    problems.append(
                        f"tensor {name} lies in two shards: {entries[name][0].path.name}, {header.path.name}"
                    )
                entries[name] = (header, entry)
        found = {shard.name for shard in shards}
        if present(directory / INDEX_NAME):
            index = _object(directory / INDEX_NAME, problems, MAX_INDEX)
            if index is not None:
                problems += _index_problems(index.get("weight_map"), found, headers)
        else:
            problems += _numbering_problems(found)
        raise_problems(
            f"{directory}: not a complete checkpoint",
            problems,
            "download the files again, or delete stale ones",
        )
        return cls(directory, config or {}, entries)

    def fingerprint(self) -> str:
        """sha256 (64 hexadecimal digits) that names this base; adapters are bound to it.

        Made of every tensor's name, dtype, shape, first 4096 and last 4096 bytes, in the order of names, and
        of config["quantization"]: a few MiB are read, whatever the checkpoint's size. It does not depend on
        how the tensors are spread over shards, nor on the shards' metadata.

        It detects another model, another quantisation, a retrained, renamed, reshaped, added or dropped
        tensor. It does not detect a change confined to the middle of tensors over 8192 bytes (a flipped bit,
        a merged LoRA whose deltas leave both ends alone), nor one in the rest of config.json or in the
        tokenizer (see `identity`, `tokenizer_hash`). The same values under other names are another base.
        """
        digest = hashlib.sha256()
        quantization = self.config.get("quantization")
        digest.update(json.dumps(quantization, sort_keys=True, separators=(",", ":")).encode() + b"\n")
        with contextlib.ExitStack() as stack:
            files: dict[Path, io.FileIO] = {}
            for name, (header, entry) in sorted(self.entries.items()):
                if header.path not in files:
                    files[header.path] = stack.enter_context(open_regular(header.path))
                digest.update(json.dumps([name, entry.dtype, entry.shape]).encode() + b"\n")
                length = min(FINGERPRINT_EDGE_BYTES, entry.end - entry.start)
                for offset in (entry.start, entry.end - length):
                    edge = bytearray(length)
                    read_exact(files[header.path], header.path, offset, memoryview(edge))
                    digest.update(edge)
        return digest.hexdigest()

    def identity(self) -> BaseIdentity:
        """Fingerprint, and the fields of config.json that decide what the tensors compute."""
        return BaseIdentity(self.fingerprint(), mathematical_fields(self.config))

    def tokenizer_hash(self) -> str:
        """sha256 of tokenizer.json. Raises Edge0Error if it is missing."""
        return sha256_file(self.directory / "tokenizer.json")

    def template_hash(self) -> str | None:
        """sha256 of the chat template, or None if there is none.

        It lies in chat_template.jinja, or else in tokenizer_config.json; a text has the same hash in both.
        """
        path = self.directory / "chat_template.jinja"
        if present(path):
            return hashlib.sha256(read_bytes(path)).hexdigest()
        template = read_optional(self.directory / "tokenizer_config.json").get("chat_template")
        if template is None:
            return None
        text = template if isinstance(template, str) else json.dumps(template, sort_keys=True)  # a list of named ones
        return hashlib.sha256(text.encode("utf-8")).hexdigest()

    def text_config(self) -> dict[str, Any]:
        """The language model's part of config.json: `text_config`, or all of it."""
        return text_config(self.config)

    def check_architecture(self, tier: Tier) -> None:
        """Raise one Edge0Error listing every field that config.json has otherwise than the tier (`differences`)."""
        raise_problems(
            f"{self.directory}: not the base of tier {tier.name} ({tier.model})",
            self.differences(tier).values(),
            "choose the matching tier or base",
        )

    def differences(self, tier: Tier) -> dict[str, str]:
        """{field: sentence} of every field that config.json has otherwise than the tier.

        The fields are those of `tier.architecture`, and of its router where config.json decides how the
        layers' own gates choose (sigmoid_group).
        """
        config, layout = self.text_config(), tier.layout
        wanted = dict.fromkeys(layout.optional) | dict(tier.architecture)
        found = {}
        if tier.router.kind == layout.router_kind:
            wanted |= {field: getattr(tier.router, name) for name, (field, _) in layout.router_fields.items()}
        else:
            found["router.kind"] = (
                f"router.kind: tier {tier.name} has {tier.router.kind}, {tier.family} routes otherwise"
            )
        if layout.renormalises in config:
            wanted[layout.renormalises] = tier.router.renormalise
        for field, expected in wanted.items():
            actual = layout.config_value(config, field, None if field in layout.optional else "nothing")
            if field in layout.derived:
                actual = layout.derived[field](config, actual)
            if actual != expected:
                actual = actual if isinstance(actual, str) else shown(actual)
                found[field] = f"{field}: tier {tier.name} has {expected}, config.json has {actual}"
        return found


def _object(path: Path, problems: list[str], at_most: int = MAX_JSON) -> dict[str, Any] | None:
    """The JSON object in `path`, or None with a problem added."""
    if not present(path):
        problems.append(f"{path.name} is missing")
        return None
    try:
        return read_json(path, COPY, at_most)
    except Edge0Error as error:
        problems.append(str(error))
        return None


def _index_problems(weight_map: Any, found: set[str], headers: Mapping[str, Header]) -> list[str]:
    """How index and shards disagree; `headers` lacks unreadable shards, which are reported already."""
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        return [f"{INDEX_NAME}: weight_map must map tensor names to shard names"]
    problems = []
    named = set(weight_map.values())
    for shard in sorted(named - found):
        if "/" in shard or not fnmatch.fnmatchcase(shard, SHARD_PATTERN):
            problems.append(f"{INDEX_NAME}: names shard {shard!r}, which is not a {SHARD_PATTERN} of this directory")
        else:
            problems.append(f"{INDEX_NAME}: names shard {shard}, which is missing")
    for shard in sorted(found - named):
        problems.append(f"shard {shard} is not named by {INDEX_NAME}; a stale file or a stale index")
    for name, shard in weight_map.items():
        if shard in headers and name not in headers[shard].entries:
            problems.append(f"{INDEX_NAME}: tensor {name} is not in its shard {shard}")
    for shard in sorted(headers.keys() & named):
        for name in headers[shard].entries:
            if weight_map.get(name) != shard:
                says = f"puts it in {weight_map[name]}" if name in weight_map else "does not name it"
                problems.append(f"tensor {name} is in shard {shard}, but {INDEX_NAME} {says}")
    return problems


def _numbering_problems(found: set[str]) -> list[str]:
    """Without an index: shards that the others' names (`model-00001-of-00003`) say should be there."""
    problems = []
    for stem, count in {match.groups() for name in found if (match := re.fullmatch(r"(.*)-\d{5}-of-(\d{5}).*", name))}:
        expected = {f"{stem}-{n:05d}-of-{count}.safetensors" for n in range(1, int(count) + 1)}
        problems += [f"shard {name} is missing" for name in sorted(expected - found)]
    return sorted(problems)
