"""The whole way on the nano tier: train, export, serve; what is served is what was trained."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import matplotlib
import pytest

from edge0_runtime.contract.artifacts import read_adapter, write_adapter
from edge0_runtime.contract.traces import read_trace
from edge0_runtime.engine import Engine
from edge0_runtime.measure.verify import verify
from tests.e2e.conftest import SMALL, STEPS, Cli


def test_export_serves_exactly_as_trained(chain: Path) -> None:
    """Eight prompts of 128 greedy tokens: ids and expert sets of every step and layer equal torch's."""
    model = chain / "model"
    trace = read_trace(model / "verify_edge0_nano.safetensors")
    assert [prompt.generated_ids_T.size for prompt in trace.prompts] == [128] * 8
    with Engine.load(model) as engine:
        report = verify(engine, trace)
    assert report.ok, report.problems()


def test_adapters_carry_contract_and_lineage(chain: Path) -> None:
    heads = read_adapter(chain / "model" / "prerouter_edge0_nano.safetensors", "prerouter")
    lora = read_adapter(chain / "model" / "lora_edge0_nano.safetensors", "lora")
    assert heads.provenance and lora.provenance
    assert [record.phase for record in heads.provenance.phases] == ["head_distill", "head_refine", "student_sft"]
    assert [record.phase for record in lora.provenance.phases] == [*STEPS]
    assert lora.provenance.prerouter_sha256 == heads.sha256
    assert lora.provenance.base_fingerprint == heads.provenance.base_fingerprint
    for record in (*heads.provenance.phases, *lora.provenance.phases):
        assert not record.run_id.startswith("/")


def test_training_moves_the_student_towards_the_teacher(chain: Path) -> None:
    """Even this short: trained heads beat untrained ones, and the LoRA beats heads alone."""
    rows = {row["stage"]: row for row in json.loads((chain / "evaluate" / "done.json").read_text())["table"]}
    assert rows["untrained heads"]["kl"] > 1.3 * rows["heads only"]["kl"]
    assert rows["heads only"]["kl"] > rows["+ SFT"]["kl"]
    assert rows["+ on-policy"]["kl"] < 1.2 * rows["+ SFT"]["kl"]
    assert rows["teacher, K=8"]["kl"] == pytest.approx(0, abs=1e-6)


def test_bad_input_is_one_sentence(chain: Path, train: Cli, tmp_path: Path) -> None:
    """Wrong base, wrong hash, missing file, unknown names, K > E: exit code 2, one `error:` line, nothing written."""
    other = tmp_path / "other"
    shutil.copytree(chain / "base", other)
    raw = bytearray((other / "model.safetensors").read_bytes())
    raw[-1] ^= 1
    (other / "model.safetensors").write_bytes(raw)
    heads = read_adapter(chain / "head_distill" / "prerouter_edge0_nano.safetensors", "prerouter")
    assert heads.provenance
    swapped = tmp_path / "swapped.safetensors"
    tensors = {key: 0.5 * value for key, value in heads.tensors.items()}
    write_adapter(swapped, "prerouter", heads.tier, tensors, heads.provenance)

    sft = ("phase=student_sft", f"root={chain}", f"run_dir={tmp_path / 'new'}", *SMALL)
    cases = {
        "another base": ((*sft, f"base.directory={other}"), "base"),
        "another prerouter": (
            ("phase=on_policy", *sft[1:], f"inputs.prerouter={swapped}"),
            "prerouter",
        ),
        "missing prerouter": ((*sft, f"inputs.prerouter={tmp_path / 'nowhere'}"), "inputs.prerouter"),
        "missing rows": ((*sft, f"text.rows={tmp_path / 'nowhere'}"), "text.rows"),
        "unknown tier": (("tier=huge",), "choose one of"),
        "unknown phase": (("phase=guess",), "choose one of"),
        "K > E": ((*sft, "tier.k=33"), "tier.k"),
        "existing run": (("phase=student_sft", f"root={chain}", *SMALL), "resume=true"),
    }
    for name, (overrides, expected) in cases.items():
        done = train(*overrides, check=False)
        errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        assert done.returncode == 2, (name, done.returncode, done.stderr)
        assert len(errors) == 1 and expected in errors[0], (name, done.stderr)
        assert "Traceback" not in done.stderr, name


def test_notebook_runs(chain: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    notebook = Path(__file__).parents[2] / "notebooks" / "look_at_a_run.ipynb"
    matplotlib.use("Agg")
    monkeypatch.setenv("EDGE0_ROOT", str(chain))
    names: dict[str, object] = {}
    for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
    printed = capsys.readouterr().out
    assert "heads only" in printed and "overlap by layer" in printed
