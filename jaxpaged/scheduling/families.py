"""Requests that are forked from one another token by token: the beams of a search.

A member computes the logits of one token and stands: it keeps its slot and blocks, and has nothing to compute until
whoever looks at the logits says which tokens follow. It goes on with the first of them itself, and with each other one
in a fork, which owns the same blocks, the last one until somebody writes to it. Other requests wait for none of that.

Where a pool or the slots are too small for all of a family, its members take turns: one that stands gives up what it
owns while another of them waits for a place, since neither could go on without the other.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from jaxpaged.core.messages import EngineRequest
from jaxpaged.scheduling.planner import Admission, StepPlanner
from jaxpaged.scheduling.queues import Queues
from jaxpaged.scheduling.request import Family, Request


class Branch(NamedTuple):
    """A token that follows on a request which stands.

    Attributes:
        parent: id of the request.
        child: id of the request that goes on with the token: the parent itself, or a new fork of it.
    """

    parent: str
    child: str
    token: int


class Families:
    """All families of a scheduler."""

    def __init__(self, queues: Queues, planner: StepPlanner, admission: Admission) -> None:
        self._queues = queues
        self._planner = planner
        self._admission = admission
        self._families: list[Family] = []

    def begin(self, message: EngineRequest, orders: Sequence[int]) -> Request:
        """The first member of a family that can have as many as there are arrival numbers `orders`."""
        family = Family(free_orders=list(orders[1:]))
        self._families.append(family)
        return self._member(family, message, orders[0])

    def stand(self, request: Request) -> None:
        """The logits behind a member's last token are there."""
        request.stands = True
        if request.slot == -1:  # preempted meanwhile
            self._queues.waiting.remove(request)

    def go_on(self, branches: Iterable[Branch]) -> None:
        """Say which tokens follow on members that stand; each of them goes on with one itself."""
        forks, others = [], []
        for branch in branches:
            parent = self._queues.live[branch.parent]
            assert parent.stands and parent.family is not None, f"{parent.request_id} does not wait for a token"
            if branch.child == branch.parent:
                others.append((parent, branch.token))
                continue
            message = replace(parent.message, request_id=branch.child)
            fork = self._member(parent.family, message, parent.family.free_orders.pop())
            fork.token_ids = list(parent.token_ids)
            fork.go_on(branch.token)
            fork.num_cached, fork.scheduled_time = parent.num_cached, parent.scheduled_time
            self._queues.live[branch.child] = fork
            forks.append((parent, fork))
        for parent, token in others:
            parent.go_on(token)
            if parent.slot == -1:
                self._queues.waiting.add(parent)
        self._admission.fork_standing(forks)

    def take_turns(self) -> None:
        """Before a step: members that stand make room for those of their family that wait."""
        for family in self._families:
            if any(member.slot == -1 and not member.stands for member in family.members):
                for member in family.members:
                    if member.stands and member.slot >= 0:
                        self._planner.stop(member)

    def remove(self, request: Request) -> None:
        """A member has ended."""
        family = request.family
        if family is not None:
            family.members.remove(request)
            family.free_orders.append(request.order)
            if not family.members:
                self._families.remove(family)

    def _member(self, family: Family, message: EngineRequest, order: int) -> Request:
        request = Request(message, order, family=family)
        family.members.append(request)
        return request
