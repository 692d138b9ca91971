"""Violations in the log of a test's server fail the test."""

from pathlib import Path

from streams.accounts.access import UserClass
from tests.support.accounts_server import AccountsServer, connect, process_files


async def test_a_violation_names_who_and_on_what(tmp_path: Path) -> None:
    """Else a missing right would be a time-out somewhere, or nothing at all."""
    server = AccountsServer(tmp_path)
    try:
        files = process_files(server.url, UserClass.WORKER, "w1")
        async with connect(server.url, "the-worker", files) as worker:
            await worker.client.publish("infer.request.acme.mock.batch", b"")
            await worker.client.subscribe("infer.reply.acme.>")
            await worker.client.flush()
    finally:
        server.kill()
    published, subscribed = server.violations()
    assert "the-worker" in published
    assert "WORKERS" in published
    assert 'Publish Violation - Subject "infer.request.acme.mock.batch"' in published
    assert 'Subscription Violation - Subject "infer.reply.acme.>"' in subscribed
