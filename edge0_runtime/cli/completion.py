"""edge0_runtime completion: Tab completes commands, options and their choices, by argcomplete."""

from __future__ import annotations

import argparse

HELP = "print what a shell needs so that Tab completes this command"
EXAMPLES = """\
eval "$(edge0_runtime completion bash)"                          # now; for good, in ~/.bashrc
eval "$(edge0_runtime completion zsh)"                           # in ~/.zshrc, below compinit
edge0_runtime completion fish > ~/.config/fish/completions/edge0_runtime.fish"""
SHELLS = ("bash", "zsh", "fish")
ASKED = "_ARGCOMPLETE"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which shell."""
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help=", ".join(SHELLS))


def run(args: argparse.Namespace) -> None:
    """Print the shell's code."""
    from argcomplete.shell_integration import shellcode

    print(shellcode(["edge0_runtime"], shell=args.shell))


def answer(parser: argparse.ArgumentParser) -> None:
    """Say to the shell what may follow what has been typed; doesn't return where a shell has asked."""
    import argcomplete

    argcomplete.autocomplete(parser)
