"""What training and serving agree on: tiers, the decode timeline, and the files that pass between them.

Needs only NumPy, PyYAML and the standard library; neither torch nor MLX.

Shape letters: T steps or input tokens, P prompt tokens, L MoE layers, K experts per token, N top logits.
"""

from edge0_runtime.contract.artifacts import FORMAT_VERSION, Adapter, read_adapter, write_adapter
from edge0_runtime.contract.binding import check_binding
from edge0_runtime.contract.checkpoint import BaseIdentity, Checkpoint
from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.families import Family, family
from edge0_runtime.contract.files import atomic_replace, sha256_file
from edge0_runtime.contract.provenance import DataSource, PhaseRecord, Provenance, Teacher
from edge0_runtime.contract.public_runtime import upstream_base_problems, upstream_problems
from edge0_runtime.contract.strict_safetensors import (
    Header,
    TensorEntry,
    read_array,
    read_header,
    write_atomic,
)
from edge0_runtime.contract.tier import Lora, Router, Tier, builtin_tier, builtin_tier_names
from edge0_runtime.contract.timeline import predicted_mask, previous_valid_mask
from edge0_runtime.contract.traces import PromptTrace, ReferenceTrace, read_trace, write_trace

__all__ = [
    "FORMAT_VERSION",
    "Adapter",
    "BaseIdentity",
    "Checkpoint",
    "DataSource",
    "Edge0Error",
    "Family",
    "Header",
    "Lora",
    "PhaseRecord",
    "PromptTrace",
    "Provenance",
    "ReferenceTrace",
    "Router",
    "Teacher",
    "TensorEntry",
    "Tier",
    "atomic_replace",
    "builtin_tier",
    "builtin_tier_names",
    "check_binding",
    "family",
    "predicted_mask",
    "previous_valid_mask",
    "read_adapter",
    "read_array",
    "read_header",
    "read_trace",
    "sha256_file",
    "upstream_base_problems",
    "upstream_problems",
    "write_adapter",
    "write_atomic",
    "write_trace",
]
