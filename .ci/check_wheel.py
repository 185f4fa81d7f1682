"""Install a wheel in an empty environment and use it from there: `python .ci/check_wheel.py dist/x.whl`.

The new environment sees the dependencies of the running one through a path file (a second torch would take minutes).
A path file does not activate the editable install that lies beside them, so only the wheel provides `pcp_compiler`.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

PROBE = """
import importlib.metadata, importlib.util, sys
import torch

assert "pcp_spec" in torch.compiler.list_backends(), torch.compiler.list_backends()
assert "pcp_compiler" not in sys.modules, "the backend must be listed without an import of ours"

import pcp_compiler.passes
assert pcp_compiler.__file__.startswith(sys.prefix), f"{pcp_compiler.__file__} is not the wheel's"
for name in ("passes", "backends"):
    assert importlib.util.find_spec(name) is None, f"the wheel installs {name} as a top-level package"

[entry_point] = importlib.metadata.entry_points(group="torch_dynamo_backends", name="pcp_spec")
assert callable(entry_point.load())
print(f"{entry_point.value} loads from {pcp_compiler.__path__[0]}")
"""


def install_in_empty_environment(wheel: Path, folder: Path) -> Path:
    """Return the interpreter of a new environment in `folder` that holds the wheel and sees our dependencies."""
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python)]
    subprocess.run([*pip, "install", "--no-deps", "--no-index", str(wheel)], check=True)
    [site_packages] = folder.glob("lib/python*/site-packages")
    (site_packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def main() -> None:
    """Check the wheel named on the command line; exits non-zero when the check fails."""
    [wheel] = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        python = install_in_empty_environment(Path(wheel).resolve(), Path(folder).resolve())
        subprocess.run([python, "-I", "-c", PROBE], check=True, cwd=folder)


if __name__ == "__main__":
    main()
