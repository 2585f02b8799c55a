"""A model on the Hugging Face Hub, by its headers alone: the directory that a download would give, with holes for tensors.

config.json, the index and each safetensors file's header are read, some hundred kilobytes by HTTP ranges; nothing is cached.
"""

from __future__ import annotations

import fnmatch
from http import HTTPStatus
from pathlib import Path

from huggingface_hub import HfApi, get_session, hf_hub_url
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

from edge0_runtime.contract.artifacts import KINDS
from edge0_runtime.contract.checkpoint import INDEX_NAME, SHARD_PATTERN
from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.files import MAX_INDEX, MAX_JSON
from edge0_runtime.contract.strict_safetensors import MAX_HEADER_BYTES
from edge0_runtime.hub import explained
from edge0_runtime.measure.outline import write_holes

WHOLE = {"config.json": MAX_JSON, INDEX_NAME: MAX_INDEX}
TENSORS = (SHARD_PATTERN, *(f"{kind}_edge0_*.safetensors" for kind in KINDS))
FIRST_BYTES = 2**17  # holds most headers


def outline_of_hub(repo: str, revision: str | None, directory: Path) -> None:
    """Fill an existing directory with the repository's config.json and index, and its safetensors files as holes.

    Raises Edge0Error: no such repository, not allowed, no network, or a server that sends no ranges.
    """
    with explained(repo, revision, "no such directory or tier"):
        info = HfApi().model_info(repo, revision=revision, files_metadata=True)
        for file in info.siblings or ():
            name, nbytes = file.rfilename, file.size or 0
            if "/" not in name and name in WHOLE:
                (directory / name).write_bytes(_range(repo, info.sha, name, 0, min(nbytes, WHOLE[name] + 1)))
            elif "/" not in name and any(fnmatch.fnmatchcase(name, pattern) for pattern in TENSORS):
                beginning = _range(repo, info.sha, name, 0, min(nbytes, FIRST_BYTES))
                end = 8 + min(int.from_bytes(beginning[:8], "little"), MAX_HEADER_BYTES)
                if len(beginning) < end <= nbytes:
                    beginning += _range(repo, info.sha, name, len(beginning), end)
                write_holes(directory / name, beginning[:end], nbytes)


def _range(repo: str, revision: str | None, name: str, start: int, end: int) -> bytes:
    """Bytes start..end of a file."""
    headers = build_hf_headers() | {"range": f"bytes={start}-{end - 1}", "accept-encoding": "identity"}
    with get_session().stream("GET", hf_hub_url(repo, name, revision=revision), headers=headers) as response:
        hf_raise_for_status(response)
        if response.status_code != HTTPStatus.PARTIAL_CONTENT:  # it would send all of a file that may be large
            raise Edge0Error(f"{repo}/{name}: the server sends no ranges; download the model and give its directory")
        return response.read()
