"""Dump folders: what is in them, that it runs, and that no dump ever costs a run."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import pcp_compiler
from pcp_compiler import dump
from pcp_compiler.config import load_config
from pcp_compiler.pipeline import CANONICAL_PASSES, SHARDING_PASSES, lower
from pcp_compiler.trace import trace_module
from tests.backend.support import TokenModel, causal_attention, make_ids, make_tiny, options, torch_compile

ROOT = Path(pcp_compiler.__file__).parents[1]
PASSES = ["trace", *(step.name for step in CANONICAL_PASSES + SHARDING_PASSES)]
SHARDED = f"{PASSES.index('shard_tokens'):02}_shard_tokens.txt"


def with_dump(folder: Path, pcp_size: int = 2, **more: Any) -> dict[str, Any]:
    return {**options(pcp_size), "dump": {"dir": str(folder), **more}}


def files_of(folder: Path) -> dict[str, str]:
    """Return text by name of all files directly in a folder."""
    return {path.name: path.read_text() for path in folder.iterdir() if path.is_file()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the dump of a tiny model on two ranks, written by torch.compile."""
    path = tmp_path_factory.mktemp("dumps") / "deep" / "dump"
    with torch.no_grad():
        torch_compile(make_tiny(), options=with_dump(path))(make_ids(9))
    return path


def apply_diff(before: str, diff: str) -> str:
    """Apply a unified diff, checking every line of it against the text."""
    lines, result, position = before.splitlines(), [], 0
    for line in diff.splitlines()[2:]:
        if head := re.match(r"@@ -(\d+)", line):
            start = int(head[1]) - 1
            result += lines[position:start]
            position = start
        elif line.startswith("+"):
            result.append(line[1:])
        else:
            assert lines[position] == line[1:]
            position += 1
            result += [line[1:]] if line.startswith(" ") else []
    return "\n".join([*result, *lines[position:]]) + "\n"


def test_every_rank_has_a_folder_with_all_files(folder: Path) -> None:
    assert sorted(path.name for path in folder.iterdir()) == ["rank_0", "rank_1"]
    files = files_of(folder / "rank_0")
    assert files == files_of(folder / "rank_1")
    assert {"index.md", "final.py", "decisions.json", "config.yaml", "00_trace.txt", SHARDED} <= set(files)
    assert all(files.values())


def test_numbered_stages_are_those_that_changed_the_graph_and_their_diffs_apply(folder: Path) -> None:
    files = files_of(folder / "rank_0")
    stages = sorted(name for name in files if name.endswith(".txt"))
    assert [PASSES[int(name[:2])] for name in stages] == [name[3:-4] for name in stages]
    assert {name[:-5] for name in files if name.endswith(".diff")} == {name[:-4] for name in stages[1:]}
    for before, after in pairwise(stages):
        assert files[before] != files[after]
        assert apply_diff(files[before], files[after[:-4] + ".diff"]) == files[after]
    assert "pcp." not in files["00_trace.txt"].replace("pcp.attention", "")
    assert "%gather_start" in files[stages[-1]]


def test_the_index_lists_every_pass_with_its_deltas_and_the_collectives_in_order(folder: Path) -> None:
    index = (folder / "rank_0" / "index.md").read_text()
    rows = [line.split(" | ") for line in index.splitlines() if re.match(r"\| \d", line)]
    assert [row[1] for row in rows] == PASSES
    shard = rows[PASSES.index("shard_tokens")]
    assert int(shard[2]) > 0
    assert re.fullmatch(r"\d+ \(\+\d+\)", shard[3])
    assert float(shard[4]) > 0
    assert (shard[6], "pcp.unshard.default +3" in shard[7]) == ("3", True)
    assert re.search(r"1\. gather_start\w* \(gather_start\)\n2\. unshard\w* \(unshard\)\n$", index)


def test_the_decisions_name_token_inputs_and_collectives(folder: Path) -> None:
    decisions = json.loads((folder / "rank_0" / "decisions.json").read_text())
    assert decisions["token inputs"] == {"input_ids": 1}
    assert [collective["op"] for collective in decisions["collectives"]] == ["gather_start", "unshard"]
    assert decisions["checked on every call"] == []


def test_the_decisions_hold_what_was_gathered_and_proven(tmp_path: Path) -> None:
    config = {**options(2, on_token_mixing="gather"), "dump": {"dir": str(tmp_path)}}
    pcp_compiler.inspect(TokenModel(lambda x: x.cumsum(1)), (make_ids(9),), config)
    decisions = json.loads((tmp_path / "rank_0" / "decisions.json").read_text())
    assert "cumsum" in decisions["token mixing"][0]


def test_the_config_loads_back_as_it_was(folder: Path) -> None:
    assert load_config(folder / "rank_0" / "config.yaml") == load_config(with_dump(folder))


@pytest.mark.parametrize("num_tokens", [5, None])
def test_the_program_runs_in_a_fresh_process_and_prints_its_rows(folder: Path, num_tokens: int | None) -> None:
    command = [sys.executable, "final.py", *([] if num_tokens is None else [str(num_tokens)])]
    done = subprocess.run(
        command, cwd=folder / "rank_0", env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = re.search(r"(\d+) tokens on 2 ranks: \[(\d+), (\d+)\] rows, width (\d+)", done.stdout)
    assert rows is not None
    tokens, first, second, width = map(int, rows.groups())
    assert tokens == (num_tokens or 64) == first + second
    assert max(first, second) <= width < tokens
    assert f"result 0: torch.float64 (1, {tokens}, 16)" in done.stdout
    assert "2 collectives: gather_start" in done.stdout


def test_the_printed_program_is_the_one_that_runs(tmp_path: Path) -> None:
    model, ids = make_tiny(), make_ids(9)
    compilation = pcp_compiler.inspect(model, (ids,), with_dump(tmp_path))
    assert (tmp_path / "rank_0" / "final.py").read_text() == compilation.programs["prefill", 0].source
    assert f"{causal_attention.__code__.co_filename}:" in compilation.programs["prefill", 0].source


# ---------------------------------------------------------------------------------------------------------------------
# Several dumps


@torch.no_grad()
def test_two_compilations_of_one_run_do_not_overwrite_each_other(tmp_path: Path) -> None:
    compiled = torch_compile(make_tiny(), options=with_dump(tmp_path))
    compiled(make_ids(9))
    compiled(make_ids(1))
    assert len(pcp_compiler.compilations(compiled)) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["compilation_2", "rank_0", "rank_1"]
    assert "[1, T]" in (tmp_path / "rank_0" / "00_trace.txt").read_text()
    assert "[1, 1]" in (tmp_path / "compilation_2" / "rank_0" / "00_trace.txt").read_text()


def test_a_later_dump_leaves_no_stage_of_an_earlier_one(tmp_path: Path) -> None:
    model = make_tiny()
    pcp_compiler.inspect(model, (make_ids(9),), with_dump(tmp_path))
    assert (tmp_path / "rank_0" / SHARDED).exists()
    pcp_compiler.inspect(model, (make_ids(9),), with_dump(tmp_path, level="final"))
    assert sorted(files_of(tmp_path / "rank_0")) == ["config.yaml", "decisions.json", "final.py", "index.md"]


def test_threads_that_write_into_one_folder_leave_whole_files(tmp_path: Path) -> None:
    config = load_config(with_dump(tmp_path))
    trace = trace_module(make_tiny(), (make_ids(9),)).trace
    lowered = lower(trace, config, record=True)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: dump.write(tmp_path, lowered, config, trace), range(8)))
    files = files_of(tmp_path / "rank_0")
    assert not [name for name in files if name.endswith(".tmp")]
    assert files["final.py"] == lowered.program.source
    assert files["00_trace.txt"] == lowered.stages[0].text(trace.seeds)


# ---------------------------------------------------------------------------------------------------------------------
# Folders that cannot be written


def check_runs_with_a_warning(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, ids = make_tiny(), make_ids(9)
    with torch.no_grad(), caplog.at_level(logging.WARNING, logger="pcp_compiler"):
        compiled = torch_compile(model, options=with_dump(folder))
        torch.testing.assert_close(compiled(ids), model(ids), rtol=0, atol=1e-12)
    pcp_compiler.assert_sharded(compiled, calls=1, pcp_size=2)
    warnings = [record.getMessage() for record in caplog.records if record.name == "pcp_compiler.dump"]
    assert len(warnings) == 1
    assert warnings[0].startswith(f"dump.dir: cannot write {folder}: ")
    assert warnings[0].endswith("going on without a dump")


def test_a_file_in_the_way_of_the_folder_costs_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("mine")
    check_runs_with_a_warning(tmp_path / "file", caplog)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_folder_in_the_way_of_a_file_costs_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "rank_0" / "final.py").mkdir(parents=True)
    check_runs_with_a_warning(tmp_path, caplog)
    assert not list(tmp_path.rglob("*.tmp"))


@pytest.mark.skipif(os.name == "posix" and os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder_costs_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tmp_path.chmod(0o500)
    check_runs_with_a_warning(tmp_path, caplog)


@pytest.mark.skipif(sys.platform != "linux", reason="needs a file system that nobody may write to")
def test_a_file_system_that_cannot_be_written_costs_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    check_runs_with_a_warning(Path("/proc/pcp_dump"), caplog)
