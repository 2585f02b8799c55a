"""One declaration per setting, one settings section per tier: the map, the page, the readers and precedence follow."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra

from edge0_runtime.contract import tier as contract
from edge0_runtime.contract.artifacts import KINDS
from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.tier import builtin_tier
from edge0_train.config import PHASE_NAMES, PHASES, all_settings, config_directory, configure, examples, to_dict
from edge0_train.config.fields import Config, groups, settings_of
from edge0_train.config.pages import settings_markdown, settings_yaml
from edge0_train.config.setting import setting
from edge0_train.config.tiers import read_tier_file, tier_settings

PACKAGE = Path(__file__).parents[2] / "edge0_train"
TIERS = sorted(path.stem for path in (config_directory() / "tier").glob("*.yaml"))


# -- what follows from a declaration -----------------------------------------------------------------------------------


def test_the_map_of_all_settings_is_the_generated_one():
    checked_in = (config_directory() / "train.yaml").read_text(encoding="utf-8")
    assert checked_in == settings_yaml(), "python -m edge0_train settings > configs/train.yaml"
    assert max(map(len, checked_in.splitlines())) <= 130


def test_every_setting_is_on_the_page_and_explained():
    page = settings_markdown()
    for name, one in all_settings().items():
        assert f"| `{name}` |" in page, name
        assert one.sentence.strip().endswith(".") and len(one.sentence.split()) > 1, name
    for name, facts in PHASES.items():
        assert f"| `{name}` | {facts.sentence} |" in page


def test_defaults_lie_within_their_own_bounds_and_choices():
    """`Setting.check` takes a default as right."""
    for name, one in all_settings().items():
        if one.choices:
            assert {*(one.default if isinstance(one.default, tuple) else [one.default])} <= {*one.allowed()}, name
        one.check(name, one.default)


@pytest.mark.parametrize(
    ("facts", "value", "message"),
    [
        ({"least": 1}, 0, "a.b: 0 is below 1; raise it"),
        ({"least": 0}, float("nan"), "a.b: nan is not finite; give a number"),
        ({}, float("inf"), "a.b: inf is not finite"),
        ({}, 10**30, r"a.b: 10+ is above 1000000000; lower it"),
        ({}, -(10**30), r"a.b: -10+ is below -1000000000; raise it"),
        ({}, " ", r"a.b: empty; give a value, or leave it out for the default \(1\)"),
        ({}, "a\nb", r"a.b: 'a\\nb' has characters that cannot be printed"),
        ({"above": 0}, 0, "a.b: 0 must be larger than 0"),
        ({"at_most": 1}, 1.5, "a.b: 1.5 is above 1; lower it"),
        ({"choices": ("x", "y")}, "z", "a.b: 'z' is unknown; choose one of x, y"),
        ({"choices": lambda: ("x", "y")}, ("x", "z"), "a.b: 'z' is unknown; choose one of x, y"),
    ],
)
def test_a_value_outside_is_one_sentence(facts, value, message):
    with pytest.raises(Edge0Error, match=message):
        setting("A sentence.", 1, **facts).metadata["setting"].check("a.b", value)


def test_a_phase_has_a_function_needs_what_has_an_example_and_differs_from_the_map():
    for name, facts in PHASES.items():
        module = PACKAGE / "phases" / f"{name}.py"
        assert f"\ndef {name}(config: Config, run: Run)" in module.read_text(encoding="utf-8")
        assert all(examples(builtin_tier("35b"))[need] for need in facts.needs)
        for field, value in facts.defaults.items():
            assert value != all_settings()[field].default, f"{name}: {field} is the map's default"


# -- every setting is read ---------------------------------------------------------------------------------------------

CLASSES = {cls.__name__: name for name, cls in groups().items()} | {"Config": ""}


def group_of(node: ast.expr | None, known: dict[str, str]) -> str | None:
    """The group that an expression is: `config.optim`, `self.sample`, or a name that stands for one; "": a whole Config."""
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    if isinstance(node, ast.Name):
        return known.get(name)
    return name if name in groups() else "" if name == "config" else None


def stands_for(tree: ast.Module) -> dict[str, str]:
    """{name: group} by annotations (`optim: Optim`) and assignments (`sample, chat = config.sample, ...`) of a module."""
    known: dict[str, str] = {"config": ""}
    for node in ast.walk(tree):
        if isinstance(node, ast.arg) and isinstance(node.annotation, ast.Name) and node.annotation.id in CLASSES:
            known[node.arg] = CLASSES[node.annotation.id]
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            target, value = node.targets[0], node.value
            both = (
                (target.elts, value.elts)
                if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
                else ([target], [value])
            )
            for name, one in zip(*both, strict=True):
                if isinstance(name, ast.Name) and isinstance(one, ast.Attribute) and one.attr in groups():
                    known[name.id] = one.attr
    return known


def reads(source: str) -> Iterator[str]:
    """The settings that a module reads, as `group.field`."""
    tree = ast.parse(source)
    known = stands_for(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            group = group_of(node.value, known)
            if group is not None:
                yield f"{group}.{node.attr}".lstrip(".")
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr":
            group = group_of(node.args[0], known)
            if group == "inputs" and ast.unparse(node.args[1]) == "kind":
                yield from (f"{group}.{kind}" for kind in KINDS)


def unread(names: set[str]) -> list[str]:
    """Those of `names` that no module of the package reads; the declarations and their checks are no readers."""
    modules = [path for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE / "config"]
    return sorted(names - {name for path in modules for name in reads(path.read_text(encoding="utf-8"))})


def test_every_setting_is_read_somewhere():
    assert unread({*all_settings()}) == []


def test_a_setting_that_nobody_reads_is_found():
    new = {"new", *(f"{group}.new" for group in groups())}
    assert unread(new) == sorted(new)
    code = (
        "def f(config, text: Text):\n    optim, n = config.optim, 1\n    optim.steps + config.seed + text.rows + row.lr"
    )
    assert {*reads(code)} & {*all_settings()} == {"optim.steps", "seed", "text.rows"}


# -- tiers and their settings ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", TIERS)
def test_a_tiers_settings_are_known_and_no_part_of_the_tier(tier):
    file = config_directory() / "tier" / f"{tier}.yaml"
    data, section = read_tier_file(file)
    assert "settings" not in data
    for phase in PHASE_NAMES:
        tier_settings(phase, tier, config_directory())
    assert contract.read_tier(str(file)) == contract.builtin_tier(tier)
    assert "settings" not in to_dict(configure(f"tier={tier}", "teacher.directory=/t"))["tier"]
    assert {*section} <= {"like", "all", *PHASE_NAMES}


def test_the_settings_of_another_tier_are_said_once():
    """nano-ling is like nano, with a teacher of its own."""
    assert list(read_tier_file(config_directory() / "tier/nano-ling.yaml")[1]) == ["like", "all"]
    for phase in PHASE_NAMES:
        nano, ling = (to_dict(configure(f"phase={phase}", f"tier={tier}", "root=r")) for tier in ("nano", "nano-ling"))
        assert nano["teacher"].pop("directory") != ling["teacher"].pop("directory")
        assert nano["base"].pop("source") != ling["base"].pop("source")
        assert nano | {"tier": 0} == ling | {"tier": 0}


def own_tier(directory: Path, settings: object) -> Path:
    """A folder with a tier `own`: nano with these settings."""
    data = yaml.safe_load((config_directory() / "tier/nano.yaml").read_text(encoding="utf-8"))
    (directory / "tier").mkdir(exist_ok=True)
    text = yaml.safe_dump(data | {"name": "own", "settings": settings})
    (directory / "tier/own.yaml").write_text(text, encoding="utf-8")
    return directory


def test_precedence_of_a_tier_of_the_users_own(tmp_path):
    """The map < the phase < settings.all < settings.<phase> < experiment < the command line."""
    settings = {
        "all": {
            "optim": {"lr": 0.1, "steps": 1, "rows": 1},
            "heads": {"joint_lr": 0.1},
            "teacher": {"directory": "/t"},
        },
        "student_sft": {"optim": {"steps": 2, "rows": 2}},
    }
    own_tier(tmp_path, settings)
    made = configure("phase=student_sft", "tier=own", "optim.rows=3", "experiment=paper", config_dir=tmp_path)
    assert (made.optim.lr, made.optim.steps, made.optim.rows) == (0.1, 2, 3)
    assert (made.heads.joint_lr, made.inputs.lora, made.teacher.directory) == (0, "", "/t")
    assert made.threads == 2 and made.tier.name == "own"
    assert (
        configure(
            "phase=on_policy", "tier=own", "text.prompts=tasks", "on_policy.rounds=1", config_dir=tmp_path
        ).optim.lr
        == 0.1
    )
    with pytest.raises(Edge0Error, match="tier: 'own' is unknown"):
        configure("tier=own")


def test_a_tier_may_be_like_one_of_the_project(tmp_path):
    own_tier(tmp_path, {"like": "nano", "student_sft": {"optim": {"steps": 7}}})
    made, nano = (configure("phase=student_sft", f"tier={t}", config_dir=tmp_path) for t in ("own", "nano"))
    assert made.optim.steps == 7 and (made.sample, made.threads, made.base.dtype) == (nano.sample, 1, "float32")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"studnet_sft": {}}, r"own\.yaml settings\.studnet_sft: no such phase; choose one of all, quantize"),
        (
            {"all": {"optim": {"lrr": 1}}},
            r"own\.yaml settings\.all\.optim\.lrr: no such setting; did you mean optim\.lr\?",
        ),
        ({"all": {"thread": 1}}, r"settings\.all\.thread: no such setting; did you mean threads\?"),
        ({"all": 3}, r"own\.yaml settings\.all: 3 is not a mapping"),
        ([1], r"own\.yaml settings: \[1\] is not a mapping"),
        ({"like": "nobody"}, r"own\.yaml settings\.like: 'nobody' is no other tier"),
        ({"like": "own"}, r"own\.yaml settings\.like: 'own' is no other tier"),
    ],
)
def test_a_wrong_section_is_one_sentence(settings, message, tmp_path):
    own_tier(tmp_path, settings)
    assert configure(config_dir=tmp_path).tier.name == "nano", "nobody chose it"
    with pytest.raises(Edge0Error, match=message) as error:
        configure("tier=own", config_dir=tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("override", ["tier.router.mass_k=16", "+tier.router.mass_k=16", "++tier.router.mass_k=16"])
def test_a_routers_optional_fields_need_no_plus(override):
    assert configure(override).tier.router.mass_k == 16
    with pytest.raises(Edge0Error, match=r"tier\.router: fields unknown: mask_k"):
        configure("tier.router.mask_k=16")


# -- what a phase asks for ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", PHASE_NAMES)
def test_a_phase_asks_for_what_it_reads_and_nothing_else(phase):
    needs = PHASES[phase].needs
    given = [f"{need}=/somewhere" for need in needs]
    assert configure(f"phase={phase}", "tier=35b", *given).phase == phase
    for need, others in ((need, [one for one in given if not one.startswith(need)]) for need in needs):
        with pytest.raises(Edge0Error) as error:
            configure(f"phase={phase}", "tier=35b", *others)
        assert str(error.value).startswith(f"{need}: not set, but phase={phase} reads it; give e.g. ")
        assert all(part in str(error.value) for part in examples(builtin_tier("35b"))[need])


def test_head_refine_is_a_phase_and_no_setting():
    with pytest.raises(Edge0Error, match=r"heads\.features"):
        configure("phase=head_refine", "heads.features=base")


# -- no torch before it is needed --------------------------------------------------------------------------------------


def fresh(code: str, cwd: Path) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_composing_imports_no_torch():
    code = "from edge0_train.config import configure; configure(); import sys; print('torch' in sys.modules)"
    assert fresh(code, PACKAGE.parent) == "False"


def test_settings_of_the_config_are_its_only_fields_beside_phase_tier_and_groups():
    assert {name for name, _ in settings_of(Config)} == {*Config.__annotations__} - {"phase", "tier", *groups()}


def test_one_may_configure_while_hydra_runs_already():
    with initialize_config_dir(str(config_directory()), version_base=None):
        assert configure("seed=3").seed == 3
        assert compose("train", ["seed=4"]).seed == 4
    assert not GlobalHydra.instance().is_initialized()
