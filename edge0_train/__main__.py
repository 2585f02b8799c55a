"""`python -m edge0_train`: the command line of `edge0_train.cli`."""

from edge0_train.cli import main

main()
