"""What the documentation says in tables and examples is what the code has."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pcp_compiler.plan.capabilities import ATTENTION_KINDS, AttentionCapabilities, load_records
from pcp_compiler.runtime.captures import CaptureStats

ROOT = Path(__file__).parents[1]
BACKENDS = (ROOT / "docs" / "attention_backends.md").read_text(encoding="utf-8")
CAPTURES = (ROOT / "docs" / "captured_graphs.md").read_text(encoding="utf-8")
DTYPES = ("float64", "float32", "bfloat16", "float16")
USER = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from pcp_compiler import SamplingParams, SpeculativeDecoder

torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(
    vocab_size=31, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64,
)).double().eval().requires_grad_(False)
tokens = {}
for backend in ("auto", "plain"):
    config = {"parallel.pcp_size": 2, "attention.backend": backend, "limits.kv_blocks": 32, "limits.kv_block_size": 4}
    decoder = SpeculativeDecoder(model, config)
    print(decoder.target.sharded.decisions.entries["attention backend"][0])
    params = SamplingParams(6)
    made = decoder.generate([list(range(1, 14)), [3, 1, 4]], params, progress=False)
    tokens[backend] = [generation.token_ids for generation in made]
assert tokens["plain"] == tokens["auto"], tokens
"""
"""A user of the backend in the documentation."""


def rows_of(text: str, heading: str) -> list[list[str]]:
    """Return the cells of the table whose first column has this heading, without the heading."""
    lines = text[text.index(f"| {heading} |") :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def cells(record: AttentionCapabilities) -> list[str]:
    """Return a record as the documentation shows it; without the CPU of `triton`, which is Triton's interpreter."""
    devices = {name: number for name, number in record.priorities.items() if (record.name, name) != ("triton", "cpu")}
    if record.max_head_dim is None:
        head_dims = "any" if record.min_head_dim == 1 else f"from {record.min_head_dim}"
    else:
        first = f"{record.min_head_dim} to" if record.min_head_dim > 1 else "up to"
        head_dims = f"{first} {record.max_head_dim}{', equal' if record.equal_head_dims else ''}"
    answers = (
        record.supports_pcp, record.ragged_queries, record.fp8_kv, record.soft_cap, record.sinks,
        record.is_capture_safe,
    )  # fmt: skip
    return [
        f"`{record.name}`",
        ", ".join(kind for kind in ATTENTION_KINDS if kind in record.kinds),
        ", ".join(f"{name} {number}" for name, number in sorted(devices.items())),
        ", ".join(dtype for dtype in DTYPES if dtype in record.dtypes),
        head_dims,
        *("yes" if answer else "no" for answer in answers),
    ]


def test_the_table_of_attention_backends_is_that_of_their_records() -> None:
    records = load_records()
    assert rows_of(BACKENDS, "backend") == [cells(record) for record in records]
    assert all(record.paged and record.grouped_queries for record in records)


def test_every_field_of_capture_stats_is_explained() -> None:
    explained = {name for row in rows_of(CAPTURES, "field") for name in re.findall(r"`(\w+)`", row[0])}
    properties = {name for name, value in vars(CaptureStats).items() if isinstance(value, property)}
    assert explained == properties | {field.name for field in dataclasses.fields(CaptureStats)}


@pytest.mark.slow
def test_the_backend_in_the_documentation_registers_and_gives_the_tokens_of_the_others(tmp_path: Path) -> None:
    (module,) = re.findall(r"```python\n(import torch\n.*?)```", BACKENDS, flags=re.DOTALL)
    ((group, name, value),) = re.findall(r'\[project\.entry-points\."(.*)"\]\n(\w+) = "(.*)"', BACKENDS)
    info = tmp_path / "plain_attention-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plain-attention\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {value}\n")
    (tmp_path / "plain_attention.py").write_text(module)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    done = subprocess.run(
        [sys.executable, "-c", USER],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    automatic, chosen = done.stdout.splitlines()[-2:]
    assert "(automatic; " in automatic
    assert chosen == "layer 0, kind full: plain (set by attention.backend)"
