"""The one rule by which two greedy results count as the same.

Ids are equal up to the first position whose margin, the gap between the two best logits of the reference, is under
1e-3 in float32. There other shapes, which XLA compiles to other code, may decide either way; past it the two texts
differ and are not compared.
"""

from collections.abc import Sequence

MARGIN = 1e-3


def compare_ids(ours: Sequence[int], reference: Sequence[int], gaps: Sequence[float]) -> str | None:
    """Compare token ids with the reference's.

    Args:
        ours: ids of the engine.
        reference: ids of the reference, one per position.
        gaps: top-two logit gap of the reference at each position.

    Returns:
        None if they are the same by the rule, else a text that names the first wrong position.
    """
    assert len(reference) == len(gaps), f"{len(reference)} reference ids with {len(gaps)} gaps"
    decided = num_decided(gaps)
    for position in range(decided):
        if position >= len(ours):
            return f"ended after {len(ours)} tokens, the reference after {len(reference)}"
        if ours[position] != reference[position]:
            return (f"position {position}: id {ours[position]}, the reference has {reference[position]} "
                    f"with a margin of {gaps[position]:.2g}")
    if decided == len(reference) and len(ours) != len(reference):
        return f"ended after {len(ours)} tokens, the reference after {len(reference)}"
    return None


def num_decided(gaps: Sequence[float]) -> int:
    """Number of positions before the first near-tie: as many are compared."""
    return next((position for position, gap in enumerate(gaps) if gap < MARGIN), len(gaps))
