"""The wheel, the bare checkout and the pinned versions say the same about what pcp_compiler is made of."""

from __future__ import annotations

import configparser
import itertools
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LINKED_FOLDERS = ("backends", "passes")
BUILD_INPUTS = ("pyproject.toml", "README.md", "LICENSE")


def normalized(requirement: str) -> str:
    """Return the project name of a requirement in the form that package indexes compare (PEP 503)."""
    name = re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0]
    return re.sub(r"[-_.]+", "-", name).lower()


def files_below(folder: Path) -> set[str]:
    """Return paths relative to `folder` of its files; links to folders and byte code are left out."""
    paths = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return {
        path.as_posix()
        for path in paths
        if "__pycache__" not in path.parts and not (folder / path.parts[0]).is_symlink()
    }


def files_of_the_tree() -> set[str]:
    """Return what a wheel has to hold: pcp_compiler/ with the linked folders in the place of their links."""
    names = {f"pcp_compiler/{name}" for name in files_below(ROOT / "pcp_compiler")}
    for folder in LINKED_FOLDERS:
        names |= {f"pcp_compiler/{folder}/{name}" for name in files_below(ROOT / folder)}
    return names


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Return the wheel, built by way of the sdist from a copy, because a build writes into its source tree."""
    tree = tmp_path_factory.mktemp("tree")
    for folder in ("pcp_compiler", *LINKED_FOLDERS):
        shutil.copytree(ROOT / folder, tree / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in BUILD_INPUTS:
        shutil.copy(ROOT / name, tree / name)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", "dist"]
    build = subprocess.run(command, cwd=tree, capture_output=True, text=True)
    assert build.returncode == 0, build.stdout + build.stderr
    [path] = (tree / "dist").glob("*.whl")
    return zipfile.ZipFile(path)


def test_the_wheel_holds_exactly_the_files_of_the_tree(wheel: zipfile.ZipFile) -> None:
    packaged = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert packaged == files_of_the_tree()


def test_the_wheel_registers_the_backend_with_torch(wheel: zipfile.ZipFile) -> None:
    [name] = [name for name in wheel.namelist() if name.endswith(".dist-info/entry_points.txt")]
    entry_points = configparser.ConfigParser()
    entry_points.read_string(wheel.read(name).decode())
    assert dict(entry_points["torch_dynamo_backends"]) == {"pcp_spec": "pcp_compiler.backends.pcp_spec:backend"}
    assert "pcp_compiler/backends/pcp_spec.py" in wheel.namelist()


def test_the_wheel_carries_the_licence(wheel: zipfile.ZipFile) -> None:
    [name] = [name for name in wheel.namelist() if name.endswith(".dist-info/licenses/LICENSE")]
    assert wheel.read(name) == (ROOT / "LICENSE").read_bytes()


@pytest.mark.parametrize("folder", LINKED_FOLDERS)
def test_a_linked_folder_is_a_relative_link_in_the_checkout(folder: str) -> None:
    link = ROOT / "pcp_compiler" / folder
    assert link.is_symlink()
    assert link.readlink() == Path("..") / folder


@pytest.mark.parametrize("folder", LINKED_FOLDERS)
def test_a_bare_import_of_a_linked_folder_is_refused(folder: str) -> None:
    bare = subprocess.run([sys.executable, "-c", f"import {folder}"], cwd=ROOT, capture_output=True, text=True)
    assert bare.returncode == 1
    assert f"ImportError: import pcp_compiler.{folder}, not {folder}" in bare.stderr


def test_every_direct_requirement_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    requirements = itertools.chain(project["dependencies"], *extras)
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    # no local suffix such as +cpu, which only one package index has; no address of an index
    assert [pin for pin in pins if not re.fullmatch(r"[A-Za-z0-9._-]+==[0-9a-z.]+", pin)] == []
    assert {normalized(requirement) for requirement in requirements} - {normalized(pin) for pin in pins} == set()
