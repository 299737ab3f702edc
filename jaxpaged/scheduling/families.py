"""Requests that are forked from one another token by token: the beams of a search.

A member computes the logits of one token and is paused: it keeps its slot and blocks, and has nothing to compute until
the search chooses the tokens that follow. It resumes with the first of them itself. Each other token resumes in a fork,
which references the same blocks and copies the last one before writing to it. Other requests do not wait for any of it.

Where the pool or the slots are too small for a whole family, its members take turns: a paused member frees its slot and
blocks while another member waits for them, since neither could resume without the other.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from jaxpaged.core.messages import EngineRequest
from jaxpaged.scheduling.planner import StepPlanner
from jaxpaged.scheduling.queues import Queues
from jaxpaged.scheduling.request import Family, Request


class Branch(NamedTuple):
    """A token that continues a paused request.

    Attributes:
        parent: id of the paused request.
        child: id of the request that continues with the token: the parent itself, or a new fork of it.
    """

    parent: str
    child: str
    token: int


class Families:
    """All families of a scheduler."""

    def __init__(self, queues: Queues, planner: StepPlanner) -> None:
        self._queues = queues
        self._planner = planner
        self._families: list[Family] = []

    def add_family(self, message: EngineRequest, orders: Sequence[int]) -> Request:
        """The first member of a new family, which can have one member for each of the arrival numbers `orders`."""
        family = Family(free_orders=list(orders[1:]))
        self._families.append(family)
        return self._member(family, message, orders[0])

    def pause(self, request: Request) -> None:
        """A member's next logits are computed: pause it."""
        request.paused = True
        if request.slot == -1:  # preempted meanwhile
            self._queues.waiting.remove_request(request)

    def resume(self, branches: Iterable[Branch]) -> None:
        """Append tokens to paused members; each of them continues with one token itself."""
        forks, others = [], []
        for branch in branches:
            parent = self._queues.live[branch.parent]
            assert parent.paused and parent.family is not None, f"{parent.request_id} is not paused"
            if branch.child == branch.parent:
                others.append((parent, branch.token))
                continue
            message = replace(parent.message, request_id=branch.child)
            fork = self._member(parent.family, message, parent.family.free_orders.pop())
            fork.token_ids = list(parent.token_ids)
            fork.resume(branch.token)
            fork.num_cached_tokens, fork.scheduled_time = parent.num_cached_tokens, parent.scheduled_time
            self._queues.live[branch.child] = fork
            forks.append((parent, fork))
        for parent, token in others:
            parent.resume(token)
            if parent.slot == -1:
                self._queues.waiting.add_request(parent)
        self._planner.admit_branches(forks)

    def take_turns(self) -> bool:
        """Before a step: paused members make room for waiting members of their family. Returns whether any did."""
        stopped = False
        for family in self._families:
            if any(member.slot == -1 and not member.paused for member in family.members):
                for member in family.members:
                    if member.paused and member.slot >= 0:
                        self._planner.stop(member)
                        stopped = True
        return stopped

    def remove_member(self, request: Request) -> None:
        """Remove a request that has ended from its family, if it has one."""
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
