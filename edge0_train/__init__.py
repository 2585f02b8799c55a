"""Training for streamed mixture-of-experts models: prerouter heads and recovery LoRA (arXiv 2609.18063).

`python -m edge0_train phase=<name> tier=<name>`; see `cli.py`. The student path is `edge0_train.student`, the frozen base
`edge0_train.base`.
"""
