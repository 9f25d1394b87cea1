"""Channel axes as sequences of atoms: pieces of channels whose order can be chosen freely, or is pinned.

Two tensors that only channel-wise ops lie between have the same axis. Concat joins axes, Split and Slice cut them; so an
axis is a tuple of atoms, and an atom may turn out later to consist of two.
"""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Axis:
    """A channel axis: its atoms in sequence, each channel `repeat` times in a row (after Flatten: once for each pixel)."""

    atoms: tuple[int, ...]
    repeat: int = 1


class Atoms:
    """All atoms of a graph, with which of them are the same (union-find), cut in two, or pinned."""

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._parent: list[int] = []
        self._halves: dict[int, tuple[int, int]] = {}
        self._pinned: set[int] = set()

    def new(self, size: int, *, pinned: bool = False) -> int:
        """Return a new atom of so many channels."""
        self._sizes.append(size)
        self._parent.append(len(self._parent))
        if pinned:
            self._pinned.add(len(self._parent) - 1)
        return len(self._parent) - 1

    def size(self, atom: int) -> int:
        return self._sizes[atom]

    def is_pinned(self, atom: int) -> bool:
        return self._find(atom) in self._pinned

    def expand(self, atoms: Iterable[int]) -> tuple[int, ...]:
        """Return the same axis in atoms that are not cut."""
        result: list[int] = []
        for atom in atoms:
            root = self._find(atom)
            result += self.expand(self._halves[root]) if root in self._halves else (root,)
        return tuple(result)

    def length(self, atoms: Iterable[int]) -> int:
        return sum(self._sizes[atom] for atom in self.expand(atoms))

    def pin(self, atoms: Iterable[int]) -> None:
        """Fix the order of these atoms to the model's own."""
        self._pinned.update(self.expand(atoms))

    def cut(self, atoms: Iterable[int], at: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the axis before and from channel `at`; an atom that lies across is cut in two."""
        before: list[int] = []
        rest = list(self.expand(atoms))
        while at > 0:
            atom = rest.pop(0)
            if self._sizes[atom] > at:
                first, second = self._halve(atom, at)
                atom = first
                rest.insert(0, second)
            before.append(atom)
            at -= self._sizes[atom]
        return tuple(before), tuple(rest)

    def unify(self, one: Iterable[int], other: Iterable[int]) -> None:
        """Make two axes of the same length the same."""
        left, right = list(self.expand(one)), list(self.expand(other))
        while left:
            size = min(self._sizes[left[0]], self._sizes[right[0]])
            (first, *left), (second, *right) = self._fit(left, size), self._fit(right, size)
            # Cutting one side may have cut the other, if they share atoms.
            first, second = self._find(first), self._find(second)
            if first in self._halves or second in self._halves:
                left, right = [*self.expand([first]), *left], [*self.expand([second]), *right]
            elif first != second:
                self._parent[second] = first
                if second in self._pinned:
                    self._pinned.add(first)
            left, right = list(self.expand(left)), list(self.expand(right))

    def _fit(self, atoms: list[int], size: int) -> list[int]:
        """Return the list with a first atom of exactly this size."""
        first, rest = self.cut(atoms, size)
        return [*first, *rest]

    def _halve(self, atom: int, at: int) -> tuple[int, int]:
        pinned = atom in self._pinned
        halves = self.new(at, pinned=pinned), self.new(self._sizes[atom] - at, pinned=pinned)
        self._halves[atom] = halves
        return halves

    def _find(self, atom: int) -> int:
        while self._parent[atom] != atom:
            self._parent[atom] = self._parent[self._parent[atom]]
            atom = self._parent[atom]
        return atom
