"""The main job on the embedded nano tier: train, export, verify, chat, and one table at the end.

    make quickstart            (or: python scripts/quickstart.py [root])

A second call continues where the first one stopped; delete the root (runs/quickstart) to start over.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from pathlib import Path

from edge0_train.report import table

PROMPTS = ("Add 348 and 275.", "Zoe has 4 bags of 6 pens, gives 5. How many?")


def call(*arguments: str, capture: bool = False) -> subprocess.CompletedProcess[str]:
    """Run `python -m <arguments>` as a user would; show it first; stop at the first failure."""
    command = (sys.executable, "-m", *arguments)
    print(f"\n$ {shlex.join(('python', *command[1:]))}", flush=True)
    return subprocess.run(command, check=not capture, text=True, stdout=subprocess.PIPE if capture else None)


def main() -> None:
    """Entry point; exit code 1 where what is served is not what was trained."""
    root = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/quickstart")
    began = time.time()
    call("edge0_train", "phase=all", "tier=nano", f"root={root}", "resume=true")
    model = str(root / "model")
    verified = call("edge0_runtime", "verify", model, "--json", capture=True)
    report = json.loads(verified.stdout)
    for prompt in PROMPTS:
        call("edge0_runtime", "chat", model, "--prompt", prompt, "--temperature", "0")

    done = sorted(root.glob("*/done.json"), key=lambda path: path.stat().st_mtime)
    phases = {path.parent.name: json.loads(path.read_text(encoding="utf-8")) for path in done}
    print(
        f"\nQuality on {phases['evaluate']['rows']} held-out problems (bf16 teacher with K=8, int4 student with K=4):"
    )
    print(phases["evaluate"]["text"])
    print("\nTime and memory:")
    print(table(["phase", "seconds", "peak MiB"], [[n, p["seconds"], p["peak_rss_mib"]] for n, p in phases.items()]))
    print(f"\nserved equals trained: {'yes' if report['ok'] else 'NO'}  (edge0_runtime verify {model})")
    print(f"total: {time.time() - began:.0f} s")
    sys.exit(0 if report["ok"] else 1)


if __name__ == "__main__":
    main()
