"""All tests on every Python that pyproject.toml names: `nox`, `nox -s tests-3.13 -- tests/contract`.

Each session has a virtual environment of its own at the tested versions (constraints.txt); `nox -r` uses it again.
"""

import nox

nox.options.error_on_missing_interpreters = True
PYTHONS = nox.project.python_versions(nox.project.load_toml("pyproject.toml"))


@nox.session(python=PYTHONS, venv_backend="venv")
def tests(session: nox.Session) -> None:
    """All tests in two processes, or what is named after `--`."""
    session.install("-c", "constraints.txt", "-e", ".[train,runtime,dev]")
    session.run("python", "-m", "pytest", *(session.posargs or ("-n", "2")))
