"""The block pool against naive bookkeeping: a set of free blocks and one list of blocks per table."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jaxpaged.core.kv_groups import NULL_BLOCK
from jaxpaged.scheduling.block_pool import BlockPool


class BlockPoolMachine(RuleBasedStateMachine):
    """Tables get, share and free blocks at random; a second bookkeeping is compared with the pool's."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: list[list[int]] = []

    @initialize(num_blocks=st.integers(2, 12))
    def begin(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.pool = BlockPool(num_blocks)

    def references(self) -> Counter[int]:
        return Counter(block for table in self.tables for block in table)

    @rule(count=st.integers(0, 12))
    def get_new_blocks(self, count: int) -> None:
        free = self.num_blocks - 1 - len(self.references())
        assert self.pool.can_allocate(count) == (count <= free)
        if count > free:
            with pytest.raises(AssertionError, match="free"):
                self.pool.get_new_blocks(count)
            return
        blocks = self.pool.get_new_blocks(count)
        assert len(set(blocks)) == len(blocks) == count
        assert not set(blocks) & set(self.references()), "a block in use was handed out"
        self.tables.append(blocks)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def append(self, data: st.DataObject) -> None:
        if self.pool.can_allocate(1):
            data.draw(st.sampled_from(self.tables)).extend(self.pool.get_new_blocks(1))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from(self.tables))
        prefix = table[: data.draw(st.integers(0, len(table)))]
        self.pool.touch(prefix)
        self.tables.append(prefix)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def free_blocks(self, data: st.DataObject) -> None:
        self.pool.free_blocks(self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1))))

    @invariant()
    def bookkeeping_agrees(self) -> None:
        if not hasattr(self, "pool"):
            return
        references = self.references()
        assert NULL_BLOCK not in references
        assert self.pool.num_usable == self.num_blocks - 1
        assert self.pool.num_used == len(references)
        assert self.pool.num_free + self.pool.num_used == self.pool.num_usable
        assert all(self.pool.ref_count(block) == references[block] for block in range(self.num_blocks))
        self.pool.check_integrity(self.tables)


TestBlockPool = BlockPoolMachine.TestCase
TestBlockPool.settings = settings(max_examples=80, stateful_step_count=30)


def test_blocks_are_reused_in_the_order_of_freeing_and_a_tables_last_block_first() -> None:
    """A prefix stays longest: its first blocks are the last to be taken by others."""
    pool = BlockPool(6)
    first, second = pool.get_new_blocks(2), pool.get_new_blocks(3)
    pool.free_blocks(second)
    pool.free_blocks(first)
    assert pool.get_new_blocks(5) == [*reversed(second), *reversed(first)]


def test_freeing_twice_is_noticed() -> None:
    pool = BlockPool(3)
    blocks = pool.get_new_blocks(1)
    pool.free_blocks(blocks)
    with pytest.raises(AssertionError, match="without a reference"):
        pool.free_blocks(blocks)
    with pytest.raises(AssertionError, match="no references and no cached"):
        pool.touch(blocks)


def test_a_pool_without_a_usable_block_is_noticed() -> None:
    with pytest.raises(AssertionError, match="null block"):
        BlockPool(1)


@pytest.mark.parametrize("tables", [[], [[1, 2], [1]], [[1, 3]], [[1, 2, 0]]], ids=["lost", "extra", "wrong", "null"])
def test_the_integrity_check_sees(tables: list[list[int]]) -> None:
    pool = BlockPool(5)
    assert pool.get_new_blocks(2) == [1, 2]
    pool.check_integrity([[1, 2]])
    with pytest.raises(AssertionError):
        pool.check_integrity(tables)
