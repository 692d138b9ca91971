// Submits a prompt over NATS and prints the answer as it comes: node producer.mjs [PROMPT]
import { randomUUID } from "node:crypto";
import { readFile } from "node:fs/promises";
import { decode } from "@msgpack/msgpack";
import { jetstream } from "@nats-io/jetstream";
import { connect, credsAuthenticator, headers } from "@nats-io/transport-node";

const URL = "nats://127.0.0.1:4222";
const CA = ""; // certificates by which the server is known, where it speaks TLS
const TENANT = "default";
const MODEL = "gemma-3-270m";
const CREDENTIALS = new globalThis.URL(`${TENANT}.creds`, import.meta.url);

// A request's stored records behind the sequence `after`; some gateway reads them.
async function* readStored(nc, subject, after) {
  const question = subject.replace("infer.reply.", "infer.records.");
  for (let remaining = 1; remaining > 0; ) {
    const answer = await nc.request(question, JSON.stringify({ after }), { timeout: 5000 });
    const page = decode(answer.data);
    if (page.error) throw new Error(`${page.error.code}: ${page.error.message}`);
    for (const [sequence, record] of page.records) {
      after = sequence;
      yield [sequence, record];
    }
    remaining = page.remaining;
  }
}

// Every record of one request, each chunk once: what was missed is read where it is stored. So is a
// log that brokers have lost and a worker has put back, under other sequences.
async function* readReplies(nc, replies) {
  let last = 0; // the last record's sequence
  let received = 0; // tokens that came
  for await (const message of replies) {
    const sequence = Number(message.headers.get("Nats-Sequence"));
    if (sequence === last) continue;
    const isNext = Number(message.headers.get("Nats-Last-Sequence")) === last;
    const heard = [[sequence, message.data]];
    for await (const [stored, packed] of isNext ? heard : readStored(nc, message.subject, 0)) {
      last = stored;
      const record = decode(packed);
      const end = (record.index ?? received) + (record.count ?? 1);
      if (end <= received) continue;
      if (record.type === "chunk") received = end;
      yield record;
    }
  }
}

const prompt = process.argv[2] ?? "The old mill by the stream";
const nc = await connect({
  servers: URL.split(","),
  authenticator: credsAuthenticator(await readFile(CREDENTIALS)),
  ...(CA && { tls: { caFile: CA, handshakeFirst: true } }),
});
const route = `example-${randomUUID()}`;
const replies = nc.subscribe(`infer.reply.${TENANT}.${route}.>`);
await nc.flush();
const about = headers();
about.set("Content-Type", "application/json");
about.set("Nats-Msg-Id", randomUUID());
about.set("Route", route);
const body = JSON.stringify({ prompt, max_tokens: 40 });
const subject = `infer.submit.${TENANT}.${MODEL}.interactive`;
await jetstream(nc).publish(subject, body, { headers: about });
let printed = 0; // characters; after a disaster the answer may be sent again from its start
for await (const record of readReplies(nc, replies)) {
  if (record.type === "chunk") {
    const text = [...record.text]; // characters as they are counted here, not UTF-16
    process.stdout.write(text.slice(Math.max(0, printed - record.characters)).join(""));
    printed = Math.max(printed, record.characters + text.length);
  } else if (record.type === "done" || record.type === "error") {
    console.log(`\n${JSON.stringify(record)}`);
    break;
  }
}
await nc.close();
