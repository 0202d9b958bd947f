"""Random worlds: whatever breaks between two steps, no commit is lost and the cluster becomes well again."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from health import failover
from health.failover import Action
from health.view import Memory

from .clusters import GATEWAY, Cluster, Gateway

SIZE = 4
NAMES = [f"pg{i}" for i in range(1, SIZE + 1)]
NODES = st.sampled_from(NAMES)
PLACES = st.sampled_from([*NAMES, GATEWAY, GATEWAY, GATEWAY])
FAULTS = ["stop", "go on", "kill", "start"]
# What happens, and how often in a hundred times.
SHARES = {
    st.just(("advance", NAMES)): 30,
    st.tuples(st.just("advance"), st.lists(NODES, min_size=1, max_size=3, unique=True)): 6,
    st.just(("write",)): 14,
    st.tuples(st.just("replicate"), NODES): 20,
    st.tuples(st.just("cut"), NODES, PLACES): 8,
    st.tuples(st.just("mend"), NODES, PLACES): 4,
    st.tuples(st.sampled_from(FAULTS), st.just("pg1")): 4,
    st.tuples(st.sampled_from(FAULTS), NODES): 3,
    st.tuples(st.just("time out"), NODES): 4,
    st.sampled_from([("die",), ("lose answers",), ("fill disk",), ("free disk",)]): 4,
    st.tuples(st.sampled_from(["by hand", "switch"]), NODES): 3,
}
EVENTS = st.sampled_from([events for events, share in SHARES.items() for _ in range(share)]).flatmap(
    lambda events: events
)


def begin(names: str, size: int = SIZE) -> Gateway:
    """A cluster at work, and a gateway that knows it."""
    gateway = Gateway(Cluster(size, names), Memory(), 0.0)
    for _ in range(4):
        gateway.observe()
        gateway.advance()
    assert gateway.is_well()
    return gateway


def happen(gateway: Gateway, event: tuple) -> Gateway:
    """Let one thing happen; return the gateway, which may be another one since."""
    cluster = gateway.cluster
    machines = cluster.machines
    match event:
        case "advance", names:
            cluster.connect()
            gateway.observe(names)
            gateway.advance()
        case "kill", name:
            cluster.kill(name)
        case "stop", name:
            machines[name].is_stopped = machines[name].is_alive
        case "go on", name:
            machines[name].is_stopped = False
            cluster.answer()
        case "start", name:
            machines[name].is_alive = True
        case "replicate", name:
            cluster.connect()
            cluster.replicate(name)
        case "time out", name:
            cluster.time_out(name)
        # Of two on one timeline neither is adopted: that is for an operator to sort out.
        case "by hand", name if machines[name].works and not any(machine.by_hand for machine in machines.values()):
            cluster.promote(name, by_hand=True)
        case "switch", name if gateway.plan is None and gateway.memory.promoting is None:
            if all(state.result for state in gateway.states.values()):
                world = gateway.world()
                if failover.cannot_switch(world, name) is None:
                    gateway.begin(failover.switchover(world, name))
        case "cut", one, other if one != other:
            cluster.cuts.add(frozenset((one, other)))
        case "mend", one, other:
            cluster.cuts.discard(frozenset((one, other)))
        case ("write",):
            if gateway.routed is not None:
                cluster.write(gateway.routed)
        case ("die",):
            gateway = gateway.again()
        case ("lose answers",):
            cluster.loses_answers = True
        case ("fill disk",):
            gateway.is_disk_full = True
        case ("free disk",):
            gateway.is_disk_full = False
    return gateway


@settings(
    max_examples=400,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(st.sampled_from(["ANY 1 (*)", "ANY 2 (*)", "FIRST 3 (*)", ""]), st.lists(EVENTS, min_size=10, max_size=80))
def test_failover_random_world_loses_no_commit_and_becomes_well(names, events):
    gateway = begin(names)
    for event in events:
        gateway = happen(gateway, event)
        gateway.examine()
    gateway.heal()


ALL = ("advance", NAMES)


def killed(names: str) -> Gateway:
    """A primary that died with a commit that one standby has."""
    gateway = begin(names)
    for event in [("write",), ("replicate", "pg3"), ("write",), ("replicate", "pg3"), ("replicate", "pg4")]:
        gateway = happen(gateway, event)
    gateway = happen(gateway, ("kill", "pg1"))
    while gateway.plan is None:
        gateway = happen(gateway, ALL)
    return gateway


def outcome(gateway: Gateway) -> tuple[str | None, int, set[int]]:
    for _ in range(30):
        gateway = happen(gateway, ALL)
        gateway.examine()
    assert gateway.plan is None
    machine = gateway.cluster.machines[gateway.routed or ""]
    return gateway.routed, machine.timeline, {record for record in machine.wal if isinstance(record, int)}


@pytest.mark.parametrize("names", ["", "ANY 1 (*)"])
@pytest.mark.parametrize("after", range(8))
def test_failover_interrupted_after_any_step_comes_to_the_same_end(names, after):
    gateway = killed(names)
    for _ in range(after):
        gateway = happen(gateway, ALL)
    end = outcome(happen(gateway, ("die",)))
    assert end == outcome(killed(names)) == ("pg3", 2, {1, 2})


@pytest.mark.parametrize("after", range(11))
def test_switchover_interrupted_after_any_step_ends_with_one_primary(after):
    gateway = begin("ANY 1 (*)")
    gateway = happen(happen(gateway, ("write",)), ("replicate", "pg2"))
    gateway = happen(gateway, ("switch", "pg2"))
    for _ in range(after):
        if gateway.step is not None and gateway.step.action is Action.PROMOTE:
            gateway = happen(gateway, ("start", "pg1"))  # as a standby: the command goes on by itself
        gateway = happen(gateway, ALL)
    gateway = happen(gateway, ("die",))
    gateway.heal()
    assert gateway.routed == ("pg1" if after < 6 else "pg2")
    assert gateway.cluster.acknowledged == {1}
