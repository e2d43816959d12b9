"""Which groups make the next batch: whole groups, oldest first, that add up to exactly `batch_size` sequences.

Pure. Reachable sums are bit sets in Python integers (bit s set: s sequences can be made), so one shift adds a group to
every sum; all sizes are divided by their common divisor first. Environments with a guaranteed share have their own bit
set, because their part of the sum has a lower bound.

Example: groups of 3, 1, 2 and 2 sequences and a batch of 4 → the groups of 3 and 1, and next time 2 and 2.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from grpo_engine.errors import first_of

MAX_NAMED_SIZE = 16_384
"""Up to here, or twice the batch size, sizes are looked for that could be reached: the time grows with the square of
it, and an environment registers with any group size (1,000,000 held the rollout API for 18 s at each request)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedGroup:
    """A group in the queue; its body is in the store."""

    id: int
    """Increases with every arrival."""
    env_id: int | None
    num_sequences: int
    num_bytes: int = 0
    policy_version: int | None = None
    """Oldest policy version that sampled any of its trained tokens; None where it carries no versions."""
    step: int | None = None
    """Batches delivered when it arrived; None before any trainer registered."""
    spread: float | None = None
    """Mean absolute advantage, where groups are sampled by it or may be delivered again."""
    uses: int = 0
    """Deliveries that were acknowledged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Supplier:
    """An environment that sends groups of one size."""

    env_id: int
    name: str
    group_size: int


def form_batch(
    queue: Sequence[QueuedGroup], batch_size: int, shares: Mapping[int, float] | None = None
) -> list[QueuedGroup] | None:
    """The next batch from `queue` (oldest first), or None when no combination fits.

    It uses the shortest prefix of the queue that allows a batch, and prefers older groups within it.

    Args:
        shares: least share of the batch, by environment; if their sum exceeds 1, they are scaled down.
    """
    minima = least_sequences(batch_size, shares or {})
    divisor = math.gcd(*(group.num_sequences for group in queue))
    if divisor == 0 or batch_size % divisor:
        return None
    target = batch_size // divisor
    sizes = [group.num_sequences // divisor for group in queue]
    owners = [group.env_id if group.env_id in minima else None for group in queue]
    needed = {env_id: -(-least // divisor) for env_id, least in minima.items()}
    length = _shortest_prefix(sizes, owners, target, needed)
    if length is None:
        return None
    chosen = _oldest_choice(sizes[:length], owners[:length], target, needed)
    return [queue[index] for index in chosen]


def oldest_combination(sizes: Sequence[int], target: int) -> list[int] | None:
    """Indices of the oldest of `sizes`, each at most `target`, that add up to it exactly; None when none do.

    The same choice as `form_batch` makes, in linear time: it is looked for at each small group that arrives.
    """
    if sum(sizes) < target or target % math.gcd(*sizes):
        return None
    limit = (1 << (target + 1)) - 1
    sums, length = 1, 0
    while not sums >> target:
        if length == len(sizes):
            return None
        sums |= (sums << sizes[length]) & limit
        length += 1
    after = [1]
    """Sums of the last groups of the prefix: of none, of one, …"""
    for size in reversed(sizes[:length]):
        after.append((after[-1] | after[-1] << size) & limit)
    chosen = []
    for index in range(length):
        rest = target - sizes[index]
        if rest >= 0 and after[length - index - 1] >> rest & 1:
            chosen.append(index)
            target = rest
    return chosen


def least_sequences(batch_size: int, shares: Mapping[int, float]) -> dict[int, int]:
    """Least sequences of each environment with a share, rounded as in the stock API."""
    scale = max(1.0, sum(shares.values()))
    least = {env_id: int(batch_size * share / scale) for env_id, share in shares.items()}
    return {env_id: count for env_id, count in least.items() if count > 0}


def why_unreachable(
    queued: Mapping[tuple[int | None, int], int],
    suppliers: Sequence[Supplier],
    batch_size: int,
    shares: Mapping[int, float] | None = None,
) -> str | None:
    """Why no batch can ever form; None when one can, or when no environment sends groups yet.

    Every supplier may send any number of groups of its size, and so may clients that send groups without an id; other
    queued groups count once.

    Args:
        queued: number of groups, by environment and size.
    """
    supplies: list[tuple[int | None, int]] = [(supplier.env_id, supplier.group_size) for supplier in suppliers]
    supplies += [(None, size) for env_id, size in queued if env_id is None]
    if not supplies:
        return None
    minima = least_sequences(batch_size, shares or {})
    sizes = sorted({size for _, size in queued})
    largest = max([*sizes, *(s.group_size for s in suppliers)])
    farthest = max(2 * batch_size, min(2 * batch_size + largest, MAX_NAMED_SIZE))
    limit = (1 << (farthest + 1)) - 1
    sums: dict[int | None, int] = {None: 1, **dict.fromkeys(minima, 1)}
    once: Counter[tuple[int | None, int]] = Counter()
    for (env_id, size), count in queued.items():
        once[env_id if env_id in minima else None, size] += count
    for (owner, size), count in once.items():
        num_added = 1
        while count > 0 and size * num_added < limit.bit_length():  # 1, 2, 4, … and the rest make every number
            num_added = min(num_added, count)
            sums[owner] |= (sums[owner] << size * num_added) & limit
            count, num_added = count - num_added, 2 * num_added
    for supplier_id, step in supplies:
        owner = supplier_id if supplier_id in minima else None
        while step < limit.bit_length():
            sums[owner] |= (sums[owner] << step) & limit
            step *= 2
    reachable = _combined(sums, minima, farthest)
    if reachable >> batch_size & 1:
        return None
    below = (reachable & ((1 << batch_size) - 1)).bit_length() - 1
    above = reachable >> batch_size
    nearest = [below] if below > 0 else []
    if above:
        nearest.append(batch_size + (above & -above).bit_length() - 1)
    senders = first_of((f"{s.name} sends groups of {s.group_size}" for s in suppliers), separator="; ")
    parts = [senders] if senders else []
    parts += [f"groups of {first_of(map(str, sizes))} are queued"] if sizes else []
    parts += [f"guaranteed shares need at least {first_of(map(str, minima.values()))}"] if minima else []
    advice = f"reachable sizes are {' and '.join(map(str, nearest))}" if nearest else "no size is reachable"
    return f"batch_size {batch_size} can never be made of whole groups ({'; '.join(parts)}): {advice}"


def _shortest_prefix(
    sizes: Sequence[int], owners: Sequence[int | None], target: int, needed: Mapping[int, int]
) -> int | None:
    """Length of the shortest prefix that allows a batch."""

    def allows(length: int) -> bool:
        sums: dict[int | None, int] = {None: 1, **dict.fromkeys(needed, 1)}
        for size, owner in zip(sizes[:length], owners[:length], strict=True):
            sums[owner] |= (sums[owner] << size) & limit
        return bool(_combined(sums, needed, target) >> target & 1)

    limit = (1 << (target + 1)) - 1
    total, impossible = 0, 0
    for size in sizes:
        if total >= target:
            break
        total += size
        impossible += 1
    if total < target:
        return None
    high = impossible
    impossible -= 1
    while not allows(high):
        if high == len(sizes):
            return None
        impossible, high = high, min(2 * high, len(sizes))
    while high - impossible > 1:
        middle = (high + impossible) // 2
        if allows(middle):
            high = middle
        else:
            impossible = middle
    return high


def _oldest_choice(
    sizes: Sequence[int], owners: Sequence[int | None], target: int, needed: Mapping[int, int]
) -> list[int]:
    """Indices, oldest first, of the groups with which the rest can still complete the batch."""
    limit = (1 << (target + 1)) - 1
    after: list[int] = [0] * len(sizes)
    sums: dict[int | None, int] = {None: 1, **dict.fromkeys(needed, 1)}
    for index in range(len(sizes) - 1, -1, -1):
        owner = owners[index]
        after[index] = sums[owner]
        sums[owner] |= (sums[owner] << sizes[index]) & limit
    missing, chosen = dict(needed), []
    left_out: set[tuple[int | None, int]] = set()
    for index, (size, owner) in enumerate(zip(sizes, owners, strict=True)):
        # If one was left out, so is every later one of its owner and size: they are interchangeable.
        if (owner, size) not in left_out:
            rest = {**sums, owner: after[index]}
            lacking = {**missing, owner: max(0, missing[owner] - size)} if owner in missing else missing
            if size <= target and _combined(rest, lacking, target - size) >> (target - size) & 1:
                chosen.append(index)
                target, missing = target - size, lacking
            else:
                left_out.add((owner, size))
        sums[owner] = after[index]
    return chosen


def _combined(sums: Mapping[int | None, int], minima: Mapping[int, int], target: int) -> int:
    """Sums up to `target` made of one sum per owner, each at least its minimum."""
    enough = []
    for owner, reachable in sums.items():
        least = minima.get(owner, 0) if owner is not None else 0
        enough.append(reachable >> least << least)
    floors = [(bits & -bits).bit_length() - 1 for bits in enough]
    free = target - sum(floors)
    if free < 0 or not all(enough):
        return 0
    # Only what exceeds the minima is left to combine, which is little where shares are large.
    total, all_sums = 1, (1 << (free + 1)) - 1
    for bits, floor in zip(enough, floors, strict=True):
        if total == all_sums:
            break
        total = _pairwise_sums(total, bits >> floor & all_sums) & all_sums
    return total << sum(floors)


def _pairwise_sums(left: int, right: int) -> int:
    """Sums of one bit of each, run by run of adjacent bits: dense sets have few gaps."""
    few, many = (left, right) if _num_runs(left) < _num_runs(right) else (right, left)
    total = 0
    while few:
        lowest = few & -few
        beyond = few + lowest  # the carry passes through the lowest run
        run = few & ~beyond
        total |= _spread(many, run.bit_length() - lowest.bit_length() + 1) << (lowest.bit_length() - 1)
        few ^= run
    return total


def _num_runs(bits: int) -> int:
    return (bits & ~(bits << 1)).bit_count()


def _spread(bits: int, length: int) -> int:
    """Every bit and the `length - 1` bits above it."""
    covered = 1
    while covered < length:
        more = min(covered, length - covered)
        bits |= bits << more
        covered += more
    return bits
