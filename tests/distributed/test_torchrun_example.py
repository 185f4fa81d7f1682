"""The example, started as a user starts it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[2]


def torchrun(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.run(
        [*command, str(ROOT / "examples" / "02_torchrun.py"), *arguments],
        capture_output=True, text=True, cwd=ROOT, timeout=500, check=False,
    )  # fmt: skip


def test_two_processes_agree_with_virtual_ranks_and_eager() -> None:
    done = torchrun()
    assert done.returncode == 0, done.stderr
    assert "All 2 ranks agree with virtual ranks, bit for bit, and with eager PyTorch." in done.stdout
    rows = re.findall(r"^ *(\d+) +(\d+) (\d+) +(\d+)", done.stdout, flags=re.MULTILINE)
    assert [tuple(map(int, row)) for row in rows] == [(5, 2, 3, 3), (64, 32, 32, 3), (333, 165, 168, 3)]


def test_a_killed_process_is_named_by_the_other_within_fifteen_seconds() -> None:
    done = torchrun("--kill-rank", "1")
    assert done.returncode == 1
    found = re.search(r"^rank 0, ([\d.]+) s after its last good call: (.*)$", done.stdout, flags=re.MULTILINE)
    assert found is not None, done.stdout + done.stderr
    assert float(found[1]) < 15
    assert re.search(r"rank 1 is gone: no sign of life for \d+ s \(killed, stopped or cut off\)", found[2]), found[2]
