"""Machines as data: what a file of configs/hardware promises, the plan's own estimate holds."""

from __future__ import annotations

import functools

import pytest
import yaml

from edge0_runtime.contract.errors import Edge0Error
from edge0_train.config import PHASE_NAMES, Config, config_directory, configure
from edge0_train.config.hardware import read_hardware
from edge0_train.data.counts import Rows
from edge0_train.fit import describe_fit, shortfalls, with_settings, would_fit
from edge0_train.inputs import missing_inputs
from edge0_train.machine import Limits, device_name, limits
from edge0_train.memory import GIB, Need, Sketches, phase_need

MACHINES = sorted(file.stem for file in (config_directory() / "hardware").glob("*.yaml"))
TEACHER, PROMPTS = "teacher.directory=/models/teacher", "text.prompts=tasks"


def planned(phase: str, tier: str, *overrides: str) -> tuple[Config, Rows, Need]:
    config = configure(f"phase={phase}", f"tier={tier}", "root=/nowhere", TEACHER, PROMPTS, "dry_run=true", *overrides)
    rows = Rows.unwritten(config)
    lora = phase in ("student_sft", "on_policy", "evaluate", "export")
    return config, rows, phase_need(config, rows, sketches(tier, lora, phase in ("quantize", "teacher_text")))


@functools.cache
def sketches(tier: str, lora: bool, bare: bool) -> Sketches:
    return {}


@pytest.mark.parametrize("tier", ["35b", "8b"])
@pytest.mark.parametrize("machine", MACHINES)
def test_every_phase_fits_the_machine_or_the_file_says_why_not(machine, tier):
    told = read_hardware(config_directory() / "hardware" / f"{machine}.yaml").too_small.get(tier, {})
    for phase in PHASE_NAMES:
        config, _, need = planned(phase, tier, f"hardware={machine}")
        short = shortfalls(config, need, limits(config))
        assert bool(short) == (phase in told), f"{phase}: {short}"
        assert config.hardware.note == told.get(phase, "")
        assert config.base.device == ("cpu" if machine == "cpu" else "cuda")


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("tier", ["nano", "nano-ling"])
def test_the_embedded_tiers_run_on_every_machine(machine, tier):
    for phase in PHASE_NAMES:
        config, _, need = planned(phase, tier, f"hardware={machine}")
        assert not shortfalls(config, need, limits(config))


def test_what_runs_is_compared_with_the_machine_that_it_runs_on():
    """Settings made for 80 GB must not pass a card of 24."""
    here = limits(configure())
    assert limits(configure("hardware=1x80gb", "base.device=cpu")) == here
    assert limits(configure("hardware=1x80gb", "dry_run=true")).device == 79 * 2**30


def test_precedence_is_tier_then_machine_then_command_line():
    assert configure("hardware=1x80gb").base.device == "cuda", "over nano's own"
    made = configure("hardware=1x80gb", "base.device=cpu", "hardware.device_gib=40")
    assert made.base.device == "cpu" and made.hardware.device_gib == 40 and made.hardware.name == "1x80gb"


def test_a_machine_is_one_file_also_in_a_folder_of_the_users(tmp_path):
    (tmp_path / "hardware").mkdir()
    text = {
        "machine": {"processes": 2, "device_gib": 16, "host_gib": 32},
        "settings": {"all": {"all": {"threads": 3}, "export": {"threads": 4}}, "nano": {"export": {"threads": 5}}},
        "too_small": {"nano": {"evaluate": "no room"}},
    }
    (tmp_path / "hardware/mine.yaml").write_text(yaml.safe_dump(text), encoding="utf-8")
    found = [configure(f"phase={p}", "hardware=mine", config_dir=tmp_path) for p in ("quantize", "export", "evaluate")]
    assert [config.threads for config in found] == [3, 5, 3]
    assert found[0].hardware.processes == 2 and found[2].hardware.note == "no room"
    assert configure("phase=export", "tier=nano-ling", "hardware=mine", config_dir=tmp_path).threads == 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"machine": {"processes": 1, "device_gib": 1}}, r"mine\.yaml machine: fields missing: host_gib"),
        ({"machine": {"processes": 0, "device_gib": 1, "host_gib": 1}}, r"machine\.processes: 0"),
        ({"machine": {"processes": 1, "device_gib": -1, "host_gib": 1}}, r"machine\.device_gib: -1"),
        ({"settings": {"35b": {"sft": {}}}}, r"settings\.35b\.sft: no such phase"),
        ({"settings": {"all": {"all": {"optim": {"lrr": 1}}}}}, r"optim\.lrr: no such setting; did you mean optim\.lr\?"),
        ({"too_small": {"35b": {"sft": "x"}}}, r"too_small\.35b\.sft: no such phase"),
        ({"settings": 3}, r"settings: 3 is not a mapping"),
    ],
)  # fmt: skip
def test_a_wrong_file_is_one_sentence(change, message, tmp_path):
    machine = {"processes": 1, "device_gib": 1, "host_gib": 1}
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump({"machine": machine, "settings": {}, "too_small": {}} | change), encoding="utf-8")
    with pytest.raises(Edge0Error, match=message) as error:
        read_hardware(file)
    assert "\n" not in str(error.value)


# -- the verdict ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["student_sft", "on_policy"])
def test_the_settings_that_would_fit_do_fit(phase):
    """The 35b at its defaults needs 184 to 248 GiB; what the plan advises is taken as it is, and fits."""
    gpu = ("hardware.device_gib=79", "hardware.host_gib=150")
    config, rows, need = planned(phase, "35b", *gpu)
    assert sum(need.device.values()) / GIB > 180
    verdict = describe_fit(config, rows, need)
    assert "does not fit, by this estimate: needs" in verdict and "this machine has 79.0" in verdict
    advised = verdict.partition("would fit with ")[2].split()
    assert "base.storage=packed" in advised
    better, _, need = planned(phase, "35b", *gpu, *advised)
    assert not shortfalls(better, need, limits(better))
    for left_out in advised:
        worse, _, need = planned(phase, "35b", *gpu, *(one for one in advised if one != left_out))
        assert shortfalls(worse, need, limits(worse)), f"{left_out} is not needed"


def test_where_nothing_helps_the_file_says_what_does():
    config, rows, need = planned("on_policy", "35b", "hardware=1x24gb")
    assert would_fit(config, rows) is None
    assert "no settings of memory make it fit: the teacher, which scores, has 65 GiB" in describe_fit(
        config, rows, need
    )


def test_a_gpu_that_is_not_there_and_one_that_is_in_use():
    config, _, need = planned("head_distill", "nano", "base.device=cuda")
    size = sum(need.device.values())
    assert "on a GPU, x has none" in shortfalls(config, need, Limits("x", 1, 0, None, 100 * GIB))[0]
    assert not shortfalls(config, need, Limits("x", 1, 2 * size, None, 100 * GIB))
    assert "free now" in shortfalls(config, need, Limits("x", 1, 2 * size, size // 2, 100 * GIB))[0]


def test_processes_share_the_hosts_memory_but_in_phases_of_one():
    config, _, need = planned("teacher_text", "8b", "base.device=cuda")
    host = sum(need.host.values())
    at_hand = Limits("x", 8, 10**12, None, 4 * host)
    assert "of host memory, x has" in shortfalls(config, need, at_hand)[0]
    assert not shortfalls(with_settings(config, {"phase": "evaluate"}), need, at_hand)


def test_the_parts_follow_from_shapes():
    """By hand: nano's teacher in float32, and the cache of 5 rows of 20 + 44 tokens."""
    _, _, need = planned("teacher_text", "nano", "sample.batch=5")
    parts = dict(zip(("teacher", "cache"), need.device.values(), strict=False))
    assert parts["cache"] == 5 * (32 + 44) * 2 * (2 * 1 * 64) * 4, "8 layers, every fourth with one head of 64"
    assert need.weights == parts["teacher"] and need.at == "generation"


def test_a_gpu_that_is_not_here_is_said_in_a_sentence(monkeypatch):
    """torch itself raises for the memory, or the name, of a device beyond the last."""

    def ask(device: str) -> tuple[int, int]:
        if device not in ("cuda", "cuda:0"):
            raise RuntimeError("CUDA error: invalid device ordinal")
        return 79 * GIB, 80 * GIB

    for name, value in (("is_available", lambda: True), ("device_count", lambda: 1), ("mem_get_info", ask)):
        monkeypatch.setattr(f"torch.cuda.{name}", value)
    found = {device: planned("head_distill", "nano", f"base.device={device}")[0] for device in ("cuda", "cuda:3")}
    assert limits(found["cuda"]).device == 80 * GIB
    told = [[p for p in missing_inputs(config) if p.startswith("base.device")] for config in found.values()]
    assert told == [[], ["base.device: cuda:3, but the last GPU here is cuda:0; take base.device=cuda:0"]]
    assert device_name("cuda:3").startswith("CPU")
