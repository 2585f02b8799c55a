"""Download a published model directory at a pinned revision, resume where the last try stopped, and verify every file.

    python scripts/fetch_models.py 35b models/35b                       # base and adapters of a tier
    python scripts/fetch_models.py teacher-35b models/Qwen3.6-35B-A3B   # the original, which training starts from
    python scripts/fetch_models.py owner/name models/mine --revision 0123456789abcdef0123456789abcdef01234567

A teacher's revision is not pinned here: the newest commit is asked for once, said, and kept in the directory's revision.txt.
Checked are sizes, the sha256 of all large files, the headers of all shards and adapters, and that the base is the tier's.
"""

from __future__ import annotations

import fnmatch
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from edge0_runtime.contract.artifacts import KINDS, find_adapter
from edge0_runtime.contract.checkpoint import Checkpoint
from edge0_runtime.contract.edge import DEBUG, parser_of, run_command
from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.files import atomic_replace, raise_problems, read_text, sha256_file
from edge0_runtime.contract.tier import builtin_tier, builtin_tier_names

Answer = TypeVar("Answer")
WANTED = ("*.safetensors", "*.json", "*.jinja", "merges.txt")
"""Data only: a repository's Python files are of no use here."""


@dataclass(frozen=True)
class Source:
    """A repository of the Hugging Face hub at one commit (40 hexadecimal digits): what is fetched never changes."""

    repo: str
    revision: str


PUBLISHED = {
    "35b": Source("Edge0/Edge0-35B-A3B-preview", "1ff9f4478890faec0368c5463b621d1036d5b518"),
    "8b": Source("Edge0/Edge0-8B-A1B-preview", "269b9a2c4a69d897c50e9f4e125328481d7c0fcf"),
}
TEACHERS = {"teacher-35b": "Qwen/Qwen3.6-35B-A3B", "teacher-8b": "inclusionAI/Ling-3.0-tiny"}
REVISION = "revision.txt"


class Hub(Protocol):
    """What is used of `huggingface_hub.HfApi`."""

    def model_info(self, repo_id: str, *, revision: str | None = None, files_metadata: bool = False) -> Any:
        """The repository's files in `siblings`, its commit in `sha`."""

    def snapshot_download(self, repo_id: str, *, revision: str, local_dir: str, allow_patterns: list[str]) -> Any:
        """Download what is not there yet."""


@dataclass(frozen=True)
class Expected:
    """A file of the repository; `sha256` is known of files in large-file storage."""

    name: str
    size: int
    sha256: str | None


def fetch(source: Source, directory: Path, hub: Hub, tier_name: str | None = None) -> list[Expected]:
    """Download and verify; returns the files.

    Args:
        tier_name: built-in tier that base and adapters must be of; None takes any checkpoint.

    Raises:
        Edge0Error: the hub cannot be reached, no room, or lists every file that is not what the repository says.
    """
    if not re.fullmatch("[0-9a-f]{40}", source.revision):
        raise Edge0Error(
            f"revision: {source.revision!r} is not a commit of 40 hexadecimal digits; a branch may change under you:"
            " copy the commit from the repository's history"
        )
    files = _ask(source, lambda: _listing(hub, source))
    missing = sum(file.size for file in files if not (directory / file.name).is_file())
    directory.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(directory).free
    if free < missing:
        raise Edge0Error(
            f"{directory}: {missing} bytes are to be downloaded, {free} are free; free some or name another"
        )
    names = [file.name for file in files]
    _ask(
        source,
        lambda: hub.snapshot_download(
            source.repo, revision=source.revision, local_dir=str(directory), allow_patterns=names
        ),
    )
    verify(directory, files)
    check_contents(directory, tier_name)
    return files


def newest(repo: str, directory: Path, hub: Hub) -> Source:
    """The newest commit of a repository; of a download that has begun, the one that it began with."""
    file = directory / REVISION
    if file.is_file():
        return Source(repo, read_text(file).strip())
    source = Source(repo, "newest")
    found = _ask(source, lambda: hub.model_info(repo))
    directory.mkdir(parents=True, exist_ok=True)
    with atomic_replace(file) as temporary:
        temporary.write_text(f"{found.sha}\n", encoding="utf-8")
    return Source(repo, found.sha)


def _listing(hub: Hub, source: Source) -> list[Expected]:
    siblings = hub.model_info(source.repo, revision=source.revision, files_metadata=True).siblings
    wanted = [s for s in siblings if any(fnmatch.fnmatch(s.rfilename, pattern) for pattern in WANTED)]
    return [Expected(s.rfilename, s.size, s.lfs.sha256 if s.lfs else None) for s in wanted]


def _ask(source: Source, request: Callable[[], Answer]) -> Answer:
    import httpx
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return request()
    except (HfHubHTTPError, httpx.HTTPError, OSError) as problem:
        reason = str(problem).strip().splitlines()[0] if str(problem).strip() else type(problem).__name__
        raise Edge0Error(
            f"{source.repo}: the Hugging Face hub did not answer ({reason}); check the network, HF_HUB_OFFLINE and, for a"
            " gated repository, HF_TOKEN; then run the command again: what has arrived is kept"
        ) from problem


def verify(directory: Path, files: list[Expected]) -> None:
    """Raise one Edge0Error that lists every file that is missing, of another size or of another content."""
    problems = []
    for file in files:
        path = directory / file.name
        if not path.is_file():
            problems.append(f"{file.name}: missing")
        elif path.stat().st_size != file.size:
            problems.append(f"{file.name}: {path.stat().st_size} bytes, the repository has {file.size}")
        elif file.sha256 and (found := sha256_file(path)) != file.sha256:
            problems.append(f"{file.name}: sha256 {found}, the repository has {file.sha256}")
    raise_problems(f"{directory}: not what was published", problems, "delete the named files and run the command again")


def check_contents(directory: Path, tier_name: str | None) -> None:
    """Strict headers of shards, index and adapters. Raises Edge0Error."""
    checkpoint = Checkpoint.open(directory)
    if tier_name is not None:
        checkpoint.check_architecture(builtin_tier(tier_name))
        for kind in KINDS:
            if find_adapter(directory, kind, tier_name) is None:
                raise Edge0Error(f"{directory}: has no {kind} file of tier {tier_name}; fetch the published revision")


def main() -> None:
    """Entry point; exits with the codes of `edge0_runtime.contract.edge`, and returns when all is there."""
    parser = parser_of(__doc__)
    parser.add_argument(
        "what", help=f"{' | '.join((*PUBLISHED, *TEACHERS))} | owner/name of a repository, with --revision"
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("--revision", metavar="COMMIT", help="default: the pinned one; of a teacher, the newest")
    parser.add_argument(DEBUG, action="store_true", help="print the traceback of an error")
    args = parser.parse_args()
    code = run_command(lambda: run(args.what, args.directory, args.revision), debug=args.debug)
    if code:
        sys.exit(code)


def run(what: str, directory: Path, revision: str | None) -> None:
    """Fetch `what`, and say what has come. Raises Edge0Error as `fetch`, and for a name that is not known."""
    known = PUBLISHED.get(what)
    if not known and what not in TEACHERS and not (revision and "/" in what):
        raise Edge0Error(
            f"{what!r}: choose one of {', '.join((*PUBLISHED, *TEACHERS))}, or give owner/name with --revision COMMIT"
        )
    from huggingface_hub import HfApi

    if known or revision:
        repo = known.repo if known else TEACHERS.get(what, what)
        source = Source(repo, revision or (known.revision if known else ""))
    else:
        source = newest(TEACHERS[what], directory, HfApi())
    # A tier that has no built-in description yet is fetched and verified all the same.
    tier_name = what if known and what in builtin_tier_names() else None
    files = fetch(source, directory, HfApi(), tier_name)
    size = sum(file.size for file in files)
    hashed = sum(1 for file in files if file.sha256)
    print(f"{directory}: {len(files)} files, {size} B of {source.repo} at {source.revision}; {hashed} by sha256")


if __name__ == "__main__":
    main()
