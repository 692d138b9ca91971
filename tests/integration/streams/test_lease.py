"""Leadership: one holder, and a quick successor."""

import asyncio

from streams.broker.broker_client import Broker
from streams.coordination.lease import Lease
from streams.coordination.lease_bucket import STREAM, LeaseBucket
from streams.coordination.membership import Membership
from tests.support.accounts_server import connect
from tests.support.eventually import eventually
from tests.support.nats_server import NatsServer


async def test_a_standby_takes_over_when_the_holder_falls_silent(nats_url: str) -> None:
    """A dead or frozen leader is replaced within the lease; two never hold it at once."""
    async with connect(nats_url, "test") as broker:
        first = Lease(broker, "m.1", "a", LeaseBucket(broker, 1.0))
        second = Lease(broker, "m.1", "b", LeaseBucket(broker, 1.0))
        leading = asyncio.create_task(first.run())
        await eventually(lambda: first.is_held)
        standing_by = asyncio.create_task(second.run())
        leading.cancel()  # falls silent without releasing
        while not second.is_held:
            await asyncio.sleep(0.01)
            assert not (first.is_held and second.is_held)
        standing_by.cancel()


async def test_a_released_lease_is_free_at_once(nats_url: str) -> None:
    """A rolling restart does not wait for the lease to run out."""
    async with connect(nats_url, "test") as broker:
        first = Lease(broker, "m", "a", LeaseBucket(broker, 60.0))
        second = Lease(broker, "m", "b", LeaseBucket(broker, 60.0))
        tasks = [asyncio.create_task(first.run())]
        await eventually(lambda: first.is_held)
        tasks[0].cancel()
        await first.release()
        tasks.append(asyncio.create_task(second.run()))
        await eventually(lambda: second.is_held)
        tasks[1].cancel()


async def test_a_lease_that_is_meant_for_another_is_handed_over(nats_url: str) -> None:
    """Its holder is told before anybody else can have it, so that its work ends first."""
    wanted = {"a"}
    async with connect(nats_url, "test") as broker:
        first = Lease(broker, "m", "a", LeaseBucket(broker, 60.0), lambda: "a" in wanted)
        second = Lease(broker, "m", "b", LeaseBucket(broker, 60.0), lambda: "b" in wanted)
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(lease.run()) for lease in (second, first)]
            await eventually(lambda: first.is_held)
            wanted.symmetric_difference_update("ab")
            first.wake()
            second.wake()
            await first.wait_until_lost()
            assert (first.is_held, second.is_held) == (True, False)
            await first.release()
            second.wake()
            await eventually(lambda: second.is_held)
            assert (first.is_held, second.is_held) == (False, True)
            for task in running:
                task.cancel()


async def test_members_come_and_go(nats_url: str) -> None:
    """Everybody hears of everybody, at once of one who leaves and in time of one who dies."""
    async with connect(nats_url, "test") as broker:
        names = "a b", "b", "c"
        seen = {name: Membership(broker, "g", name, LeaseBucket(broker, 1.0)) for name in names}
        tasks = {name: asyncio.create_task(each.run()) for name, each in seen.items()}
        await eventually(lambda: all(each.members == set(names) for each in seen.values()))
        tasks["b"].cancel()  # dies
        await eventually(lambda: seen["c"].members == {"a b", "c"})
        tasks["c"].cancel()
        await seen["c"].leave()
        await eventually(lambda: seen["a b"].members == {"a b"})
        tasks["a b"].cancel()


async def test_who_could_not_be_heard_has_time_to_come_back(nats_url: str) -> None:
    """While a broker is silent all marks run out: who looks first would be alone, for a moment."""
    async with connect(nats_url, "test") as broker:
        first, second = (Membership(broker, "g", name, LeaseBucket(broker, 0.5)) for name in "ab")
        await first._bucket.open()
        await second._renew()
        await first._renew()
        assert first.members == {"a", "b"}
        await eventually(lambda: unmarked(broker, first._group))
        await first._renew()
        assert first.members == {"a", "b"}
        await eventually(lambda: alone(first))


async def unmarked(broker: Broker, group: str) -> bool:
    return not await broker.read_subject(STREAM, f"{group}.*")


async def alone(member: Membership) -> bool:
    await member._renew()
    return len(member.members) == 1


async def test_a_lease_whose_renewal_was_not_confirmed_is_kept(nats_url: str) -> None:
    """Its own mark is proof enough; giving up would leave everybody waiting."""
    async with connect(nats_url, "test") as broker:
        lease = Lease(broker, "m", "a", LeaseBucket(broker, 60.0))
        assert await lease._try_acquire()
        confirmed = lease._revision
        assert await lease._try_acquire()
        lease._revision = confirmed  # as if the second confirmation had got lost
        assert await lease._try_acquire()


async def test_a_namesake_does_not_share_a_lease(nats_url: str) -> None:
    """A process that was started again with the same name is another candidate."""
    async with connect(nats_url, "test") as broker:
        first, second = (Lease(broker, "m", "same", LeaseBucket(broker, 60.0)) for _ in range(2))
        assert await first._try_acquire()
        assert not await second._try_acquire()


async def test_a_new_length_of_the_lease_replaces_the_old_one(nats_url: str) -> None:
    """The broker would take it away sooner than its holder believes."""
    async with connect(nats_url, "test") as broker:
        for seconds in (1.0, 60.0):
            assert await Lease(
                broker, f"m{seconds}", "a", LeaseBucket(broker, seconds)
            )._try_acquire()
            info = await broker.js.stream_info("KV_leases")
            assert info.config.max_age == seconds


async def test_who_does_not_declare_takes_the_length_of_the_lease_from_the_bucket(
    nats_url: str,
) -> None:
    """A holder that believed in a longer one would lead beside its successor."""
    async with connect(nats_url, "test") as broker:
        lease = Lease(broker, "m", "a", LeaseBucket(broker))
        assert not await lease._try_acquire()  # nobody has declared the bucket
        await LeaseBucket(broker, 7.0).open()
        assert await lease._try_acquire()
        assert lease._bucket.seconds == 7.0


async def test_a_broker_that_cannot_be_reached_does_not_stop_anybody(
    nats_server: NatsServer,
) -> None:
    """The lease is given up in a moment anyway; a service must be able to end."""
    async with connect(nats_server.url, "test") as broker:
        lease = Lease(broker, "m", "a", LeaseBucket(broker, 60.0))
        task = asyncio.create_task(lease.run())
        await eventually(lambda: lease.is_held)
        task.cancel()
        nats_server.kill()
        await eventually(lambda: not broker.is_connected)
        await lease.release()
        assert not lease.is_held
