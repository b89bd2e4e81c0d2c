"""The tasks that a worker has claimed and not finished, and their leases."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from headway._lease import Owner
from headway.core.failure import Failure
from headway.errors import HeadwayError
from headway.queue.handlers import Handler
from headway.queue.store import claim as store_claim
from headway.queue.store import complete
from headway.queue.store.claim import Claimant
from headway.queue.task import Claim
from headway.queue.task_queue import TaskQueue
from headway.queue.worker.execution import Ended
from headway.queue.worker.heartbeat import Settings
from headway.queue.worker.outcomes import Outcomes
from headway.queue.worker.source import CurrentSource
from headway.telemetry import Log

log = Log("queue")


class Claims:
    """A worker's claims; see the module. The heartbeat thread may call `renew` and `release_waiting`."""

    def __init__(
        self,
        queue: TaskQueue,
        name: str,
        *,
        source: CurrentSource,
        outcomes: Outcomes,
        settings: Callable[[], Settings],
        kinds: Callable[[], Sequence[str]],
    ) -> None:
        """``settings`` returns the worker's current settings, ``kinds`` the kinds of task that it can run now."""
        self._kinds = kinds
        self._queue, self._name, self._source, self._outcomes, self._settings = queue, name, source, outcomes, settings
        self._owner = Owner.current()
        self._held: deque[Claim] = deque()  # claimed and not started
        self._starting = threading.Lock()  # guards starting held claims and releasing them
        self._held_since = 0.0
        self._leased_until = 0.0  # monotonic time, no later than the leases of the held claims
        self._lost: set[int] = set()  # held claims that this worker no longer owns
        self._cancelling: set[int] = set()  # held claims to cancel
        self._on_loop: dict[int, Claim] = {}  # on the worker's event loop: started, or about to start
        self.loop_leased_until = 0.0  # monotonic time, no later than the leases of the claims on the event loop

    def __bool__(self) -> bool:
        return bool(self._held)

    @property
    def first(self) -> Claim:
        """The held claim that is next to start."""
        return self._held[0]

    @property
    def owner(self) -> Owner:
        """The process of the worker."""
        return self._owner

    def claimant(self) -> Claimant:
        """Return who claims: this worker with the kinds that it can run now."""
        return Claimant(self._name, self._owner, self._kinds(), self._settings().lease)

    def hold(self, claimed: Sequence[Claim], claimed_at: float) -> None:
        """Hold newly claimed tasks. ``claimed_at``: monotonic time before the claim was sent."""
        self._held.extend(self._limited(claimed))
        self._leased_until = claimed_at + self._settings().lease
        self._held_since = time.monotonic()
        self._lost.clear()
        self._cancelling.clear()

    def _limited(self, claimed: Sequence[Claim]) -> Sequence[Claim]:
        """Limit the timeouts of claims to the worker's longest timeout."""
        longest = self._settings().timeout_limit
        if longest is None:
            return claimed
        return [replace(claim, timeout=min(claim.timeout or longest, longest)) for claim in claimed]

    def may_start(self, claim: Claim) -> bool:
        """Return whether the first held claim may start; otherwise drop it.

        A worker that was suspended, or slower than its lease, renews first: another worker may have run the task.
        """
        if time.monotonic() >= self._leased_until:
            self.renew()
        if claim.no in self._lost:
            log.warning("a task was given to another worker before its turn", taskID=claim.id, worker=self._name)
        elif claim.no in self._cancelling:
            ended = Ended(failure=Failure("TaskCancelled", "the task was cancelled before its handler began"))
            self._outcomes.add(claim, ended)
        else:
            return True
        self._held.popleft()
        return False

    def next_inline(self, handlers: Mapping[str, Handler], ready: Callable[[Handler], bool]) -> Claim | None:
        """Remove and return the next claim to run in this process; None if there is none or another runner has it."""
        with self._starting:
            while (
                self._held and handlers[self._held[0].kind].isolation == "none" and ready(handlers[self._held[0].kind])
            ):
                claim = self._held[0]
                if self.may_start(claim):
                    if claim.attempts:
                        self.keep_only(claim)
                    return self._held.popleft()
        return None

    def move_to_loop(self, handlers: Mapping[str, Handler]) -> list[Claim]:
        """Return the held claims for the event loop; release the others, which would wait too long there."""
        found: list[Claim] = []
        for claim in [claim for claim in self._held if handlers[claim.kind].isolation == "async"]:
            self._held.remove(claim)
            self._held.appendleft(claim)
            if self.may_start(claim):
                self._held.popleft()
                found.append(claim)
                self._add_to_loop([claim], self._leased_until)
        self.release_held()
        return found

    def claim_for_loop(self, kinds: Sequence[str], limit: int) -> list[Claim]:
        """Claim up to ``limit`` more tasks of these kinds for the event loop."""
        settings = self._settings()
        held = [*self._on_loop, *(claim.no for claim in self._outcomes.claims)]
        who = Claimant(self._name, self._owner, kinds, settings.lease, held)
        claimed_at = time.monotonic()
        claimed = self._limited(self._source.now.claim(who, settings.queues, limit))
        self._add_to_loop(claimed, claimed_at + settings.lease)
        return list(claimed)

    def _add_to_loop(self, claimed: Sequence[Claim], leased_until: float) -> None:
        if not self._on_loop:
            self.loop_leased_until = leased_until
        self._on_loop.update((claim.no, claim) for claim in claimed)

    def leave_loop(self, claim: Claim) -> None:
        """Remove a claim from the event loop: it ended, or it will be released or is lost."""
        self._on_loop.pop(claim.no, None)

    def keep_only(self, claim: Claim) -> None:
        """Release all claims but this one. If the task kills this process, only its own attempt is counted."""
        self._outcomes.record()
        others = [held for held in self._held if held is not claim]
        if others:
            self._leased_until = 0.0  # if the reply is lost, check ownership before any of them starts
            self.release(others)
            self._held.clear()
            self._held.append(claim)

    def remove_first(self) -> None:
        """Remove the first held claim because it starts."""
        self._held.popleft()

    def put_back(self, claim: Claim) -> None:
        """Hold a claim again that could not start."""
        self._held.appendleft(claim)

    def release(self, claims: Sequence[Claim]) -> None:
        """Return tasks to their queues without counting an attempt."""
        released = self._queue.database.run(lambda tx: complete.release_all(tx, claims), operation="queue.give_back")
        self._source.now.settled(released)

    def release_held(self) -> None:
        """Release all held claims."""
        self._leased_until = 0.0  # if the reply is lost, check ownership before any of them starts
        if self._held:
            self.release(list(self._held))
            self._held.clear()

    def release_kind(self, kind: str) -> None:
        """Release the held claims of a kind, which is held from now on."""
        others = [claim for claim in self._held if claim.kind != kind]
        if len(others) < len(self._held):
            self._leased_until = 0.0  # if the reply is lost, check ownership before any of them starts
            self.release([claim for claim in self._held if claim.kind == kind])
            self._held = deque(others)

    def release_waiting(self) -> None:
        """Release held claims while a handler takes long, so that idle workers can run them."""
        if not self._held or time.monotonic() - self._held_since < self._settings().hold:
            return
        with self._starting:
            try:
                self.release_held()
            except HeadwayError as error:
                log.warning("waiting claims could not be released", worker=self._name, error=str(error))

    def renew(self, running: Claim | None = None) -> tuple[set[int], set[int]]:
        """Renew the leases of all claims; return (numbers of lost ones, numbers to cancel).

        This includes claims that are held, are on the event loop or whose outcome is not recorded yet. The state changes only
        after the commit: a failed renewal extends nothing.
        """
        renewed_at = time.monotonic()
        claims = (
            *list(self._held), *list(self._on_loop.values()), *self._outcomes.claims, *([running] if running else ()),
        )  # fmt: skip
        tokens = {claim.no: claim.token for claim in claims}
        who = Claimant(self._name, self._owner, (), self._settings().lease)
        lost, cancelling = self._queue.database.run(
            lambda tx: store_claim.renew(tx, who, tokens), operation="queue.renew"
        )
        self._lost |= lost
        self._cancelling |= cancelling
        self._leased_until = self.loop_leased_until = renewed_at + self._settings().lease
        return lost, cancelling
