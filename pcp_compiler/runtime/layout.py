"""Index inputs of a step: where each row is stored and what it may read, of the whole batch and of each rank.

They are made on the host; who runs a program brings them to its device.

Everything is copied out of the batch: what one model's programs do to their inputs never reaches another's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pcp_compiler.config_sections import ParallelConfig
from pcp_compiler.passes.attach_kv import BLOCK_TABLES, SLOTS, SPANS
from pcp_compiler.passes.gather_kv import EXPANDED_SLOTS
from pcp_compiler.plan.dispatch import LiveBatch, context_bound
from pcp_compiler.plan.partition import Partition, partition_batch
from pcp_compiler.ranks import index_tensors
from pcp_compiler.runtime.batch import Batch, local_view


@dataclass(frozen=True, slots=True, eq=False)
class StepIndex:
    """Index inputs of one step: of the whole batch, and of each rank when its rows are sharded."""

    whole: Mapping[str, Tensor]
    ranks: tuple[Mapping[str, Tensor], ...]
    partition: Partition | None
    live: LiveBatch
    """What the step needs of a capture."""


def live_batch(batch: Batch, partition: Partition | None, max_model_len: int) -> LiveBatch:
    """Return what a step needs of a capture. All steps with prompts count as prefills: they run the same program."""
    phase = batch.phase
    num_rows = batch.num_tokens if partition is None else partition.width
    return LiveBatch(
        "prefill" if phase == "mixed" else phase, num_rows, batch.num_requests, int(batch.query_lens.max()),
        context_bound(batch.seq_lens, max_model_len=max_model_len),
    )  # fmt: skip


def widen(partition: Partition, batch: Batch, parallel: ParallelConfig, width: int) -> Partition:
    """Return the same partition with more rows of padding on every rank."""
    return partition_batch(
        batch.query_lens, batch.is_prefilling, pcp_size=parallel.pcp_size, shard_decode=parallel.shard_decode,
        min_tokens_to_shard=parallel.min_tokens_to_shard_resolved, width=width,
    )  # fmt: skip


def partition_step(batch: Batch, parallel: ParallelConfig) -> Partition | None:
    """Return the rows of each rank; None when all ranks run all rows."""
    if parallel.pcp_size == 1:
        return None
    prompts = batch.query_lens[batch.is_prefilling]
    if not parallel.shard_decode and (prompts < max(2, parallel.min_tokens_to_shard_resolved)).all():
        return None
    return partition_batch(
        batch.query_lens, batch.is_prefilling, pcp_size=parallel.pcp_size, shard_decode=parallel.shard_decode,
        min_tokens_to_shard=parallel.min_tokens_to_shard_resolved,
    )  # fmt: skip


def step_index(batch: Batch, partition: Partition | None, block_size: int, live: LiveBatch) -> StepIndex:
    """Return the index inputs of a step, on the host; block tables are as wide as its longest request is long."""
    num_blocks = -(-int(batch.seq_lens.max()) // block_size)
    (requests,) = batch.query_lens.nonzero()
    spans = np.stack([requests, batch.query_start[requests], batch.query_lens[requests], batch.seq_lens[requests]], 1)
    whole = {
        SLOTS: host_tensor(batch.slots),
        BLOCK_TABLES: host_tensor(batch.block_tables[:, :num_blocks]),
        SPANS: host_tensor(spans),
    }
    if partition is None:
        return StepIndex(whole, (), None, live)
    views = [local_view(batch, partition, rank) for rank in range(len(partition.per_rank))]
    of_all_ranks = {
        SLOTS: whole[SLOTS],
        BLOCK_TABLES: whole[BLOCK_TABLES],
        EXPANDED_SLOTS: host_tensor(views[0].expanded_slots),
    }
    ranks = tuple(
        {
            **index_tensors(partition, rank, torch.device("cpu")),
            **of_all_ranks,
            SPANS: spans_tensor(view.spans),
        }
        for rank, view in enumerate(views)
    )
    return StepIndex(whole, ranks, partition, live)


def spans_tensor(spans: Iterable[tuple[int, ...]]) -> Tensor:
    """Return spans as [N, 4] int64 on the host."""
    return torch.tensor([tuple(span) for span in spans], dtype=torch.int64).reshape(-1, 4)


def host_tensor(values: NDArray[np.number]) -> Tensor:
    """Return a copy of an array."""
    return torch.from_numpy(values.copy())


def to_tensor(values: NDArray[np.number], device: torch.device) -> Tensor:
    """Return a copy of an array on a device; the host does not wait for what runs there."""
    copied = torch.tensor(values)
    if device.type == "cuda":
        copied = copied.pin_memory()
    return copied.to(device, non_blocking=True)
