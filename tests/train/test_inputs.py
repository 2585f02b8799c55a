"""What a phase must find before it starts: said in order, with commands that work, by a dry run too."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from edge0_runtime.contract.errors import Edge0Error
from edge0_train import cli, doctor, inputs
from edge0_train.base.quantize_model import quantize_checkpoint
from edge0_train.config import PHASE_NAMES, PHASES, Config, command, configure, user_tiers
from edge0_train.inputs import CHECKS, check_chain_inputs, check_inputs, missing_inputs
from edge0_train.run import open_run
from edge0_train.synthetic import write_adapters
from tests.scripts_by_path import load_script
from tests.tiny_models import TEACHER

BARE = ("tier=35b", "base.device=cuda")


def advised(message: str) -> list[list[str]]:
    """The commands in a message."""
    return [shlex.split(found) for found in re.findall("`(python [^`]*)`", message)]


def follow(words: list[str], monkeypatch: pytest.MonkeyPatch) -> Config | None:
    """Take an advised command as far as a machine without models can: parsed, checked, composed."""
    if words[1:3] == ["-m", "edge0_train"]:
        own = words[words.index("--config-dir") + 1] if "--config-dir" in words else None
        return configure(*(word for word in words[3:] if "=" in word), config_dir=own)
    script = load_script(Path(words[1]).stem)
    asked: list[str] = []
    monkeypatch.setattr(script, "newest", lambda repo, *_: script.Source(repo, "0" * 40))
    monkeypatch.setattr(script, "fetch", lambda source, *_: asked.append(source.repo) or [])
    monkeypatch.setattr(sys, "argv", words[1:])
    script.main()
    assert asked in (["Qwen/Qwen3.6-35B-A3B"], ["inclusionAI/Ling-3.0-tiny"])
    return None


def test_a_bare_machine_hears_in_order_what_is_missing_and_what_makes_it(tmp_path, monkeypatch):
    """phase=head_distill tier=35b needs neither teacher nor prompts itself, but base and rows are made from them."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Edge0Error) as error:
        check_inputs(configure("phase=head_distill", *BARE))
    head, *lines = str(error.value).splitlines()
    assert head == "phase=head_distill tier=35b cannot start; mend in this order:"
    beginnings = [
        "1. the teacher: models/Qwen",
        "2. base.device: cuda",
        "3. base.directory: runs/",
        "4. text.rows: runs/",
    ]
    assert [line.strip()[: len(wanted)] for line, wanted in zip(lines, beginnings, strict=True)] == beginnings
    assert "teacher.directory" not in lines[1] + lines[0]
    fetch, quantize, text = (follow(words, monkeypatch) for words in advised(str(error.value)))
    assert fetch is None and quantize and text
    assert (quantize.phase, quantize.base.directory) == ("quantize", "runs/35b/base")
    assert (text.phase, text.run_dir, text.teacher) == ("teacher_text", "runs/35b/teacher_text", quantize.teacher)


@pytest.mark.parametrize("tier", ["35b", "8b", "nano"])
@pytest.mark.parametrize("phase", PHASE_NAMES)
def test_every_advised_command_is_complete(phase, tier, tmp_path, monkeypatch):
    """Also below a root with a space and a quote, on a CPU, with hardware: all of it is carried over."""
    monkeypatch.chdir(tmp_path)
    root = str(tmp_path / 'a "b" c')
    words = ("hardware=cpu", f"root='{root}'", "text.prompts=p.jsonl", "teacher.directory='my models/t'")
    problems = missing_inputs(configure(f"phase={phase}", f"tier={tier}", *words))
    assert problems
    for found in advised("\n".join(problems)):
        made = follow(found, monkeypatch)
        if made:
            assert (made.root, made.hardware.name, made.base.device, made.tier.name) == (root, "cpu", "cpu", tier)
            if "teacher" in PHASES[made.phase].reads:
                assert made.teacher.directory == "my models/t"


def test_a_command_leads_to_the_users_own_tier(tmp_path):
    (tmp_path / "tier").mkdir()
    text = (
        (cli.config_directory() / "tier/nano.yaml").read_text(encoding="utf-8").replace("name: nano\n", "name: own\n")
    )
    (tmp_path / "tier/own.yaml").write_text(text, encoding="utf-8")
    config = configure("tier=own", "phase=student_sft", f"root={tmp_path / 'r'}", config_dir=tmp_path)
    with user_tiers(tmp_path):
        words = shlex.split(command(config, "quantize"))
    assert words[3:5] == ["--config-dir", str(tmp_path)]
    assert configure(*words[5:], config_dir=tmp_path).root == str(tmp_path / "r")


def test_what_a_phase_reads_has_a_check_and_is_written_by_one_before():
    made: set[str] = set()
    for phase, facts in PHASES.items():
        assert {*facts.reads} <= {*CHECKS}
        own = {"device", "source", "new base", "teacher", "prompts", "writer", "loss"}
        assert {*facts.reads} - own <= made | ({"lora"} if phase == "student_sft" else set()), phase
        made.update(facts.writes)


@pytest.mark.parametrize("phase", PHASE_NAMES)
def test_a_phase_that_finds_everything_is_silent(make_config, phase, tmp_path):
    own = [f"base.directory={tmp_path / 'new'}"] if phase == "quantize" else []
    with_lora = [f"inputs.lora={tmp_path / 'gone'}"] if phase in ("on_policy", "export") else []
    problems = missing_inputs(make_config(phase, *own, *with_lora))
    assert all(problem.startswith("inputs.lora") for problem in problems) and len(problems) == len(with_lora), problems


def other_tokenizer(directory: Path) -> Path:
    shutil.copytree(TEACHER, directory)
    file = directory / "tokenizer.json"
    file.write_text(file.read_text(encoding="utf-8") + "\n", encoding="utf-8")
    return directory


@pytest.mark.parametrize("dry", [True, False])
@pytest.mark.parametrize(
    ("phase", "override", "message"),
    [
        ("on_policy", "teacher.directory=/gone", "teacher.directory: /gone does not exist"),
        ("teacher_text", "teacher.directory={other}", "tokenizer.json of .* is not the base's"),
        ("teacher_text", "sample.backend=vllm", "sample.backend: vllm is not installed"),
        ("teacher_text", "text.prompts=/gone.jsonl", "text.prompts: /gone.jsonl does not exist"),
        ("teacher_text", "text.prompts=tasks:nope", "text.prompts: tasks:nope"),
        ("head_distill", "base.device=cuda", "base.device: cuda, but torch .* here; take"),
        ("head_distill", "base.directory={teacher}", "tensors|parameters|names"),
        ("head_distill", "text.rows={foreign}", "text.rows: .* another tokenizer"),
        ("evaluate", "text.rows={template}", "text.rows: .* another chat template"),
        ("head_distill", "text.rows={broken}", r"card\.json: not strict JSON .* delete done.json of that run"),
        ("head_refine", "inputs.prerouter=/gone", "inputs.prerouter: /gone does not exist"),
        ("head_refine", "inputs.prerouter=''", "inputs.prerouter: empty"),
        ("on_policy", "on_policy.loss=sampled_token sample.top_p=0.5", "estimates with what the student itself would write"),
        ("export", "inputs.lora=auto", "inputs.lora: no phase before export has written it .*`python .* phase=student_sft"),
        ("quantize", "base.source=/gone base.directory={new}", "base.source: /gone does not exist"),
        ("quantize", "base.source={bin} base.directory={new}", r"has no model\*\.safetensors \(only pytorch_model\.bin\)"),
        ("quantize", "seed=1", "output directory .* exists"),
    ],
)  # fmt: skip
def test_a_dry_run_fails_where_the_run_would_at_once(make_config, phase, override, message, dry, tmp_path, monkeypatch):
    foreign, template, broken, only_bin = (tmp_path / name for name in ("foreign", "template", "broken", "bin"))
    for directory, key in ((foreign, "tokenizer_sha256"), (template, "template_sha256"), (broken, "")):
        directory.mkdir()
        card = json.dumps({"fingerprint": "0" * 64, key: "0" * 64}) if key else "{"
        (directory / "card.json").write_text(card)
    only_bin.mkdir()
    (only_bin / "config.json").write_text((TEACHER / "config.json").read_text(encoding="utf-8"))
    (only_bin / "pytorch_model.bin").write_bytes(b"x")
    other = other_tokenizer(tmp_path / "other")
    words = override.format(
        other=other,
        teacher=TEACHER,
        foreign=foreign,
        template=template,
        broken=broken,
        bin=only_bin,
        new=tmp_path / "new",
    )
    config = make_config(phase, f"run_dir={tmp_path / 'run'}", *words.split(), f"dry_run={str(dry).lower()}")
    with pytest.raises(Edge0Error, match=message):
        cli.run_phase(config)
    assert not (tmp_path / "run").exists()


def test_a_dry_run_finds_a_run_directory_that_exists(make_config, tmp_path, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.yaml").write_text("{}")
    with pytest.raises(Edge0Error, match=r"run_dir: .*run exists already; choose another run_dir or continue"):
        cli.run_phase(make_config("head_distill", f"run_dir={tmp_path / 'run'}", "dry_run=true"))
    assert "at the peak" in capsys.readouterr().out, "the plan comes first"


@pytest.mark.parametrize("dry", ["true", "false"])
def test_heads_and_lora_of_two_trainings_are_found_before_anything_is_loaded(make_config, tmp_path, dry):
    config = make_config("export")
    other = Path(shutil.copytree(config.base.directory, tmp_path / "other"))
    write_adapters(other, config.tier, 1.0)
    words = (f"inputs.lora={other}", f"run_dir={tmp_path / 'run'}", f"dry_run={dry}")
    with pytest.raises(
        Edge0Error, match=r"was trained with prerouter .*\n.*set inputs\.prerouter and inputs\.lora to files"
    ):
        cli.run_phase(make_config("export", *words))
    assert missing_inputs(make_config("export", *words, f"inputs.prerouter={other}")) == []


def test_a_run_directory_in_which_nothing_has_happened_is_free(make_config, tmp_path):
    """Of a process that was killed while its model was loading; as a run itself takes it."""
    config = make_config("head_distill", f"run_dir={tmp_path / 'run'}")
    run = open_run(config)
    assert any(run.directory.iterdir())
    check_chain_inputs([config])
    run.log(1, {"loss": 1.0})
    with pytest.raises(Edge0Error, match="exists already"):
        check_chain_inputs([config])


def test_a_base_of_another_tier_is_named_by_its_fields(make_config, tmp_path):
    config = make_config("head_distill", "tier=nano-ling", f"text.rows={tmp_path}")
    assert any("not the base of tier nano-ling" in problem for problem in missing_inputs(config))


def test_weights_that_no_memory_holds_stop_the_run_with_what_would_fit(make_config, monkeypatch):
    config = make_config("head_distill", "base.device=cpu")
    monkeypatch.setattr("edge0_train.machine.memory_limit_bytes", lambda: 8 * 2**20)
    (problem,) = missing_inputs(config)
    assert re.match(r"memory: the weights alone have 0\.0 GiB, this machine has 0\.0; it would fit|.*larger", problem)


def test_a_full_disk_is_said_before_the_first_step(make_config, monkeypatch):
    monkeypatch.setattr(inputs, "disk_free", lambda path: 10)
    (problem,) = missing_inputs(make_config("head_distill"))
    assert re.search(r"head_distill: phase=head_distill writes about .* GiB there, 0\.0 are free; free some", problem)


# -- chains ------------------------------------------------------------------------------------------------------------


def chain(*overrides: str) -> list[Config]:
    return [configure(f"phase={phase}", "tier=nano", *overrides) for phase in PHASE_NAMES]


def test_a_chain_finds_what_its_earlier_phases_make(tmp_path):
    check_chain_inputs(chain(f"root={tmp_path}"))


def test_a_chain_is_checked_to_its_end_before_it_starts(tmp_path):
    """Too few prompts for on_policy, and the run directory of the last phase is taken."""
    rows = "".join(json.dumps({"messages": [{"role": "user", "content": f"Add {n}."}]}) + "\n" for n in range(60))
    (tmp_path / "p.jsonl").write_text(rows, encoding="utf-8")
    root = tmp_path / "root"
    with pytest.raises(
        Edge0Error, match=r"p\.jsonl has \d\d prompts to train on, phase=on_policy takes .* = 1536; lower"
    ):
        check_chain_inputs(chain(f"root={root}", f"text.prompts={tmp_path / 'p.jsonl'}"))
    (root / "export").mkdir(parents=True)
    (root / "export/x").write_text("")
    with pytest.raises(Edge0Error, match=r"run_dir: .*export exists already"):
        check_chain_inputs(chain(f"root={root}"))


def test_a_chain_judges_prompts_by_as_many_rows_as_its_phases_read(tmp_path):
    """A bad first line is not a third of the file."""
    good = [json.dumps({"messages": [{"role": "user", "content": f"Add {n}."}]}) for n in range(60)]
    (tmp_path / "p.jsonl").write_text("\n".join(["no JSON", *good]), encoding="utf-8")
    words = (f"root={tmp_path / 'root'}", f"text.prompts={tmp_path / 'p.jsonl'}", "optim.steps=4", "optim.rows=2")
    check_chain_inputs(chain(*words))
    (tmp_path / "p.jsonl").write_text("\n".join([*["no JSON"] * 20, *good]), encoding="utf-8")
    with pytest.raises(Edge0Error, match=r"text\.max_dropped: 20 of 80 rows"):
        check_chain_inputs(chain(*words))


def test_a_chain_asks_for_the_teacher_of_nothing_that_it_makes_or_finds(make_config, tmp_path):
    """Rows are there, and the base will be made from base.source: teacher.directory is nobody's."""
    rows = f"text.rows={make_config('export').text.rows}"
    words = ("tier=nano", f"root={tmp_path}", f"base.source={TEACHER}", "teacher.directory=/gone", rows)
    check_chain_inputs([configure(f"phase={phase}", *words) for phase in ("quantize", "head_distill")])
    (problem,) = missing_inputs(configure("phase=head_distill", *words))
    assert problem.startswith("base.directory: ")


def test_one_rank_looks_for_all(monkeypatch, tmp_path):
    config = configure("phase=head_distill", "tier=nano", f"root={tmp_path}")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(inputs, "missing_inputs", lambda *_: pytest.fail("the second rank looks too"))
    check_inputs(config)
    check_chain_inputs([config])


def test_what_is_done_already_is_not_looked_at(tmp_path, make_config):
    config = make_config("head_distill", f"run_dir={tmp_path}", "resume=true", "text.rows=/gone")
    assert missing_inputs(config)
    (tmp_path / "done.json").write_text("{}")
    assert missing_inputs(config) == []


def test_a_killed_quantize_is_continued_over_the_base_that_it_had_written(tmp_path):
    words = ("phase=quantize", "tier=nano", f"root={tmp_path}")
    config = configure(*words, "resume=true")
    quantize_checkpoint(Path(config.base.source), Path(config.base.directory), config.tier)
    with pytest.raises(Edge0Error, match=r"output directory .* exists"):
        cli.run_phase(configure(*words))
    cli.run_phase(config)
    assert (Path(config.run_dir) / "done.json").is_file()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run_dir=x"], "run_dir: x is shared by 8 phases"),
        (["chain=[]"], "chain: empty"),
        (["chain=5"], "chain: 5 is no list"),
        (["chain=[quantize,foo]"], "chain: 'foo' is unknown"),
        (["chain=[export,quantize]"], r"chain: .* write chain=\[quantize,export\]"),
        (["chain=[quantize,quantize]"], "chain: quantize more than once"),
        (["on_policy.rounds=4", "optim.steps=6"], "optim.steps: 6 is not a multiple of on_policy.rounds=4"),
    ],
)
def test_a_chain_that_cannot_be_run_does_not_begin(words, message, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["edge0_train", "phase=all", "tier=nano", *words])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2 and re.match(f"error: {message}", capsys.readouterr().err)
    assert not list(tmp_path.iterdir())


# -- doctor ------------------------------------------------------------------------------------------------------------


def test_doctor_says_speeds_hours_and_what_is_missing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(doctor.SIDE, "cpu", 64)
    monkeypatch.setattr(doctor, "FILE_BYTES", 2**16)
    doctor.doctor_command(["tier=8b", "hardware=1x24gb", "chain=[quantize,head_distill]"])
    page = capsys.readouterr().out
    for words in (
        "GFLOP/s in bfloat16",
        "1x24gb: 1 x 23.5 GiB",
        "wandb: offline",
        "hours = max(",
        "one to three times",
    ):
        assert words in page
    assert re.search(r"head_distill +\d+\.\d +\d+\.\d +yes +\d", page)
    assert page.index("quantize: something is missing:") < page.index(
        "1. base.source: models/Ling-3.0-tiny does not exist"
    )
    assert not list(tmp_path.iterdir()), "what it wrote to measure the disk is gone"
    doctor.doctor_command(["tier=8b", "hardware=1x24gb", "chain=[quantize]", "logger.wandb=disabled"])
    assert "wandb: disabled" in capsys.readouterr().out
    with pytest.raises(Edge0Error, match="doctor: no tier; usage"):
        doctor.doctor_command([])


def test_doctors_hours_are_its_formulas():
    """By hand: 10 steps of 4 rows of 99 tokens through 35b's 3 B used parameters, once forward; heads three times."""
    config = configure(
        "phase=head_distill", "tier=35b", "root=/nowhere", "optim.steps=10", "optim.rows=4", "text.max_length=100"
    )
    made = doctor.work(config)
    routed = 40 * 256 * 3 * 2048 * 512
    used = 34_660_610_688 - routed * (1 - 4 / 256)
    assert made.flops == pytest.approx(10 * 4 * 99 * (2 * used + 6 * 69_206_016))
    speeds = doctor.Speeds(flops=1e12, memory=1e9, write=1e6, read=2e9)
    assert made.seconds(speeds) == pytest.approx(made.flops / 1e12 + made.read / 2e9)
