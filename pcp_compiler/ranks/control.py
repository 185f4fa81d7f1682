"""What ranks tell each other beside their collectives, in the store of the process group.

    beat/<rank>             the latest sign of life: how far the rank is, what it does
    failure/<call>          the first failure of a call: one text, which every rank raises
    <call>/<topic>/<rank>   what a rank states about a call

A rank that waits polls what it waits for together with these keys, so that a failing, lagging or killed rank is named
on every rank, and nothing hangs. Calls are counted by each rank; all make the same calls in the same order.
"""

from __future__ import annotations

import atexit
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from pcp_compiler.errors import RankError

BEAT_S = 0.5
"""A rank gives a sign of life this often."""
LOOK_S = 0.2
"""A waiting rank looks at the others this often."""
LOST_S = 10.0
"""A rank is taken for dead after this long without a sign of life: twenty beats, so that a busy machine is no death."""
BROKEN_S = 3.0
"""The same once a connection broke, which is a reason to believe it."""
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 2e-5, 5e-3
"""Pause between two polls, doubled each time."""

COMPILING = "compiling"
LEFT = "its process has ended"
IDLE = "outside any call"


class Beat(NamedTuple):
    """One sign of life: a number that grows, the call and the collective that the rank is at, what it does."""

    number: int
    call: int
    step: int
    activity: str

    @classmethod
    def from_json(cls, text: bytes) -> Self:
        """Return the beat that `to_json` wrote."""
        return cls(*json.loads(text))

    def to_json(self) -> str:
        """Return the beat as text."""
        return json.dumps(self)

    @property
    def position(self) -> tuple[int, int]:
        """How far the rank is; grows."""
        return self.call, self.step


@dataclass(slots=True)
class Peer:
    """Another rank as seen from here: its latest beat, and for how long we have looked without seeing a new one."""

    beat: Beat | None = None
    silent_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Goal:
    """What a rank waits for: at which call and collective, in words, how long at most, the config key that says so."""

    call: int
    step: int
    what: str
    limit_s: float
    knob: str


class ControlPlane:
    """One rank's signs of life, its view of the others, and the texts they exchange."""

    def __init__(self, open_store: Callable[[], Store], rank: int, names: Sequence[str]) -> None:
        """Start to beat.

        Args:
            open_store: returns a new connection to a store of this group alone. names: what messages call each rank.
        """
        self.rank = rank
        self.names = tuple(names)
        self._store, self._beat_store = open_store(), open_store()  # a rank that waits in one beats through the other
        self._state = (0, 0, IDLE)
        self._num_beats = 0
        self._peers = {other: Peer() for other in range(len(names)) if other != rank}
        self._own_keys: list[tuple[int, str]] = []
        self._stop, self._hurry = threading.Event(), threading.Event()
        self._publish_beat()
        threading.Thread(target=self._beat_until_stopped, name="pcp_spec heartbeat", daemon=True).start()
        atexit.register(self.leave)

    # --- own state ---------------------------------------------------------------------------------------------------

    def set_state(self, call: int, step: int, activity: str) -> None:
        """Say what this rank does from now on; the others learn it with the next beat, at once outside collectives."""
        self._state = (call, step, activity)
        if step == 0:
            self._hurry.set()

    def leave(self) -> None:
        """Say that this process ends, and stop beating."""
        if not self._stop.is_set():
            self._stop.set()
            self.set_state(*self._state[:2], LEFT)
            self._publish_beat()

    def _beat_until_stopped(self) -> None:
        while not self._stop.is_set():
            self._hurry.wait(BEAT_S)
            self._hurry.clear()
            if not dist.is_initialized() or not self._publish_beat():
                return  # the caller has taken the process group down, and the store with it

    def _publish_beat(self) -> bool:
        self._num_beats += 1
        try:
            self._beat_store.set(f"beat/{self.rank}", Beat(self._num_beats, *self._state).to_json())
        except RuntimeError:  # torch's store errors; ranks that wait meet the same one and raise it
            return False
        return True

    # --- texts -------------------------------------------------------------------------------------------------------

    def exchange(self, topic: str, text: str, goal: Goal) -> list[str]:
        """Give a text about a call to all ranks, and return the texts of all ranks, in rank order.

        Raises:
            RankError: the call failed elsewhere, or a rank did not come in time.
        """
        keys = [f"{goal.call}/{topic}/{rank}" for rank in range(len(self.names))]
        with self._store_errors():
            self._store.set(keys[self.rank], text)
            self._own_keys.append((goal.call, keys[self.rank]))
            self.wait(lambda: self._store.check(keys), goal, lambda _: self._missing(keys))
            self.raise_if_failed(goal.call)  # the others may have given up on this rank
            texts = [self._store.get(key).decode() for key in keys]
        self._forget_before(goal.call)
        return texts

    def fail(self, call: int, message: str) -> RankError:
        """Note why a call failed, unless a rank did before, and return the error that every rank raises."""
        with self._store_errors():
            return RankError(self._store.compare_set(f"failure/{call}", "", message).decode())

    def raise_if_failed(self, call: int) -> None:
        """Raise RankError when a rank has noted a failure of this call."""
        with self._store_errors():
            if self._store.check([f"failure/{call}"]):
                raise RankError(self._store.get(f"failure/{call}").decode())

    def _missing(self, keys: Sequence[str]) -> set[int]:
        return {rank for rank, key in enumerate(keys) if not self._store.check([key])}

    def _forget_before(self, call: int) -> None:
        """Delete own texts of earlier calls: every rank has come to this call, so every rank has read them."""
        while self._own_keys and self._own_keys[0][0] < call:
            self._store.delete_key(self._own_keys.pop(0)[1])

    @contextmanager
    def _store_errors(self) -> Iterator[None]:
        try:
            yield
        except dist.DistError as fault:
            raise RankError(
                f"the store of the process group does not answer: the process that holds it (rank 0 of the whole job, "
                f"or torchrun) is gone; {_first_line(fault)}"
            ) from None

    # --- waiting -----------------------------------------------------------------------------------------------------

    def wait(
        self, is_done: Callable[[], bool], goal: Goal, find_behind: Callable[[Goal], set[int]] | None = None
    ) -> None:
        """Return once `is_done()`; look at the other ranks meanwhile.

        Time does not count while a rank that is waited for says that it compiles.

        Args:
            find_behind: returns the ranks that have not come yet; None: those whose signs of life say so.
        Raises:
            RankError: the call failed elsewhere, a rank that is waited for is gone, or the time is over.
        """
        pause_s, waited_s, last_look = SHORTEST_PAUSE_S, 0.0, time.monotonic()
        while not is_done():
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            now = time.monotonic()
            if now - last_look < LOOK_S:
                continue
            looked_s = min(now - last_look, 2 * LOOK_S)  # a process that was stopped for a while blames nobody
            last_look = now
            behind = self._look(goal, looked_s, LOST_S, find_behind)
            if not any(self._activity(rank) == COMPILING for rank in behind):
                waited_s += looked_s
            if waited_s > goal.limit_s and not is_done():
                raise self.fail(goal.call, self._describe_lag(goal, behind))

    def explain(self, fault: BaseException, goal: Goal) -> RankError:
        """Return why a connection broke: a failure that a rank noted, or a rank that is gone; else the fault itself."""
        for _ in range(round(2 * BROKEN_S / LOOK_S)):
            try:
                self._look(goal, LOOK_S, BROKEN_S)
            except RankError as found:
                return found
            time.sleep(LOOK_S)
        return self.fail(goal.call, f"{goal.what}: {self.names[self.rank]} lost a connection: {_first_line(fault)}")

    def _find_behind(self, goal: Goal) -> set[int]:
        """Return the ranks that say they are not as far, and those that have not said anything."""
        reached = (goal.call, goal.step)
        return {rank for rank, peer in self._peers.items() if peer.beat is None or peer.beat.position < reached}

    def _look(
        self, goal: Goal, looked_s: float, lost_s: float, find_behind: Callable[[Goal], set[int]] | None = None
    ) -> set[int]:
        """Look at all ranks once and return those behind; raise RankError for a failure or a rank that is gone."""
        with self._store_errors():
            self.raise_if_failed(goal.call)
            for rank, peer in self._peers.items():
                self._look_at(rank, peer, looked_s)
            behind = (find_behind or self._find_behind)(goal)
        for rank, peer in self._peers.items():
            if peer.silent_s > lost_s:
                raise self.fail(
                    goal.call,
                    f"{goal.what}: {self.names[rank]} is gone: no sign of life for {lost_s:g} s (killed, stopped or "
                    f"cut off); it was last {self._activity(rank)}",
                )
            if rank in behind and self._activity(rank) == LEFT:
                raise self.fail(goal.call, f"{goal.what}: {self.names[rank]} is gone: {LEFT}")
        return behind

    def _look_at(self, rank: int, peer: Peer, looked_s: float) -> None:
        if peer.beat is None and not self._store.check([f"beat/{rank}"]):
            return
        beat = Beat.from_json(self._store.get(f"beat/{rank}"))
        is_alive = peer.beat is None or beat.number != peer.beat.number or beat.activity == LEFT
        peer.silent_s = 0.0 if is_alive else peer.silent_s + looked_s
        peer.beat = beat

    def _activity(self, rank: int) -> str:
        peer = self._peers.get(rank)
        return "not started" if peer is None or peer.beat is None else peer.beat.activity

    def _describe_lag(self, goal: Goal, behind: set[int]) -> str:
        late = ", ".join(f"{self.names[rank]} ({self._activity(rank)})" for rank in sorted(behind)) or "a connection"
        return f"{goal.what}: waited {goal.limit_s:g} s ({goal.knob}) for {late}"


def _first_line(fault: BaseException) -> str:
    return (str(fault) or type(fault).__name__).splitlines()[0]
