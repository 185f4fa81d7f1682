"""Running the support matrix: one trace a variant, lowered for each number of ranks, compared at each length."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

import pcp_compiler
from pcp_compiler.backends.compilation import CallRecord, Compilation
from pcp_compiler.errors import CallError, UnsupportedGraphError
from pcp_compiler.trace import ModuleTrace, trace_module
from tests.matrix.families import VOCAB_SIZE, Variant

NO_CACHE = {"use_cache": False}
Outcome = Literal["equal", "refused", "failed"]


@dataclass(frozen=True, slots=True)
class Cell:
    """One variant on P ranks at one length: what came out, why when it is not equal, and how far from eager."""

    pcp_size: int
    num_tokens: int
    outcome: Outcome
    reason: str = ""
    difference: float = 0.0


@dataclass(slots=True)
class VariantResult:
    """All cells of one variant."""

    variant: Variant
    cells: list[Cell] = field(default_factory=list)

    def count(self, outcome: Outcome) -> int:
        """Return how many cells came out so."""
        return sum(cell.outcome == outcome for cell in self.cells)

    @property
    def worst(self) -> float:
        """Largest difference to eager."""
        return max((cell.difference for cell in self.cells), default=0.0)

    @property
    def refusal(self) -> str | None:
        """First line of the refusal, None when nothing was refused."""
        return next((cell.reason.splitlines()[0] for cell in self.cells if cell.outcome == "refused"), None)

    @property
    def fault(self) -> str | None:
        """Why this variant fails the matrix, None when it does not."""
        wanted = "equal" if self.variant.refusal is None else "refused"
        for cell in self.cells:
            if wanted == "refused" and cell.pcp_size == 1:
                continue  # one rank has nothing to share, so most models run
            if cell.outcome != wanted:
                return f"P = {cell.pcp_size}, T = {cell.num_tokens}: {cell.outcome}, must be {wanted}; {cell.reason}"
        if self.variant.refusal is not None and self.variant.refusal not in (self.refusal or ""):
            return f"refused for another reason than {self.variant.refusal!r}: {self.refusal}"
        return None if self.cells else "no cell ran"


def lengths_for(pcp_size: int) -> list[int]:
    """Return prompt lengths around which the layout of P ranks changes its form, two ordinary ones, and none at all."""
    around = {1, 2, pcp_size - 1, pcp_size, 2 * pcp_size - 1, 2 * pcp_size, 2 * pcp_size + 1, 64, 129}
    return sorted(around | {0})


def make_ids(num_tokens: int, batch: int = 1) -> Tensor:
    """Return token ids [B, T], int64, other ones for every length."""
    generator = torch.Generator().manual_seed(num_tokens)
    return torch.randint(0, VOCAB_SIZE, (batch, num_tokens), generator=generator)


def run_variant(
    variant: Variant, pcp_sizes: Iterable[int], lengths: Callable[[int], Iterable[int]] = lengths_for
) -> VariantResult:
    """Trace a variant once and compare it with eager on every number of ranks at every length."""
    result = VariantResult(variant)
    expected = Expected(variant.reference())
    model = variant.model()
    traced: ModuleTrace | None = None
    for pcp_size in pcp_sizes:
        wanted = sorted(set(lengths(pcp_size)))
        try:
            traced = traced or trace_module(model, (make_ids(19),), NO_CACHE)
            config = pcp_compiler.load_config({"parallel": {"pcp_size": pcp_size, "min_tokens_to_shard": 0}})
            compilation = Compilation(config, traced.trace, name=variant.name)
        except UnsupportedGraphError as refusal:
            result.cells += [Cell(pcp_size, num_tokens, "refused", str(refusal)) for num_tokens in wanted]
            continue
        result.cells += [_run_cell(compilation, traced, expected, variant, num_tokens) for num_tokens in wanted]
    return result


class Expected:
    """What eager computes, kept for each length."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._logits: dict[int, Tensor | None] = {}

    def logits(self, num_tokens: int) -> Tensor | None:
        """Return logits [1, T, V]; None when eager itself fails on a prompt of that length."""
        if num_tokens not in self._logits:
            self._logits[num_tokens] = self._run(num_tokens)
        return self._logits[num_tokens]

    @torch.no_grad()
    def _run(self, num_tokens: int) -> Tensor | None:
        try:
            logits: Tensor = self._model(make_ids(num_tokens), **NO_CACHE).logits
        except (RuntimeError, IndexError):
            if num_tokens:
                raise
            return None
        return logits


def _run_cell(
    compilation: Compilation, traced: ModuleTrace, expected: Expected, variant: Variant, num_tokens: int
) -> Cell:
    """Run one prompt and compare the logits at all its positions."""
    pcp_size = compilation.config.parallel.pcp_size
    reference = expected.logits(num_tokens)
    try:
        flat = compilation.run(traced.flat_inputs((make_ids(num_tokens),), NO_CACHE))
    except CallError as error:
        outcome: Outcome = "equal" if reference is None else "failed"
        return Cell(pcp_size, num_tokens, outcome, str(error))
    if reference is None:
        return Cell(pcp_size, num_tokens, "failed", "eager raises an error here, and we do not")
    logits = traced.rebuild(flat).logits
    if logits.shape != reference.shape or logits.dtype != reference.dtype:
        return Cell(pcp_size, num_tokens, "failed", f"{logits.dtype} {tuple(logits.shape)} is not like eager's")
    difference = distance(logits, reference)
    reason = path_fault(compilation, compilation.calls[-1], num_tokens)
    if reason is None and not difference <= variant.tolerance:
        reason = f"differs from eager by {difference:.1e}, allowed: {variant.tolerance:.0e}"
    return Cell(pcp_size, num_tokens, "equal" if reason is None else "failed", reason or "", difference)


def distance(logits: Tensor, reference: Tensor) -> float:
    """Return the largest |difference|, over the largest |logit| of the reference."""
    gap = (logits.double() - reference.double()).abs().max() / reference.double().abs().max()
    return gap.item()


def path_fault(compilation: Compilation, record: CallRecord, num_tokens: int) -> str | None:
    """Return what shows that the ranks did not share a prompt's rows, None when they did."""
    pcp_size = compilation.config.parallel.pcp_size
    if record.num_tokens != num_tokens:
        return f"the last call that is on record had {record.num_tokens} tokens"
    if pcp_size == 1 or num_tokens == 1:
        return None if not record.is_sharded else "one row was sharded"
    if sum(record.rows_per_rank) != num_tokens or not record.width < num_tokens:
        return f"rows per rank {record.rows_per_rank}, width {record.width}"
    if not 0 < len(record.collectives) == len(compilation.lowered.program.schedule):
        return f"{len(record.collectives)} of {len(compilation.lowered.program.schedule)} collectives ran"
    return None


def check_torch_compile(variant: Variant, pcp_size: int, lengths: Iterable[int]) -> Iterator[Cell]:
    """Compare `pcp_compiler.compile`, which goes through torch.compile, with eager, and prove its path."""
    torch.compiler.reset()
    expected = Expected(variant.reference())
    compiled = pcp_compiler.compile(variant.model(), {"parallel": {"pcp_size": pcp_size, "min_tokens_to_shard": 0}})
    for calls, num_tokens in enumerate(lengths, start=1):
        reference = expected.logits(num_tokens)
        assert reference is not None
        difference = distance(compiled(make_ids(num_tokens), **NO_CACHE).logits, reference)
        pcp_compiler.assert_sharded(compiled, calls=calls, pcp_size=pcp_size)
        is_equal = difference <= variant.tolerance
        reason = "" if is_equal else f"differs from eager by {difference:.1e}"
        yield Cell(pcp_size, num_tokens, "equal" if is_equal else "failed", reason, difference)
