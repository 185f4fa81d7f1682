"""What is compared between ranks, and the message when it differs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pcp_compiler.config import load_config
from pcp_compiler.ranks import agreement

NAMES = ["rank 0", "rank 1", "rank 2"]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int8, torch.bool]


def some_values(dtype: torch.dtype, *shape: int) -> Tensor:
    return (torch.rand(shape, generator=torch.Generator().manual_seed(0)) * 100).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (40, 50), (2, 3, 4, 5)])
def test_a_parameter_hash_is_a_function_of_the_values(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = some_values(dtype, *shape)
    assert agreement.hash_parameter(x) == agreement.hash_parameter(x.clone())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.complex64])
def test_any_changed_element_changes_the_parameter_hash(dtype: torch.dtype) -> None:
    x = torch.zeros(37, 53).to(dtype)
    for row, column in ((0, 0), (1, 1), (36, 52), (17, 3)):
        changed = x.clone()
        changed[row, column] = 1
        assert agreement.hash_parameter(changed) != agreement.hash_parameter(x)
    swapped = x.clone()
    swapped[0, 0], swapped[4, 6] = 1, 2
    other = x.clone()
    other[0, 0], other[4, 6] = 2, 1
    assert agreement.hash_parameter(swapped) != agreement.hash_parameter(other)


def test_a_transposed_parameter_has_another_hash_unless_it_is_copied() -> None:
    x = some_values(torch.float32, 40, 40)
    assert agreement.hash_parameter(x.T) == agreement.hash_parameter(x.T.contiguous()) != agreement.hash_parameter(x)


def test_minus_zero_is_another_value() -> None:
    assert agreement.hash_values(torch.tensor([0.0])) != agreement.hash_values(torch.tensor([-0.0]))


def test_the_first_topic_that_differs_is_found_and_one_left_out_is_not_compared() -> None:
    def stated(**topics: dict[str, str]) -> dict[str, str]:
        return agreement.digests({name.replace("_", " "): entries for name, entries in topics.items()})

    same = stated(config={"a": "1"}, shapes={"x": "[1]"})
    assert agreement.find_difference([same, same]) is None
    other = stated(config={"a": "2"}, shapes={"x": "[2]"})
    assert agreement.find_difference([same, other]) == "config"
    first_call = stated(config={"a": "1"}, shapes={"x": "[1]"}, token_ids={"x": "abc"})
    assert agreement.find_difference([same, first_call]) is None


def test_the_message_groups_ranks_by_value_and_is_short() -> None:
    entries = [{"a": "1", "b": "5", "c": "7"}, {"a": "1", "b": "6"}, {"a": "1", "b": "5", "c": "7"}]
    assert agreement.describe_difference("shapes", entries, NAMES).splitlines() == [
        "ranks differ in their shapes; give every rank the same batch",
        "  b: 5 on rank 0, rank 2; 6 on rank 1",
        "  c: 7 on rank 0, rank 2; missing on rank 1",
    ]
    many = [{str(number): str(number + rank) for number in range(9)} for rank in range(3)]
    assert agreement.describe_difference("parameters", many, NAMES).splitlines()[-1] == "  ... and 5 more"


def test_ranks_may_dump_into_other_folders() -> None:
    left, right = ({**load_config({"dump.dir": folder}).resolved()} for folder in ("a", "b"))
    assert agreement.describe_config(left) == agreement.describe_config(right)
    assert agreement.describe_config(left)["parallel.timeout_s.step"] == "60.0"
