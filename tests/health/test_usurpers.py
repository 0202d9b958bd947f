"""Who is the primary where only the gateway promotes, and what is remembered of it."""

from __future__ import annotations

from msgspec.structs import replace

from health.judge import NodeState

from .situations import (
    GONE,
    LIVES,
    RISEN,
    STANDS,
    Judged,
    with_memory,
)
from .worlds import follower, silent

# Who is the primary when only we promote.


THIRD = follower("pg3", receiver_streaming=True)


def usurped() -> Judged:
    judged = Judged("pg1", "pg2", "pg3")
    judged.probe(LIVES, STANDS, THIRD)
    assert judged.probe(RISEN) == "pg1"
    assert judged.probe(LIVES) == "pg1"
    assert judged.memory.usurpers == ("pg2",)
    return judged


def test_usurper_is_not_adopted_when_the_primary_dies_afterwards():
    judged = usurped()
    assert judged.probe(GONE, times=3) == "pg1"
    assert judged.probe(RISEN, THIRD, times=3) == "pg1"
    assert judged.memory.epoch.timeline == 1


def test_usurper_is_not_adopted_by_a_gateway_that_starts_again():
    judged = usurped().again()
    assert judged.probe(GONE, RISEN, THIRD) == "pg1"
    assert judged.memory.usurpers == ("pg2",)


def test_usurper_that_is_silent_while_a_gateway_starts_is_not_forgotten():
    judged = usurped().again()
    assert judged.probe(LIVES, silent("pg2"), THIRD) == "pg1"
    assert judged.memory.usurpers == ("pg2",)
    assert judged.probe(GONE, times=3) == "pg1"
    assert judged.probe(RISEN, times=2) == "pg1"


def test_usurper_with_a_standby_of_its_own_does_not_change_the_timeline():
    # Else the primary would be one of yesterday after its first silence, and that standby the one to be promoted.
    judged = usurped()
    follows = follower("pg3", of="pg2", receiver_streaming=True, timeline=2, received_lsn=5000)
    assert judged.probe(LIVES, follows) == "pg1"
    assert judged.probe(GONE, times=3) == "pg1"
    assert judged.probe(follows) == "pg1"
    assert judged.memory.epoch.timeline == 1
    assert judged.probe(LIVES, times=2) == "pg1"


def test_usurper_that_becomes_a_standby_is_one():
    judged = usurped()
    assert judged.probe(STANDS, LIVES) == "pg1"
    assert not judged.memory.usurpers
    judged.probe(GONE, times=3)
    assert judged.probe(RISEN) == "pg2"


def test_usurper_that_an_operator_promotes_is_adopted():
    judged = usurped()
    judged.probe(GONE, times=3)
    judged.memory = replace(judged.memory, promoting="pg2")
    assert judged.probe(RISEN) == "pg2"
    assert not judged.memory.usurpers


def test_promotion_by_hand_after_the_primary_died_is_adopted():
    judged = Judged("pg1", "pg2", "pg3")
    judged.probe(LIVES, STANDS, THIRD)
    judged.probe(GONE, times=3)
    assert judged.probe(RISEN) == "pg2"
    assert judged.probe(LIVES, times=3) == "pg2"  # it came back too late


def test_promotion_by_hand_beside_a_living_primary_is_followed_where_others_promote():
    judged = Judged("pg1", "pg2", follow=True)
    judged.probe(LIVES, STANDS)
    assert judged.probe(RISEN) == "pg2"
    assert judged.probe(LIVES) == "pg2"
    assert not judged.memory.usurpers


def test_promotion_of_ours_is_adopted_beside_a_living_primary():
    judged = Judged("pg1", "pg2")
    judged.probe(LIVES, STANDS)
    judged.memory = replace(judged.memory, promoting="pg2")
    assert judged.probe(RISEN) == "pg2"


def test_promotion_that_is_heard_of_late_is_adopted_though_the_old_primary_is_back_as_well():
    # Both were down and rise together: the newer timeline was noted, so the older one has nothing to defend.
    judged = Judged("pg1", "pg2", "pg3")
    judged.probe(LIVES, STANDS, THIRD)
    judged.probe(GONE, silent("pg2"), times=3)
    judged.probe(RISEN, LIVES)
    assert judged.probe(RISEN, LIVES) == "pg2"
    assert judged.memory.epoch.timeline == 2


# What is remembered.


def test_remember_former_primary_until_it_receives_from_the_new_one():
    judged = Judged("pg1", "pg2", "pg3", follow=True)
    judged.probe(LIVES, STANDS, THIRD)
    judged.probe(GONE, times=3)
    judged.probe(RISEN)
    assert judged.memory.former == ("pg1",)
    judged.probe(follower("pg1", of="pg2"))
    assert judged.memory.former == ("pg1",)
    judged.probe(follower("pg1", of="pg2", receiver_streaming=True))  # still on its old timeline
    assert judged.memory.former == ("pg1",)
    judged.probe(follower("pg1", of="pg2", receiver_streaming=True, timeline=2))
    assert not judged.memory.former


def test_remember_primary_is_no_former_one():
    judged = Judged("pg1", "pg2", memory=with_memory(former=("pg2",)))
    judged.probe(GONE, RISEN)
    assert (judged.memory.epoch.primary, judged.memory.former) == ("pg2", ("pg1",))


def synchronous(names: str | None, standbys: int) -> NodeState:
    answer = replace(LIVES.answer, synchronous_standby_names=names, synchronous_standbys=standbys)  # type: ignore[type-var]
    return replace(LIVES, result=answer, answer=answer)


def test_remember_synchronous_standbys_as_many_as_there_ever_were():
    # One that is away may have acknowledged the last commit.
    judged = Judged("pg1", "pg2")

    def known() -> tuple[str, int]:
        return judged.memory.synchronous_standby_names, judged.memory.synchronous_standbys

    judged.probe(synchronous("ANY 1 (*)", 2), STANDS)
    assert known() == ("ANY 1 (*)", 2)
    judged.probe(synchronous("ANY 1 (*)", 1))
    assert known() == ("ANY 1 (*)", 2)
    judged.probe(synchronous(None, 0))  # the probe may no longer see it
    assert known() == ("ANY 1 (*)", 2)
    judged.probe(GONE, times=3)
    assert known() == ("ANY 1 (*)", 2)
    judged.probe(synchronous("ANY 1 (pg2)", 1), times=2)
    assert known() == ("ANY 1 (pg2)", 1)
    judged.probe(synchronous("", 0))
    assert known() == ("", 0)


def test_remember_keeps_what_an_operator_and_a_failover_have_noted():
    memory = with_memory(paused=True, promoting="pg2", promoted_at=5.0)
    judged = Judged("pg1", "pg2", memory=memory)
    judged.probe(LIVES, STANDS)
    assert (judged.memory.paused, judged.memory.promoting, judged.memory.promoted_at) == (True, "pg2", 5.0)
