"""Fixtures for tests of the torch.compile backend."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    """Forget all compiled code: all tests that compile one forward share its recompile limit."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()
