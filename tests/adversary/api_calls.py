"""Every call of the JetStream API, and headers that spoof, with names filled in. Pure."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from streams import job_subjects, topology
from streams.accounts.access import BUCKETS
from streams.job_subjects import JobOperation
from tests.adversary.target_subjects import MARK, Names

API_PREFIXES = ("$JS.API", "CONTROL.API", "WORK.API", "ANSWERS.API")


@dataclass(frozen=True)
class Call:
    """One question: its subject, its body as JSON, headers, and a subject to answer on."""

    subject: str
    body: Any = None
    headers: dict[str, str] = field(default_factory=dict)
    reply: str = ""

    @property
    def payload(self) -> bytes:
        """The body as it is sent."""
        if isinstance(self.body, bytes):
            return self.body
        return b"" if self.body is None else json.dumps(self.body).encode()


def stream_names(*tenants: str) -> list[str]:
    """Every stream and bucket, with the streams of some tenants."""
    makers = (topology.ingress_stream_name, topology.answers_stream_name)
    own = [make(tenant) for tenant in tenants for make in makers]
    return list(dict.fromkeys([*topology.stream_names(1), *BUCKETS, *own]))


def api_calls(stream: str, names: Names, prefix: str) -> Iterator[Call]:
    """Every call of the API about a stream that changes, reads or lists something."""
    consumer, key = names.consumer, f"{stream}.{names.consumer}"
    config = {"name": stream, "subjects": [f"{MARK}.>"]}
    durable = {"durable_name": consumer, "name": consumer, "ack_policy": "explicit"}
    made = {"stream_name": stream, "config": durable}
    bodies: dict[str, Any] = {
        "INFO": None,
        "ACCOUNT.INFO": None,
        "STREAM.NAMES": None,
        "STREAM.LIST": None,
        f"STREAM.CREATE.{stream}": config,
        f"STREAM.UPDATE.{stream}": config,
        f"STREAM.DELETE.{stream}": None,
        f"STREAM.PURGE.{stream}": {},
        f"STREAM.INFO.{stream}": {"subjects_filter": ">"},
        f"STREAM.MSG.GET.{stream}": {"seq": 1},
        f"STREAM.MSG.DELETE.{stream}": {"seq": 1},
        f"STREAM.SNAPSHOT.{stream}": {"deliver_subject": f"{MARK}.snapshot"},
        f"STREAM.RESTORE.{stream}": {"config": config, "state": {}},
        f"STREAM.LEADER.STEPDOWN.{stream}": None,
        f"STREAM.PEER.REMOVE.{stream}": {"peer": "n0"},
        f"CONSUMER.CREATE.{stream}": made,
        f"CONSUMER.CREATE.{key}": made,
        f"CONSUMER.CREATE.{key}.infer.{names.tenant}": made,
        f"CONSUMER.DURABLE.CREATE.{key}": made,
        f"CONSUMER.DELETE.{key}": None,
        f"CONSUMER.INFO.{key}": None,
        f"CONSUMER.LIST.{stream}": None,
        f"CONSUMER.NAMES.{stream}": None,
        f"CONSUMER.MSG.NEXT.{key}": {"batch": 10, "expires": 200_000_000},
        f"CONSUMER.PAUSE.{key}": {"pause_until": "2030-01-01T00:00:00Z"},
        f"CONSUMER.RESET.{key}": {"seq": 1},
        f"CONSUMER.UNPIN.{key}": {"group": MARK},
        f"CONSUMER.LEADER.STEPDOWN.{key}": None,
        f"DIRECT.GET.{stream}": {"seq": 1, "batch": 1000},
        f"DIRECT.GET.{stream}.infer.>": None,
        "META.LEADER.STEPDOWN": None,
        "SERVER.REMOVE": {"peer": "n0"},
        f"ACCOUNT.STREAM.MOVE.{names.tenant}.{stream}": {"server": "n0"},
        f"ACCOUNT.PURGE.{names.tenant}": None,
    }
    return (Call(f"{prefix}.{call}", body) for call, body in bodies.items())


def copying_calls(stream: str, prefix: str) -> Iterator[Call]:
    """Streams that would copy another one, and changes by which one would send copies away."""
    copy = f"{MARK}_{stream}"
    external = {"api": "$JS.API", "deliver": f"{MARK}.deliver"}
    for source in ({"name": stream}, {"name": stream, "external": external}):
        yield Call(f"{prefix}.STREAM.CREATE.{copy}", {"name": copy, "sources": [source]})
        yield Call(f"{prefix}.STREAM.CREATE.{copy}", {"name": copy, "mirror": source})
    republish = {"src": ">", "dest": f"{MARK}.>"}
    yield Call(f"{prefix}.STREAM.UPDATE.{stream}", {"name": stream, "republish": republish})
    sources = [{"name": "REQUESTS"}]
    yield Call(f"{prefix}.STREAM.UPDATE.{stream}", {"name": stream, "sources": sources})


def delivering_calls(
    stream: str, prefix: str, consumer: str, filter_subject: str, targets: Sequence[str]
) -> Iterator[Call]:
    """Consumers that would send what is stored to a subject of their maker's choice."""
    for target in targets:
        config = {"name": consumer, "deliver_subject": target, "filter_subject": filter_subject}
        lasting = {**config, "durable_name": consumer, "ack_policy": "explicit"}
        wide = {**lasting, "filter_subjects": ["infer.work.>", "infer.request.>"]}
        key = f"{prefix}.CONSUMER.CREATE.{stream}"
        yield Call(key, {"stream_name": stream, "config": {"deliver_subject": target}})
        for each in (config, lasting, wide):
            yield Call(f"{key}.{consumer}", {"stream_name": stream, "config": each})
            body = {"stream_name": stream, "config": each}
            yield Call(f"{key}.{consumer}.{filter_subject}", body)
        durable = f"{prefix}.CONSUMER.DURABLE.CREATE.{stream}.{consumer}"
        yield Call(durable, {"stream_name": stream, "config": lasting})


def job_calls(tenant: str, names: Names) -> Iterator[Call]:
    """A tenant's questions about batches, all with others' batches, files and uploads in them."""
    batch, file, upload = f"batch_{names.batch}", f"file-{names.file}", f"upload_{names.file}"
    start = {"upload_id": upload, "part_ids": [f"part_{names.file}"], "input_file_id": file}
    bodies: list[tuple[JobOperation, Any]] = [
        (JobOperation.BEGIN, {"bytes": 1}),
        (JobOperation.ADD, MARK.encode()),
        (JobOperation.START, {**start, "endpoint": "/v1/completions", "completion_window": "24h"}),
        *((JobOperation.CONTENT, {"file_id": each}) for each in (file, upload, batch)),
        *((JobOperation.STATUS, {"batch_id": each}) for each in (batch, file)),
        *((JobOperation.CANCEL, {"batch_id": each}) for each in (batch, file)),
    ]
    for operation, body in bodies:
        subject = job_subjects.job_question(tenant, operation)
        yield Call(subject, body, {"Upload": upload})


def spoofing_headers(request: str, target: str) -> list[dict[str, str]]:
    """Headers by which a message would be more than it is."""
    return [
        {"Nats-Rollup": "all"},
        {"Nats-Rollup": "sub"},
        {"Nats-Msg-Id": request},
        {"Nats-Expected-Stream": "REQUESTS"},
        {"Nats-Expected-Last-Sequence": "0"},
        {"Nats-Expected-Last-Subject-Sequence": "0"},
        {
            "Nats-Expected-Last-Subject-Sequence": "0",
            "Nats-Expected-Last-Subject-Sequence-Subject": ">",
        },
        {"KV-Operation": "PURGE"},
        {"KV-Operation": "DEL", "Nats-Rollup": "sub"},
        {"Nats-Marker-Reason": "MaxAge"},
        {"Nats-TTL": "1s"},
        {"Nats-Incr": "+1000000"},
        {"Nats-Schedule": "@every 1s", "Nats-Schedule-Target": target},
        {"Nats-Batch-Id": MARK, "Nats-Batch-Sequence": "1", "Nats-Batch-Commit": "1"},
        {"Nats-Trace-Dest": target},
        {"Nats-Trace-Dest": target, "Nats-Trace-Only": "true"},
        {"Nats-Stream": "SIGNALS", "Nats-Subject": "infer.gone", "Nats-Sequence": "1"},
        {"Nats-Request-Info": '{"acc":"CONTROL"}', "Status": "100"},
        {"Nats-Stream-Source": f"REQUESTS 1 > > {target}"},
    ]
