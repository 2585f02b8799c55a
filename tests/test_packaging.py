"""The wheel holds what a run needs, and neither package needs the other one's tensor library."""

import ast
import os
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
PACKAGES = ("edge0_runtime", "edge0_train")
ASSETS = ROOT / "edge0_train" / "assets"
CONTRACT = "edge0_runtime.contract"


def run_python(code: str, cwd: Path, **environment: str) -> str:
    """Standard output of `code` in a fresh interpreter; its standard error is the message when it fails."""
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def test_every_python_that_the_package_names_is_tested() -> None:
    """By nox, which reads the classifiers itself, and by CI; `requires-python` and `make venv` admit no others."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = [text.rpartition(" ")[2] for text in project["classifiers"] if ":: Python :: 3." in text]
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))
    matrix = workflow["jobs"]["lint-and-test"]["strategy"]["matrix"]["include"]
    assert {row["python"] for row in matrix} == set(named) == {"3.11", "3.12", "3.13"}
    assert project["requires-python"] == ">=3.11,<3.14"
    assert "(3, 11) <= sys.version_info[:2] <= (3, 13)" in (ROOT / "Makefile").read_text(encoding="utf-8")
    assert "python_versions" in (ROOT / "noxfile.py").read_text(encoding="utf-8")


# -- the wheel -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked wheel of this tree."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    (built,) = folder.glob("*.whl")
    with zipfile.ZipFile(built) as archive:
        archive.extractall(folder / "unpacked")
    return folder / "unpacked"


def test_wheel_holds_both_packages_and_nothing_else(wheel: Path) -> None:
    top = {path.name for path in wheel.iterdir()}
    info = {name for name in top if name.endswith(".dist-info")}
    assert len(info) == 1
    assert top - info == set(PACKAGES)


@pytest.mark.parametrize("package", PACKAGES)
def test_wheel_holds_every_file_of_a_package(wheel: Path, package: str) -> None:
    missing = [
        str(path)
        for path in (file.relative_to(ROOT) for file in (ROOT / package).rglob("*") if file.is_file())
        if "__pycache__" not in path.parts and not path.name.startswith(".") and not (wheel / path).is_file()
    ]
    assert not missing, "\n".join(missing)


@pytest.mark.parametrize(
    ("source", "target"),
    [("configs", "edge0_train/configs"), ("configs/tier", f"{CONTRACT.replace('.', '/')}/tiers")],
)
def test_wheel_holds_the_configs_unchanged(wheel: Path, source: str, target: str) -> None:
    def contents(folder: Path) -> dict[Path, bytes]:
        return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    expected = contents(ROOT / source)
    assert expected, f"{source} is empty"
    assert contents(wheel / target) == expected


def test_wheel_holds_the_assets(wheel: Path) -> None:
    assets = [path.relative_to(ROOT) for path in ASSETS.rglob("*") if path.is_file()]
    assert any(path.suffix == ".safetensors" for path in assets), f"no weights under {ASSETS}"
    for path in assets:
        assert (wheel / path).stat().st_size == (ROOT / path).stat().st_size, path


def test_wheel_carries_the_licence(wheel: Path) -> None:
    (licence,) = wheel.glob("*.dist-info/licenses/LICENSE")
    assert licence.read_text() == (ROOT / "LICENSE").read_text()


@pytest.mark.parametrize("package", PACKAGES)
def test_wheel_says_that_its_packages_are_typed(wheel: Path, package: str) -> None:
    assert (wheel / package / "py.typed").is_file()


def test_installed_runtime_finds_its_tiers_outside_the_checkout(wheel: Path, tmp_path: Path) -> None:
    code = """
import edge0_runtime
from edge0_runtime.contract.tier import builtin_tier, builtin_tier_names
print(edge0_runtime.__file__)
for name in builtin_tier_names():
    print(builtin_tier(name).name)
"""
    origin, *names = run_python(code, tmp_path, PYTHONPATH=str(wheel)).split()
    assert Path(origin).is_relative_to(wheel)
    assert names == sorted(path.stem for path in (ROOT / "configs/tier").glob("*.yaml"))


def test_installed_training_finds_its_configs_outside_the_checkout(wheel: Path, tmp_path: Path) -> None:
    code = "from edge0_train.config import config_directory; print(config_directory())"
    printed = run_python(code, tmp_path, PYTHONPATH=str(wheel))
    assert Path(printed.strip()) == wheel / "edge0_train/configs"


def test_console_scripts_of_the_wheel_answer_help(wheel: Path, tmp_path: Path) -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    for name, target in scripts.items():
        code = f"""
import importlib.metadata, sys
entry_points = importlib.metadata.distribution("edge0").entry_points
(script,) = entry_points.select(group="console_scripts", name={name!r})
assert script.value == {target!r}, script
sys.argv = [{name!r}, "--help"]
script.load()()
"""
        assert run_python(code, tmp_path, PYTHONPATH=str(wheel)).strip(), name


# -- one direction of dependency -------------------------------------------------------------------


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, absolute module name) of every import statement of a file, those inside functions included."""
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*above, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def inside(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


@pytest.mark.parametrize(
    ("package", "foreign"),
    [
        ("edge0_runtime", ("torch", "safetensors.torch", "accelerate", "peft", "datasets", "edge0_train")),
        ("edge0_train", ("mlx", "mlx_lm", "safetensors.mlx")),
    ],
)
def test_no_module_imports_the_other_sides_libraries(package: str, foreign: tuple[str, ...]) -> None:
    found = [f"{p.relative_to(ROOT)}:{n}: {m}" for p in sources(package) for n, m in imports(p) if inside(m, *foreign)]
    assert not found, "\n".join(found)


def test_training_knows_only_the_contract_of_the_runtime() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in sources("edge0_train")
        for line, name in imports(path)
        if inside(name, "edge0_runtime") and not inside(name, CONTRACT)
    ]
    assert not found, "\n".join(found)


def test_contract_imports_only_the_core_dependencies() -> None:
    allowed = {*sys.stdlib_module_names, "numpy", "yaml"}
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in (ROOT / CONTRACT.replace(".", "/")).rglob("*.py")
        for line, name in imports(path)
        if name.split(".")[0] not in allowed and not inside(name, CONTRACT)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("modules", "library"),
    [
        ("edge0_runtime, edge0_runtime.contract, edge0_runtime.cli", "torch"),
        ("edge0_train, edge0_train.cli", "mlx"),
    ],
)
def test_importing_a_package_leaves_the_other_sides_library_alone(modules: str, library: str) -> None:
    """With both installed: a library such as transformers could bring the other one in."""
    printed = run_python(f"import {modules}, sys; print({library!r} in sys.modules)", ROOT)
    assert printed.strip() == "False"


@pytest.mark.parametrize(("package", "absent"), [("edge0_runtime", ["torch"]), ("edge0_train", ["mlx", "mlx_lm"])])
def test_every_module_imports_where_the_other_sides_library_is_absent(package: str, absent: list[str]) -> None:
    code = f"""
import importlib, pkgutil, sys
sys.modules.update(dict.fromkeys({absent!r}))  # None: importing it raises ModuleNotFoundError
package = importlib.import_module({package!r})
names = [m.name for m in pkgutil.walk_packages(package.__path__, package.__name__ + ".")]
for name in names:
    if not name.endswith(".__main__"):
        importlib.import_module(name)
print(len(names))
"""
    assert int(run_python(code, ROOT)) > 0
