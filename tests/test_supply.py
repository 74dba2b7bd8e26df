"""Supply chain: locked dependencies, contents of the package, side effects of imports."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PACKED = {".css", ".html", ".js", ".json", ".png", ".py", ".sql", ".svg", ".toml", ".typed", ".webmanifest"}
"""File types in the package: no .pth files, no machine code."""


def read(name: str) -> dict[str, Any]:
    return tomllib.loads((ROOT / name).read_text())


def test_every_package_of_the_lock_comes_from_the_registry_and_has_a_hash_for_every_file() -> None:
    for package in read("uv.lock")["package"]:
        if package["name"] == "coterie":
            continue
        files = [*package.get("wheels", []), *filter(None, [package.get("sdist")])]
        assert package["source"] == {"registry": "https://pypi.org/simple"}, package["name"]
        assert files and all(re.fullmatch(r"sha256:[0-9a-f]{64}", one.get("hash", "")) for one in files), package[
            "name"
        ]
        assert all(one["url"].startswith("https://files.pythonhosted.org/") for one in files), package["name"]


GUARD = """
import pkgutil, sys

FORBIDDEN = ("socket.connect", "socket.bind", "socket.sendto", "socket.getaddrinfo", "socket.gethostbyname",
             "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "urllib.Request")
met = []
sys.addaudithook(lambda event, _: event in FORBIDDEN and met.append((event, name)))
name = "coterie"
import coterie
for found in pkgutil.walk_packages(coterie.__path__, "coterie."):
    name = found.name
    if not name.endswith("__main__"):
        __import__(name)
print(len([one for one in sys.modules if one.startswith("coterie.")]), met)
"""


@pytest.mark.slow
def test_importing_every_module_opens_no_connection_and_starts_no_process() -> None:
    shown = subprocess.run([sys.executable, "-c", GUARD], capture_output=True, text=True, check=True)
    count, _, met = shown.stdout.strip().partition(" ")
    assert met == "[]" and int(count) > 100


def test_the_package_installs_one_command_and_nothing_that_runs_by_itself() -> None:
    project = read("pyproject.toml")
    assert project["project"]["scripts"] == {"coterie": "coterie.cli:main"}
    assert not project["project"].keys() & {"entry-points", "gui-scripts", "dynamic"}
    # The wheel packs one folder as it is, without hooks or extra files.
    assert project["tool"]["hatch"]["build"]["targets"]["wheel"] == {"packages": ["src/coterie"]}
    assert project["tool"]["hatch"].keys() == {"build"} and project["tool"]["hatch"]["build"].keys() == {"targets"}
    assert project["build-system"] == {"requires": ["hatchling"], "build-backend": "hatchling.build"}
    files = {path for path in (ROOT / "src").rglob("*") if path.is_file() and path.suffix != ".pyc"}
    assert {path for path in files if path.suffix not in PACKED} == set()
    assert {path for path in files if ROOT / "src" / "coterie" not in path.parents} == set()


def test_provider_packages_are_an_optional_extra() -> None:
    project = read("pyproject.toml")["project"]
    assert not any("llm" in one for one in project["dependencies"])
    assert [one for one in project["optional-dependencies"]["providers"] if "any-llm" in one]
    tops = [node for path in (ROOT / "src").rglob("*.py") for node in ast.parse(path.read_text()).body]
    named = {alias.name for node in tops if isinstance(node, ast.Import) for alias in node.names}
    named |= {node.module or "" for node in tops if isinstance(node, ast.ImportFrom)}
    assert not any(name.split(".")[0] in ("any_llm", "openai", "litellm") for name in named)
