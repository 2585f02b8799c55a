"""phase=head_refine: heads trained further on the features that their own routing produces; see `head_distill`.

python -m edge0_train phase=head_refine tier=35b
"""

from __future__ import annotations

from typing import Any

from edge0_train.config import Config
from edge0_train.phases.head_distill import head_distill
from edge0_train.run import Run


def head_refine(config: Config, run: Run) -> dict[str, Any]:
    """`head_distill`, started from the heads of `inputs.prerouter`."""
    return head_distill(config, run)
