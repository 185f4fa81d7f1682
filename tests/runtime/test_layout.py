"""Index inputs of a step whose rows are sharded: where gathered rows are written."""

from __future__ import annotations

import pytest
import torch

from pcp_compiler.config import load_config
from pcp_compiler.passes.attach_kv import SLOTS
from pcp_compiler.passes.gather_kv import EXPANDED_SLOTS
from pcp_compiler.runtime.batch import PAD_SLOT, RequestRows, build_batch
from pcp_compiler.runtime.layout import live_batch, partition_step, step_index, widen

BLOCK_SIZE = 4


@pytest.mark.parametrize("num_pads", [0, 3])
@pytest.mark.parametrize("pcp_size", [2, 3])
def test_each_token_has_one_row_that_writes_it_and_all_ranks_share_the_tensor(pcp_size: int, num_pads: int) -> None:
    rows = [RequestRows([5] * 2, 3, False, 2, [1, 2]), RequestRows(range(11), 0, True, 1, [3, 4, 5])]
    batch = build_batch(rows, BLOCK_SIZE, 8)
    parallel = load_config({"parallel": {"pcp_size": pcp_size}}).parallel
    partition = partition_step(batch, parallel)
    assert partition is not None
    partition = widen(partition, batch, parallel, partition.width + num_pads)
    step = step_index(batch, partition, BLOCK_SIZE, live_batch(batch, partition, 64))
    written = step.ranks[0][EXPANDED_SLOTS]
    assert written.shape == (pcp_size * partition.width,) and written.dtype == torch.int64
    assert all(index[EXPANDED_SLOTS] is written for index in step.ranks), "a device gets it in one copy"
    assert torch.equal(written[step.ranks[0]["restore"]], step.whole[SLOTS])
    assert (written >= 0).sum() == batch.num_tokens and (written[written < 0] == PAD_SLOT).all()
    assert EXPANDED_SLOTS not in step.whole
