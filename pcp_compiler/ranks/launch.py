"""Which process group the ranks form: the caller's, or one made from torchrun's environment."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from pcp_compiler.config import Config
from pcp_compiler.config_sections import ParallelConfig
from pcp_compiler.errors import ConfigError, RankError

log = logging.getLogger(__name__)

MESH_AXIS = "pcp"
_ENVIRONMENT = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True)
class Launch:
    """What torchrun tells a process: its rank among how many, and where they meet."""

    rank: int
    world_size: int
    address: str


def split_group(options: object) -> tuple[object, Any]:
    """Return option `group`, which is no part of a Config, and the other options."""
    if not isinstance(options, Mapping) or "group" not in options:
        return None, options
    rest = dict(options)
    return rest.pop("group"), rest


def find_process_group(config: Config, group: object) -> dist.ProcessGroup | None:
    """Return the process group whose ranks run the program; None: virtual ranks in this process.

    Args:
        group: option `group`, a ProcessGroup or DeviceMesh; None: all processes.
    Raises:
        ConfigError: option, `parallel.ranks` or environment do not fit. RankError: the processes do not meet.
    """
    parallel = config.parallel
    if parallel.ranks == "virtual":
        if group is not None:
            raise ConfigError(
                "group: given with parallel.ranks: virtual; allowed: parallel.ranks: distributed, or auto"
            )
        return None
    found = _from_option(group) if group is not None else _from_process(parallel)
    if parallel.ranks == "auto" and group is None and (found is None or parallel.pcp_size == 1 or found.size() == 1):
        log.info("parallel.ranks: %d virtual ranks run in lock-step in this process", parallel.pcp_size)
        return None
    if found is None:
        raise ConfigError(
            "parallel.ranks: distributed, but there is no process group; start with torchrun, or call "
            "torch.distributed.init_process_group first"
        )
    return found


def check_size(pcp_size: int, group_size: int) -> None:
    """Raise ConfigError unless the config asks for as many ranks as there are."""
    if pcp_size != group_size:
        raise ConfigError(
            f"parallel.pcp_size is {pcp_size}, the process group has {group_size} ranks; allowed: equal; pass option "
            f"group (a process group, or a DeviceMesh with axis {MESH_AXIS!r}) of {pcp_size} ranks, or parallel.ranks: "
            "virtual"
        )


def read_environment(environment: Mapping[str, str]) -> Launch | None:
    """Return what torchrun set; None when this process was started without it.

    Raises:
        ConfigError: only some of RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT are set, or to no sensible number.
    """
    if "RANK" not in environment and "WORLD_SIZE" not in environment:
        return None
    missing = [name for name in _ENVIRONMENT if name not in environment]
    if missing:
        given = ", ".join(f"{name}={environment[name]}" for name in _ENVIRONMENT if name in environment)
        raise ConfigError(
            f"environment: {given} without {', '.join(missing)}; allowed: all of {', '.join(_ENVIRONMENT)}, as "
            "torchrun sets them, or parallel.ranks: virtual"
        )
    rank, world_size = (_read_number(environment, name) for name in ("RANK", "WORLD_SIZE"))
    if rank >= world_size:
        raise ConfigError(f"environment: RANK={rank} with WORLD_SIZE={world_size}; allowed: RANK < WORLD_SIZE")
    return Launch(rank, world_size, f"{environment['MASTER_ADDR']}:{environment['MASTER_PORT']}")


def device_backends(group: dist.ProcessGroup) -> dict[str, str]:
    """Return the communication library of each device type: {"cpu": "gloo", "cuda": "nccl"}."""
    pairs = (entry.partition(":") for entry in dist.get_backend_config(group).split(","))
    return {device: backend for device, _, backend in pairs}


def _read_number(environment: Mapping[str, str], name: str) -> int:
    if not environment[name].isdecimal():
        raise ConfigError(f"environment: {name}={environment[name]!r}; allowed: an integer >= 0")
    return int(environment[name])


def _from_option(group: object) -> dist.ProcessGroup:
    if isinstance(group, DeviceMesh):
        return _from_mesh(group)
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ConfigError("group: this process is not in the group; allowed: a group that it is in")
    if not isinstance(group, dist.ProcessGroup):
        raise ConfigError(f"group: got {type(group).__name__}; allowed: ProcessGroup or DeviceMesh")
    return group


def _from_mesh(mesh: DeviceMesh) -> dist.ProcessGroup:
    if mesh.ndim == 1:
        return mesh.get_group()
    names = mesh.mesh_dim_names or ()
    if MESH_AXIS not in names:
        raise ConfigError(
            f"group: the DeviceMesh has the axes {list(names)}; allowed: one axis, or one named {MESH_AXIS!r}"
        )
    return mesh.get_group(MESH_AXIS)


def _from_process(parallel: ParallelConfig) -> dist.ProcessGroup | None:
    """Return the group of all processes, made from the environment when the caller has not made it."""
    if not dist.is_available():
        return None
    if dist.is_initialized():
        return dist.group.WORLD
    launch = read_environment(os.environ)
    if launch is None or (launch.world_size == 1 and parallel.ranks == "auto"):
        return None
    _meet(launch, parallel.timeout_s.start)
    return dist.group.WORLD


def _meet(launch: Launch, timeout_s: float) -> None:
    has_nccl = torch.cuda.is_available() and dist.is_nccl_available()
    backend = "cpu:gloo,cuda:nccl" if has_nccl else "gloo"
    log.info("rank %d of %d meets the others at %s (%s)", launch.rank, launch.world_size, launch.address, backend)
    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
    except (dist.DistError, ValueError) as fault:
        reason = str(fault).splitlines()[0]
        raise RankError(
            f"rank {launch.rank} of {launch.world_size} cannot meet the others at MASTER_ADDR:MASTER_PORT "
            f"{launch.address}: {reason}; choose a free port, and start all ranks within {timeout_s:g} s "
            "(parallel.timeout_s.start)"
        ) from None
