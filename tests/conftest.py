"""Options of the whole test suite."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the switch that rewrites golden files."""
    parser.addoption("--update-goldens", action="store_true", help="rewrite tests/passes/goldens from what passes do now")
