"""Which process group is found, and what is refused, in this process alone."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

import pcp_compiler
from pcp_compiler.config import load_config
from pcp_compiler.errors import ConfigError, PcpError, RankError
from pcp_compiler.ranks.launch import Launch, check_size, find_process_group, read_environment, split_group
from tests.distributed.scenarios import equals_eager, make_model, settings

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.fixture
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Take torchrun's variables away, and the process group that a test makes."""
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    yield monkeypatch
    if dist.is_initialized():
        dist.destroy_process_group()


def parallel(**values: Any) -> Any:
    return load_config({"parallel": {"pcp_size": 4, **values}})


def test_torchruns_environment_is_read() -> None:
    assert read_environment(TORCHRUN) == Launch(1, 4, "127.0.0.1:29500")
    assert read_environment({"MASTER_PORT": "29500", "LOCAL_RANK": "0"}) is None


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "0"}, "environment: RANK=0 without WORLD_SIZE, MASTER_ADDR, MASTER_PORT; allowed: all of"),
        ({"WORLD_SIZE": "4"}, "environment: WORLD_SIZE=4 without RANK, "),
        ({**TORCHRUN, "RANK": "one"}, "environment: RANK='one'; allowed: an integer >= 0"),
        ({**TORCHRUN, "WORLD_SIZE": "-4"}, "environment: WORLD_SIZE='-4'; allowed: an integer >= 0"),
        ({**TORCHRUN, "RANK": "4"}, "environment: RANK=4 with WORLD_SIZE=4; allowed: RANK < WORLD_SIZE"),
    ],
)
def test_half_an_environment_is_refused(environment: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_environment(environment)
    assert message in str(caught.value)


def test_rank_without_world_size_is_refused_in_the_first_call(no_launcher: pytest.MonkeyPatch) -> None:
    compiled = pcp_compiler.compile(make_model(), settings())
    no_launcher.setenv("RANK", "0")
    with pytest.raises(ConfigError, match="RANK=0 without WORLD_SIZE"):
        equals_eager(compiled, make_model())
    no_launcher.delenv("RANK")
    assert equals_eager(compiled, make_model())


def test_without_a_process_group_auto_is_virtual_and_says_so(
    no_launcher: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="pcp_compiler.ranks.launch"):
        assert find_process_group(parallel(), None) is None
    assert caplog.messages == ["parallel.ranks: 4 virtual ranks run in lock-step in this process"]


def test_virtual_ranks_do_not_read_the_environment(no_launcher: pytest.MonkeyPatch) -> None:
    no_launcher.setenv("RANK", "0")
    assert find_process_group(parallel(ranks="virtual"), None) is None


def test_distributed_ranks_without_a_process_group_are_refused(no_launcher: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="there is no process group; start with torchrun, or call"):
        find_process_group(parallel(ranks="distributed"), None)


def test_a_group_with_virtual_ranks_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"group: given with parallel.ranks: virtual"):
        find_process_group(parallel(ranks="virtual"), "a group")


@pytest.mark.parametrize("group", ["pcp", 4, [0, 1]])
def test_a_group_of_another_type_is_refused(group: object) -> None:
    with pytest.raises(ConfigError, match=f"group: got {type(group).__name__}; allowed: ProcessGroup or DeviceMesh"):
        find_process_group(parallel(), group)


def test_a_group_without_this_process_is_refused() -> None:
    with pytest.raises(ConfigError, match="group: this process is not in the group"):
        find_process_group(parallel(), dist.GroupMember.NON_GROUP_MEMBER)


@pytest.mark.parametrize("pcp_size", [2, 8])
def test_a_pcp_size_over_or_under_the_group_names_both(pcp_size: int) -> None:
    with pytest.raises(ConfigError) as caught:
        check_size(pcp_size, 4)
    assert f"parallel.pcp_size is {pcp_size}, the process group has 4 ranks; allowed: equal" in str(caught.value)
    check_size(4, 4)


def test_a_busy_port_is_one_clear_error(no_launcher: pytest.MonkeyPatch) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        for name, value in {**TORCHRUN, "RANK": "0", "MASTER_PORT": str(port)}.items():
            no_launcher.setenv(name, value)
        with pytest.raises(RankError) as caught:
            find_process_group(parallel(timeout_s={"start": 5}), None)
    assert f"rank 0 of 4 cannot meet the others at MASTER_ADDR:MASTER_PORT 127.0.0.1:{port}: " in str(caught.value)
    assert isinstance(caught.value, PcpError)


def test_a_group_of_one_process_leaves_auto_virtual_and_is_refused_as_distributed(
    no_launcher: pytest.MonkeyPatch,
) -> None:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    model = make_model()
    compiled = pcp_compiler.compile(model, settings())
    assert equals_eager(compiled, model)
    assert pcp_compiler.assert_sharded(compiled, 1, 4)[0].rank is None
    strict = pcp_compiler.compile(make_model(), settings(ranks="distributed"))
    with pytest.raises(ConfigError, match=r"parallel.pcp_size is 4, the process group has 1 ranks"):
        equals_eager(strict, model)


def test_one_distributed_rank_runs_unsharded(no_launcher: pytest.MonkeyPatch) -> None:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    model = make_model()
    compiled = pcp_compiler.compile(model, {"parallel": {"pcp_size": 1, "ranks": "distributed"}})
    assert equals_eager(compiled, model)
    assert pcp_compiler.assert_sharded(compiled, 1, 1)[0].rank == 0


def test_the_option_group_is_no_part_of_the_config() -> None:
    options = {"parallel.pcp_size": 4, "group": "a group"}
    assert split_group(options) == ("a group", {"parallel.pcp_size": 4})
    assert options["group"] == "a group", "the caller's options were changed"
    assert split_group("pcp.yaml") == (None, "pcp.yaml")
    assert split_group(None) == (None, None)
