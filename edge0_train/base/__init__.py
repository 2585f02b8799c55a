"""The frozen base: an int4 MLX checkpoint, read into transformers' classes, or made from them.

    load_base             checkpoint directory + tier -> frozen transformers model and a report
    load_teacher          transformers directory -> frozen transformers model
    quantize_checkpoint   transformers directory -> int4 MLX directory, bit for bit mlx-lm's
    transformers_module   module path in MLX names -> in transformers' names; mlx_module is the way back
    WeightSource          where tensors come from, module by module: the seam for packed and streamed storage

`affine.py` is MLX's quantisation in torch, `links.py` what a family's table of names does to tensors, `weights.py` the strict
reader between them.
"""

from edge0_train.base.load import BaseReport, ModelSize, describe, load_base, load_teacher
from edge0_train.base.names import mlx_module, transformers_module
from edge0_train.base.quantize_model import quantize_checkpoint
from edge0_train.base.weights import MlxWeights, WeightSource

__all__ = [
    "BaseReport",
    "MlxWeights",
    "ModelSize",
    "WeightSource",
    "describe",
    "load_base",
    "load_teacher",
    "mlx_module",
    "quantize_checkpoint",
    "transformers_module",
]
