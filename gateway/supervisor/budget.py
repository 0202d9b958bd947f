"""Shares of the limits that hold over all workers: how a budget is split, and who may use how much of it now.

1. A share is taken back before it is given to another: over all workers, what each was granted, still has, or uses,
   whichever is most, never passes the budget. Where an operator has just lowered the budget, it only falls.
2. A worker that has not acknowledged its last grant is granted nothing else, so its share is one of two numbers.

Called by supervisor.main with each Demand, when a worker has died, and when a limit was changed.
"""

from __future__ import annotations

from collections.abc import Sequence

from gateway.control import first_share


def allocate(budget: int, wanted: Sequence[int]) -> list[int]:
    """Split a budget by max-min fairness: nobody gets more than it wants while another wants more.

    What all together do not want is spread evenly, so that a sudden wish need not wait; the sum is the budget.
    """
    shares = list(wanted)
    count, rest = len(wanted), budget
    # Whoever wants least first: what it leaves is for those who want more. The first of equals gets the odd one.
    for at, index in enumerate(sorted(range(count), key=lambda index: (wanted[index], -index))):
        shares[index] = min(wanted[index], rest // (count - at))
        rest -= shares[index]
    return [share + first_share(rest, count, index) for index, share in enumerate(shares)]


class _Worker:
    """What one worker may have of a limit."""

    __slots__ = ("acknowledged", "granted", "told", "used", "wanted")

    def __init__(self, share: int) -> None:
        self.granted = share  # the last grant
        self.acknowledged = share  # the share it reported last
        self.used = 0
        self.wanted = 0
        self.told = False  # it was granted something; until then it goes by its part of an even split

    @property
    def reserved(self) -> int:
        """The most that it may have now."""
        return max(self.granted, self.acknowledged, self.used)


class Ledger:
    """One limit: what each worker was granted, has acknowledged, uses and wants.

    The methods return grants (worker, share) to be sent now, in this order. Until its first grant a worker uses
    `control.first_share`, and that of a new budget as soon as it is configured with it.
    """

    def __init__(self, budget: int, workers: int) -> None:
        self.budget = budget
        self._workers = [_Worker(first_share(budget, workers, index)) for index in range(workers)]

    def report(self, worker: int, share: int, used: int, wanted: int) -> list[tuple[int, int]]:
        """Note what a worker has, uses and wants (what it uses included)."""
        entry = self._workers[worker]
        entry.acknowledged, entry.used, entry.wanted = share, used, wanted
        if share == entry.granted:
            return self._settle()
        # The report crossed the grant, or the grant was lost with a process: to hear it twice does no harm.
        entry.told = True
        return [(worker, entry.granted), *self._settle()]

    def restart(self, worker: int) -> list[tuple[int, int]]:
        """Note that a worker has died; what of its first share others do not have now is for the new one."""
        entry = self._workers[worker] = _Worker(0)
        share = min(first_share(self.budget, len(self._workers), worker), max(self._free(), 0))
        entry.granted = entry.acknowledged = share
        entry.told = True
        return [(worker, share), *self._settle()]

    def resize(self, budget: int) -> list[tuple[int, int]]:
        """Note another budget, with which the workers are configured now."""
        self.budget = budget
        for index, entry in enumerate(self._workers):
            if not entry.told:
                entry.granted = first_share(budget, len(self._workers), index)
        return self._settle()

    def _free(self) -> int:
        return self.budget - sum(entry.reserved for entry in self._workers)

    def _settle(self) -> list[tuple[int, int]]:
        """Grant what can be granted on the way to a fair allocation: less at once, more as far as it is free.

        Nothing moves while everybody has what he wants: a share that goes to and fro costs server connections.
        """
        grants: list[tuple[int, int]] = []
        granted = sum(entry.granted for entry in self._workers)
        if granted <= self.budget and all(entry.wanted <= entry.granted for entry in self._workers):
            return grants
        targets = allocate(self.budget, [entry.wanted for entry in self._workers])
        ready = [index for index, entry in enumerate(self._workers) if entry.granted == entry.acknowledged]
        for index in sorted(ready, key=lambda index: self._workers[index].granted - self._workers[index].wanted):
            entry = self._workers[index]
            free = self._free()
            # While more is in use than there may be, what a worker gives up is for nobody, not even for itself.
            share = min(targets[index], entry.reserved + free if free >= 0 else entry.granted)
            if share != entry.granted:
                entry.granted, entry.told = share, True
                grants.append((index, share))
        return grants
