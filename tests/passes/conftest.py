"""Fixtures for tests of passes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.passes import support
from tests.passes.support import PassRun, Traced

GOLDENS = Path(__file__).parent / "goldens"


@pytest.fixture
def trace() -> Callable[..., Traced]:
    """Return a function that traces a module or a few lines: see `support.trace`."""
    return support.trace


@pytest.fixture
def check_golden(request: pytest.FixtureRequest) -> Callable[[str, PassRun], None]:
    """Return a function that compares what a pass did with `goldens/<pass>__<case>.txt`."""

    def check(case: str, run: PassRun) -> None:
        path = GOLDENS / f"{run.step.name}__{case}.txt"
        text = f"{run.before}---\n{run.after}"
        if request.config.getoption("--update-goldens"):
            path.write_text(text)
        assert path.is_file(), f"no golden {path.name}: run pytest --update-goldens and read what it wrote"
        assert text == path.read_text(), f"{path.name} differs; if that is meant: pytest --update-goldens"

    return check
