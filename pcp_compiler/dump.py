"""Dumps: what the compiler did, as files a person can read and diff.

    <folder>/rank_0/index.md            every pass: nodes, rewrites, time, op counts that changed
    <folder>/rank_0/00_trace.txt ...    the graph after each pass that changed it
    <folder>/rank_0/03_shard_tokens.diff ...
    <folder>/rank_0/final.py            the program; `python final.py` runs it on random inputs
    <folder>/rank_0/decisions.json, config.yaml

Several compilations, processes or threads may write into one folder: files are written beside and renamed into place.
"""

from __future__ import annotations

import difflib
import json
import logging
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from pcp_compiler.config import Config
from pcp_compiler.pipeline import Lowered, Stage
from pcp_compiler.trace import Trace

log = logging.getLogger(__name__)


def write(folder: Path, lowered: Lowered, config: Config, trace: Trace) -> Path:
    """Write one folder per rank; a folder that cannot be written costs a warning, never the run.

    Args:
        lowered: made with record=True.
    Returns:
        `folder`.
    """
    try:
        files = dict(_files(lowered, config, trace))
        for rank in range(config.parallel.pcp_size):
            for name, text in files.items():
                _write_atomically(folder / f"rank_{rank}" / name, text)
    except OSError as fault:
        log.warning("dump.dir: cannot write %s: %s; going on without a dump", folder, fault)
    return folder


def _files(lowered: Lowered, config: Config, trace: Trace) -> Iterator[tuple[str, str]]:
    """Yield name and text of every file."""
    yield "final.py", lowered.program.source
    yield "decisions.json", json.dumps(_decisions(lowered, trace), indent=2) + "\n"
    yield "config.yaml", config.to_yaml()
    yield "index.md", _index(lowered, config)
    if config.dump.level == "passes":
        yield from _stage_files(lowered, trace)


def _stage_files(lowered: Lowered, trace: Trace) -> Iterator[tuple[str, str]]:
    before = ""
    for number, stage in enumerate(lowered.stages):
        text = stage.text(trace.seeds)
        if text == before:
            continue
        yield f"{number:02}_{stage.name}.txt", text
        if before:
            lines = difflib.unified_diff(
                before.splitlines(keepends=True), text.splitlines(keepends=True),
                f"before {stage.name}", f"after {stage.name}", n=2,
            )  # fmt: skip
            yield f"{number:02}_{stage.name}.diff", "".join(lines)
        before = text


def _decisions(lowered: Lowered, trace: Trace) -> dict[str, object]:
    checks = lowered.decisions.call_checks
    return {
        "token inputs": dict(trace.seeds),
        "collectives": [{"name": name, "op": op} for name, op in lowered.program.schedule],
        "checked on every call": [f"{check.input_name}: {check.kind} ({check.reason})" for check in checks],
        **lowered.decisions.entries,
    }


def _index(lowered: Lowered, config: Config) -> str:
    head = [
        f"# pcp_spec, pcp_size {config.parallel.pcp_size}",
        "",
        "| # | pass | rewrites | nodes | ms | checks ms | collectives | ops that changed |",
        "|---|---|---|---|---|---|---|---|",
    ]
    rows, before = [], lowered.stages[0]
    for number, stage in enumerate(lowered.stages):
        collectives = sum(count for op, count in stage.op_counts.items() if op in _COLLECTIVE_NAMES)
        delta = stage.num_nodes - before.num_nodes
        rows.append(
            f"| {number} | {stage.name} | {stage.num_rewrites} | {stage.num_nodes} ({delta:+}) | {stage.pass_ms:.1f} "
            f"| {stage.check_ms:.1f} | {collectives} | {_op_changes(before, stage)} |"
        )
        before = stage
    schedule = [f"{number}. {name} ({op})" for number, (name, op) in enumerate(lowered.program.schedule, 1)]
    return "\n".join([*head, *rows, "", "## Collectives, in the order every rank runs them", "", *schedule]) + "\n"


_COLLECTIVE_NAMES = ("pcp.unshard.default", "pcp.gather_start.default", "pcp.restore_rows.default")


def _op_changes(before: Stage, after: Stage) -> str:
    names = sorted({*before.op_counts, *after.op_counts})
    changes = {name: after.op_counts.get(name, 0) - before.op_counts.get(name, 0) for name in names}
    return ", ".join(f"{name} {change:+}" for name, change in changes.items() if change)


def _write_atomically(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".tmp")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(temporary, path)
