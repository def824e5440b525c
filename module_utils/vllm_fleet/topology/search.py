"""The best order of a lane's GPUs, exactly, without trying every permutation.

The objective is lexicographic: the smallest class inside the tensor-parallel groups, the sum of classes inside the
groups, the smallest class on the pipeline edges; among equals one NUMA node, then more free memory for the larger
stage, then the smallest sequence of positions (positions are in bus order).

The three parts of the score are fixed one after the other: the threshold at which enough disjoint groups exist, the
largest sum of disjoint groups at that threshold, the best edge threshold for which a chain of such groups exists. GPUs
with equal links to everything else are interchangeable, so groups are counted over kinds of GPUs and not over GPUs: a
box of equals costs the same with 8 GPUs or 64. ``benchmarks/selection.py`` measures it against plain enumeration.
"""

from __future__ import annotations

TYPE_CHECKING = False  # what typing.TYPE_CHECKING is, without the time that importing it takes
if TYPE_CHECKING:
    from typing import Dict, List, Optional, Sequence, Tuple

    #: (smallest class inside groups, their sum, smallest class on pipeline edges); None where there is no such pair
    Score = Tuple[Optional[float], float, Optional[float]]
    Matrix = Sequence[Sequence[float]]


class _Group:
    """A tensor-parallel group up to interchangeable GPUs: how many of each kind."""

    __slots__ = ("kinds", "packed", "poorest", "sum")

    def __init__(self, kinds: Tuple[int, ...], packed: int, total: float) -> None:
        self.kinds = kinds
        self.packed = packed
        self.sum = total
        self.poorest = 0  # free memory of its poorest card


class Search:
    """All orders of ``tensor * stages`` GPUs out of a pool.

    :param matrix: link classes by position; symmetric, the diagonal is not read; every class above 0 and known.
    :param nodes: NUMA node by position, None where unknown.
    :param free: free memory by position; only read when ``layers`` has unequal stages.
    :param layers: layers of each pipeline stage, or None.
    """

    def __init__(
        self,
        matrix: Matrix,
        tensor: int,
        stages: int,
        nodes: Sequence[Optional[int]],
        free: Sequence[int],
        layers: Optional[Sequence[int]],
    ) -> None:
        self.tensor, self.stages = tensor, stages
        # Every GPU is used, so the last group is what the others leave, and the first holds the first kind.
        self.tight = len(matrix) == tensor * stages
        self.layers = layers if layers is not None and len(set(layers)) > 1 else None
        self._make_kinds(matrix, nodes, free if self.layers else [0] * len(matrix))
        self.levels = sorted({value for row in self.links for value in row if value > 0}, reverse=True)
        self.groups: List[_Group] = []
        self.sum = 0.0

    # -- kinds of interchangeable GPUs, and counts of them packed into one integer with a guard bit per kind

    def _make_kinds(self, matrix: Matrix, nodes: Sequence[Optional[int]], free: Sequence[int]) -> None:
        size = len(matrix)
        members: List[List[int]] = []
        for position in range(size):
            for kind in members:
                other = kind[0]
                if nodes[other] != nodes[position] or free[other] != free[position]:
                    continue
                mine, theirs = matrix[position], matrix[other]
                if len(kind) > 1 and mine[other] != matrix[kind[1]][other]:
                    continue
                if all(mine[k] == theirs[k] for k in range(size) if k not in (position, other)):
                    kind.append(position)
                    break
            else:
                members.append([position])
        self.members = members
        self.links = [
            [
                (matrix[one[0]][one[1]] if len(one) > 1 else 0.0) if one is other else matrix[one[0]][other[0]]
                for other in members
            ]
            for one in members
        ]
        self.nodes = [nodes[kind[0]] for kind in members]
        self.free = [free[kind[0]] for kind in members]
        self.unit: List[int] = []
        self.guard = self.all = shift = 0
        for kind in members:
            bits = len(kind).bit_length()
            self.unit.append(1 << shift)
            self.all += len(kind) << shift
            self.guard |= 1 << (shift + bits)
            shift += bits + 1

    def _fits(self, free: int, packed: int) -> bool:
        return ((free | self.guard) - packed) & self.guard == self.guard

    # -- the score

    def best(self) -> Optional[Score]:
        """Return the best score of any order, or None when the pool is too small."""
        if sum(len(kind) for kind in self.members) < self.tensor * self.stages:
            return None
        smallest: Optional[float] = None
        if self.tensor == 1:
            self._enumerate(0.0)
        else:
            for level in self.levels:
                self._enumerate(level)
                total = self._best_sum()
                if total is not None:
                    smallest, self.sum = level, total
                    break
            else:
                return None
        if self.stages == 1:
            self.edge = 0.0
            return smallest, self.sum, None
        for level in self.levels:
            if self._chain(level, None, None):
                self.edge = level
                return smallest, self.sum, level
        return None

    def _enumerate(self, level: float) -> None:
        """Collect every group whose links are all at least ``level``."""
        found: List[_Group] = []
        links, members, unit = self.links, self.members, self.unit

        def extend(
            kinds: Tuple[int, ...], packed: int, total: float, left: int, open_kinds: List[Tuple[int, float]]
        ) -> None:
            for place, (kind, gain) in enumerate(open_kinds):
                rest = open_kinds[place + 1 :]
                inner = links[kind][kind]
                limit = min(left, len(members[kind])) if inner >= level else 1
                row = links[kind]
                new_total, new_kinds, new_packed = total, kinds, packed
                for count in range(1, limit + 1):
                    new_total += gain + inner * (count - 1)
                    new_kinds += (kind,)
                    new_packed += unit[kind]
                    if count == left:
                        found.append(_Group(new_kinds, new_packed, new_total))
                    elif rest:
                        extend(
                            new_kinds,
                            new_packed,
                            new_total,
                            left - count,
                            [(other, more + row[other] * count) for other, more in rest if row[other] >= level],
                        )

        extend((), 0, 0.0, self.tensor, [(kind, 0.0) for kind in range(len(members))])
        found.sort(key=lambda group: -group.sum)
        for group in found:
            group.poorest = min(self.free[kind] for kind in group.kinds)
        self.groups = found
        self.by_packed = {group.packed: group for group in found}
        self.by_first: Dict[int, List[_Group]] = {}
        for group in found:
            self.by_first.setdefault(group.kinds[0], []).append(group)
        self.rest: Dict[Tuple[int, int], Optional[float]] = {}

    def _best_sum(self) -> Optional[float]:
        """Return the largest sum of ``stages`` disjoint groups, or None when there are not enough of them."""
        return self._best_rest(self.stages, self.all)

    def _best_rest(self, count: int, free: int) -> Optional[float]:
        """Return the largest sum of ``count`` disjoint groups out of the ``free`` GPUs."""
        if count == 0:
            return 0.0
        key = (count, free)
        if key in self.rest:
            return self.rest[key]
        best: Optional[float] = None
        if self.tight:
            best = self._best_partition(count, free)
            self.rest[key] = best
            return best
        guard, spread = self.guard, free | self.guard
        fitting = [group for group in self.groups if (spread - group.packed) & guard == guard]
        if fitting and count == 1:
            best = fitting[0].sum
        elif fitting:
            best = self._best_of(fitting, count, free)
        self.rest[key] = best
        return best

    def _best_partition(self, count: int, free: int) -> Optional[float]:
        """Return the largest sum when ``count`` groups use up all of the ``free`` GPUs."""
        if count == 1:
            last = self.by_packed.get(free)
            return None if last is None else last.sum
        best: Optional[float] = None
        first = next(
            kind for kind, unit in enumerate(self.unit) if free % (unit << len(self.members[kind]).bit_length())
        )
        for group in self.by_first.get(first, []):
            if self._fits(free, group.packed):
                rest = self._best_rest(count - 1, free - group.packed)
                if rest is not None and (best is None or group.sum + rest > best):
                    best = group.sum + rest
        return best

    def _best_of(self, fitting: List[_Group], count: int, free: int) -> Optional[float]:
        guard = self.guard
        best = -1.0

        def descend(candidates: List[_Group], left: int, total: float) -> None:
            nonlocal best
            for place, group in enumerate(candidates):
                if total + group.sum * left <= best:
                    return
                if left == 1:
                    best = total + group.sum
                    return
                used = (free_stack[-1] - group.packed) | guard
                later = [other for other in candidates[place:] if (used - other.packed) & guard == guard]
                if later and total + group.sum + later[0].sum * (left - 1) > best:
                    free_stack.append(free_stack[-1] - group.packed)
                    descend(later, left - 1, total + group.sum)
                    free_stack.pop()

        free_stack = [free]
        descend(fitting, count, 0.0)
        return best if best >= 0 else None

    # -- chains of groups whose pipeline edges reach a level

    def _chain(self, edge: float, node: Optional[int], poorest: Optional[List[int]]) -> bool:
        """Prepare the chains for these limits and return whether there is one.

        :param node: only GPUs of this NUMA node.
        :param poorest: least free memory of the poorest card, by stage.
        """
        links = self.links
        allowed = self.groups
        if node is not None:
            allowed = [group for group in allowed if all(self.nodes[kind] == node for kind in group.kinds)]
        if self.stages > 1:
            joined = [any(value >= edge for value in row) for row in links]
            allowed = [group for group in allowed if all(joined[kind] for kind in group.kinds)]
        self.edge_level, self.poorest = edge, poorest
        self.allowed = allowed
        self.allowed_packed = {group.packed: group for group in allowed}
        self.by_sum: Dict[float, List[_Group]] = {}
        for group in allowed:
            self.by_sum.setdefault(group.sum, []).append(group)
        self.reached: Dict[Tuple[int, Tuple[int, ...], int], bool] = {}
        self.matched: Dict[Tuple[Tuple[int, ...], Tuple[int, ...]], bool] = {}
        return any(self._reaches(1, group, self.all - group.packed, self.sum - group.sum) for group in self._starts())

    def _starts(self) -> List[_Group]:
        return [group for group in self._next(0, self.all, self.sum) if self._fits(self.all, group.packed)]

    def _next(self, stage: int, free: int, need: float) -> List[_Group]:
        """Return groups for a stage that leave the needed sum within reach; they may still overlap."""
        if stage < self.stages - 1:
            found = self.allowed
        elif self.tight:
            last = self.allowed_packed.get(free)
            found = [] if last is None or last.sum != need else [last]
        else:
            found = self.by_sum.get(need, [])
        if self.poorest is not None:
            least = self.poorest[stage]
            found = [group for group in found if group.poorest >= least]
        return found

    def _reaches(self, stage: int, last: _Group, free: int, need: float) -> bool:
        """Return whether the stages from ``stage`` on can be filled after ``last``."""
        left = self.stages - stage
        if left == 0:
            return need == 0
        if need > left * self.groups[0].sum:
            return False
        key = (stage, last.kinds, free)
        if key in self.reached:
            return self.reached[key]
        answer = False
        rest = self._best_rest(left, free)
        if rest is not None and rest >= need:
            for group in self._next(stage, free, need):
                if (
                    group.sum <= need
                    and self._fits(free, group.packed)
                    and self._matches(last.kinds, group.kinds)
                    and self._reaches(stage + 1, group, free - group.packed, need - group.sum)
                ):
                    answer = True
                    break
        self.reached[key] = answer
        return answer

    def _matches(self, one: Tuple[int, ...], other: Tuple[int, ...]) -> bool:
        """Return whether two groups can be paired so that every pair reaches the edge level (bipartite matching)."""
        key = (one, other)
        if key not in self.matched:
            self.matched[key] = self._matching(one, other)
        return self.matched[key]

    def _matching(self, one: Tuple[int, ...], other: Tuple[int, ...]) -> bool:
        level, links = self.edge_level, self.links
        partner: List[int] = [-1] * len(other)

        def augment(left: int, seen: List[bool]) -> bool:
            row = links[one[left]]
            for right, kind in enumerate(other):
                if row[kind] >= level and not seen[right]:
                    seen[right] = True
                    if partner[right] < 0 or augment(partner[right], seen):
                        partner[right] = left
                        return True
            return False

        return all(augment(left, [False] * len(other)) for left in range(len(one)))

    # -- the order itself

    def order(self) -> Tuple[List[int], bool]:
        """Return the best order as positions, and whether it is on one known NUMA node. Call :meth:`best` first."""
        on_node: List[Tuple[List[int], List[int]]] = []
        for node in sorted({node for node in self.nodes if node is not None}):
            if self._chain(self.edge, node, None):
                memory = self._most_memory(node)
                self._chain(self.edge, node, memory)
                on_node.append(([-value for value in memory or []], self._smallest()))
        if on_node:
            return min(on_node)[1], True
        self._chain(self.edge, None, self._most_memory(None))
        return self._smallest(), False

    def _most_memory(self, node: Optional[int]) -> Optional[List[int]]:
        """Return the most free memory that the larger stages can have, largest stages first; by stage."""
        if self.layers is None:
            return None
        least = [0] * self.stages
        for size in sorted(set(self.layers), reverse=True)[:-1]:
            for value in sorted({group.poorest for group in self.groups}, reverse=True):
                trial = [value if layers == size else had for layers, had in zip(self.layers, least)]
                if self._chain(self.edge, node, trial):
                    least = trial
                    break
        return least

    def _smallest(self) -> List[int]:
        """Return the smallest sequence of positions among the prepared chains."""
        taken = [0] * len(self.members)
        order: List[int] = []
        free, need = self.all, self.sum
        last: Tuple[int, ...] = ()
        for stage in range(self.stages):
            best: Optional[List[int]] = None
            choice: Optional[_Group] = None
            for group in self._next(stage, free, need):
                if group.sum > need or not self._fits(free, group.packed):
                    continue
                sequence = self._sequence(last, group.kinds, taken)
                if sequence is None or (best is not None and sequence >= best):
                    continue
                if self._reaches(stage + 1, group, free - group.packed, need - group.sum):
                    best, choice = sequence, group
            if best is None or choice is None:
                raise AssertionError("no order although a chain exists")
            order += best
            free -= choice.packed
            need -= choice.sum
            last = tuple(self._kind_of(position) for position in best)
            for kind in choice.kinds:
                taken[kind] += 1
        return order

    def _kind_of(self, position: int) -> int:
        return next(kind for kind, members in enumerate(self.members) if position in members)

    def _sequence(self, last: Tuple[int, ...], kinds: Tuple[int, ...], taken: List[int]) -> Optional[List[int]]:
        """Return the smallest sequence for one stage after the kinds ``last`` in rank order, or None."""
        positions: List[Tuple[int, int]] = []
        used = dict.fromkeys(kinds, 0)
        for kind in kinds:
            positions.append((self.members[kind][taken[kind] + used[kind]], kind))
            used[kind] += 1
        positions.sort()
        if not last:
            return [position for position, _ in positions]
        if not self._matches(tuple(sorted(last)), tuple(sorted(kinds))):
            return None
        sequence: List[int] = []
        for rank, before in enumerate(last):
            row = self.links[before]
            for place, (position, kind) in enumerate(positions):
                others = positions[:place] + positions[place + 1 :]
                if row[kind] >= self.edge_level and self._matching(last[rank + 1 :], tuple(k for _, k in others)):
                    sequence.append(position)
                    positions = others
                    break
        return sequence
