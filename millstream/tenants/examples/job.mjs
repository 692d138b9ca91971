// Runs a batch over NATS and writes its results: node job.mjs LINES.jsonl RESULTS.jsonl
import { readFile, writeFile } from "node:fs/promises";
import { setTimeout } from "node:timers/promises";
import { connect, credsAuthenticator, headers } from "@nats-io/transport-node";

const URL = "nats://127.0.0.1:4222";
const CA = ""; // certificates by which the server is known, where it speaks TLS
const TENANT = "default";
const CREDENTIALS = new globalThis.URL(`${TENANT}.creds`, import.meta.url);
const PIECE = 524288; // bytes of a message; lines may begin in one and end in another

// Ask some gateway; a question that was not answered may be asked again.
async function ask(nc, operation, body, about = headers()) {
  const data = Buffer.isBuffer(body) ? body : JSON.stringify(body);
  const subject = `infer.jobs.${TENANT}.${operation}`;
  const answer = await nc.request(subject, data, { timeout: 30000, headers: about });
  if (answer.headers?.get("Error")) throw new Error(answer.string());
  return operation === "content" ? answer.data : answer.json();
}

// Send the lines of a batch and start it; return its id.
async function start(nc, lines) {
  const upload = await ask(nc, "begin", { bytes: lines.length });
  const about = headers();
  about.set("Upload", upload.id);
  const parts = [];
  for (let at = 0; at < lines.length; at += PIECE)
    parts.push((await ask(nc, "add", lines.subarray(at, at + PIECE), about)).id);
  const wanted = { endpoint: "/v1/chat/completions", completion_window: "24h" };
  return (await ask(nc, "start", { upload_id: upload.id, part_ids: parts, ...wanted })).id;
}

async function readWhole(nc, file_id) {
  const pieces = [];
  for (let offset = 0; ; offset += pieces.at(-1).length) {
    const piece = await ask(nc, "content", { file_id, offset });
    if (!piece.length) return Buffer.concat(pieces);
    pieces.push(piece);
  }
}

const [lines, results] = process.argv.slice(2);
const nc = await connect({
  servers: URL.split(","),
  authenticator: credsAuthenticator(await readFile(CREDENTIALS)),
  ...(CA && { tls: { caFile: CA, handshakeFirst: true } }),
});
const batch_id = await start(nc, await readFile(lines));
console.log(batch_id); // all that must be kept until the results are read
let batch = await ask(nc, "status", { batch_id });
while (!["completed", "failed", "expired", "cancelled"].includes(batch.status)) {
  await setTimeout(1000);
  batch = await ask(nc, "status", { batch_id });
}
const files = [batch.output_file_id, batch.error_file_id].filter(Boolean);
const texts = [];
for (const file of files) texts.push(await readWhole(nc, file));
await writeFile(results, Buffer.concat(texts));
console.log(batch.status, JSON.stringify(batch.request_counts), JSON.stringify(batch.errors));
await nc.close();
