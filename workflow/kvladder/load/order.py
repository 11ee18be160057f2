"""Which requests of a pass may be sent, and which of them is next."""

from __future__ import annotations

import heapq
from collections import deque

from kvladder.config.traffic import OrderPolicy, PassPlan


class Order:
    """The requests that may be sent now, by their positions in the plan.

    Without a pool the plan's own order counts. In a pool, a conversation's head waits until a place is free, and a
    later turn until the one before it has ended, failed or not: what one request does never changes what the others
    are.

    ``random`` and ``zipf`` choose by a race: each request that comes in runs for its lot divided by its place's weight,
    and who arrives first is next. Lots are exponential, so whoever is still running is as likely to arrive next as if
    it had just set off: each choice is a draw among all that may be sent, without a random number on the clock.
    """

    def __init__(self, plan: PassPlan) -> None:
        self._plan, self._pool = plan, plan.pool
        self._policy: OrderPolicy | None = None if plan.pool is None else plan.pool.order
        self._followers: dict[int, list[int]] = {}
        for position, request in enumerate(plan.requests):
            if request.after is not None:
                self._followers.setdefault(request.after, []).append(position)
        heads = [position for position, request in enumerate(plan.requests) if request.after is None]
        size = len(heads) if plan.pool is None else plan.pool.size
        self._waiting_heads = deque(heads[size:])
        self._places = {position: place for place, position in enumerate(heads[:size])}
        self._eligible: list[tuple[float, int]] = []
        self._next_round: list[int] = []
        self._entered, self._raced = 0, 0.0
        for position in heads[:size]:
            self._enter(position)
        self._left_of_round = len(self._eligible)

    def __len__(self) -> int:
        """Requests that may be sent."""
        return len(self._eligible)

    def pop(self) -> int:
        """Take the next one. Raises IndexError where there is none."""
        key, position = heapq.heappop(self._eligible)
        self._raced = key
        return position

    def ended(self, position: int) -> None:
        """A request is over: what waited for it may come in."""
        followers = self._followers.get(self._plan.requests[position].index, [])
        place = self._places.pop(position, 0)
        released = followers or ([self._waiting_heads.popleft()] if self._waiting_heads else [])
        for follower in released:
            if self._pool is not None:
                self._places[follower] = place
            if self._policy == "round-barrier":
                self._next_round.append(follower)
            else:
                self._enter(follower)
        if self._policy == "round-barrier":
            self._left_of_round -= 1
            if not self._left_of_round:
                self._left_of_round = len(self._next_round)
                for follower in self._next_round:
                    self._enter(follower)
                self._next_round = []

    def _enter(self, position: int) -> None:
        key = 0.0
        if self._policy == "fifo":
            key = float(self._entered)
        elif self._pool is not None and self._pool.lots:
            weights = self._pool.weights
            weight = weights[self._places[position]] if weights else 1.0
            key = self._raced + self._pool.lots[position] / weight
        self._entered += 1
        heapq.heappush(self._eligible, (key, position))
