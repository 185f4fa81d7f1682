"""The example of captures, started as a user starts it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[1]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "examples" / "04_captured_graphs.py"), *arguments],
        capture_output=True, text=True, cwd=ROOT, timeout=500, check=False,
    )  # fmt: skip


def test_captured_steps_give_the_same_tokens_and_are_listed() -> None:
    done = run("--tokens", "8")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "The same tokens as without captures." in done.stdout
    runs = re.findall(r"^(\w.*?) +(\d+) +(prefill|decode|verify|draft|proposal) \d+ rows", done.stdout, re.MULTILINE)
    assert {(name, phase) for name, _, phase in runs} >= {
        ("target, sharded", "prefill"), ("draft, sharded", "prefill"), ("draft chain, K = 3", "draft"),
        ("round, K = 3", "proposal"),
    }  # fmt: skip
    sums = re.search(r"(\d+) runs\s+replayed, (\d+)\s+eager", done.stdout)
    assert sums is not None
    assert int(sums[1]) == sum(int(count) for _, count, _ in runs)
    assert re.search(r"\d+ pieces captured", done.stdout)


@pytest.mark.parametrize(
    ("arguments", "message"), [(("--tokens", "0"), "numbers >= 1"), (("--prompts", "21"), "1 to 20")]
)
def test_a_bad_argument_is_refused_with_what_is_allowed(arguments: tuple[str, str], message: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
