"""Model directories by their name on the Hugging Face Hub, `ORG/NAME` or `ORG/NAME@REVISION`, and what may go wrong there.

huggingface_hub does the work: its cache holds what was fetched, what was interrupted goes on where it stopped, and offline the
cache alone is asked. Its library is imported when a name is looked up, and nowhere else.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from edge0_runtime.contract.artifacts import KINDS
from edge0_runtime.contract.checkpoint import INDEX_NAME, SHARD_PATTERN
from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.files import one_line
from edge0_runtime.contract.model_files import OPENED

ID = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?:@([\w./-]+))?")
"""(repository, revision); a path that begins with `/`, `.` or `~` is none."""
ADAPTERS = tuple(f"{kind}_edge0_*.safetensors" for kind in (*KINDS, "verify"))
"""The files of a training: heads, LoRA, and the traces that `verify` replays."""
MODEL = ("config.json", INDEX_NAME, SHARD_PATTERN, *OPENED, *ADAPTERS)
"""All that a model directory is served from. Nothing else is fetched, so no code of a stranger's."""
log = logging.getLogger(__name__)


def directory_of(name: str) -> Path:
    """The model directory that a user names: a path, or a repository on the Hub.

    A directory that is there is taken as it is. Of a repository all that is missing in the cache is fetched, with progress on
    stderr. Raises Edge0Error where it can't be, or isn't there.
    """
    return _directory(name, MODEL)


def adapters_of(name: str) -> Path:
    """The same for a directory or repository that holds adapter files; of a repository nothing else is fetched."""
    return _directory(name, ADAPTERS)


def _directory(name: str, files: tuple[str, ...]) -> Path:
    found = ID.fullmatch(name)
    if Path(name).exists() or found is None:
        return Path(name)
    from huggingface_hub import snapshot_download

    with explained(found[1], found[2], "not a directory here"):
        directory = Path(snapshot_download(found[1], revision=found[2], allow_patterns=list(files)))
    log.info("%s: revision %s, in %s", name, directory.name, directory)
    return directory


@contextmanager
def explained(repo: str, revision: str | None, absent: str) -> Iterator[None]:
    """What may go wrong between here and the Hub, as a sentence; `absent` says what the name isn't here either."""
    from huggingface_hub import constants, errors

    at = f"{repo}@{revision}" if revision else repo
    try:
        yield
    except errors.OfflineModeIsEnabled as error:
        raise Edge0Error(
            f"{at}: {absent}, and HF_HUB_OFFLINE forbids asking the Hub; unset it, or give a directory"
        ) from error
    except errors.IncompleteSnapshotError as error:
        raise Edge0Error(
            f"{at}: only a part of it has been fetched, and the Hub can't be asked for the rest; run the command again online"
            " (HF_HUB_OFFLINE unset): it goes on where it stopped"
        ) from error
    except errors.LocalEntryNotFoundError as error:
        why = "HF_HUB_OFFLINE is set" if constants.is_offline_mode() else "the Hub can't be reached"
        raise Edge0Error(
            f"{at}: {absent}, not in the Hub's cache ({constants.HF_HUB_CACHE}), and {why}; fetch it online, or give a directory"
        ) from error
    except errors.GatedRepoError as error:
        raise Edge0Error(f"{at}: its owner wants to be asked first; do so on its page, then `hf auth login`") from error
    except errors.RevisionNotFoundError as error:
        raise Edge0Error(f"{at}: the Hub has no such revision; leave out @{revision} for the newest") from error
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise Edge0Error(f"{at}: {absent}, and not on the Hub or private; correct it, or `hf auth login`") from error
    except errors.HTTPError as error:
        raise Edge0Error(
            f"{at}: {absent}, and the Hub can't be asked: {one_line(error)}; try again, or give a directory"
        ) from error
