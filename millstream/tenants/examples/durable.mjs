// Asks for a durable answer and reads it, now or days later: node durable.mjs ID [PROMPT]
import { readFile } from "node:fs/promises";
import { setTimeout } from "node:timers/promises";
import { jetstream } from "@nats-io/jetstream";
import { connect, credsAuthenticator, headers } from "@nats-io/transport-node";

const URL = "nats://127.0.0.1:4222";
const CA = ""; // certificates by which the server is known, where it speaks TLS
const TENANT = "default";
const MODEL = "gemma-3-270m";
const CREDENTIALS = new globalThis.URL(`${TENANT}.creds`, import.meta.url);
const API = "ANSWERS.API"; // JetStream's calls for the tenant's own stream of answers

// The answer to the request with an id of ours; null while there is none.
async function readAnswer(nc, key) {
  const subject = `${API}.DIRECT.GET.ANSWERS_${TENANT}.infer.answer.${TENANT}.${key}`;
  const ask = (name) => nc.request(name, "", { timeout: 5000 });
  const last = await ask(subject);
  if (last.headers?.code) return null; // 404: not yet
  const parts = []; // of an answer larger than a message
  for (let n = 0; n < Number(last.headers.get("Parts") || "1") - 1; n++)
    parts.push(await ask(`${subject}.${last.headers.get("Nonce")}-${n}`));
  if (parts.some((part) => part.headers?.code))
    throw new Error("parts of the answer are gone: purge it, and submit again");
  return JSON.parse(Buffer.concat([...parts, last].map((part) => part.data)));
}

const [key, prompt = "The old mill by the stream"] = process.argv.slice(2);
const nc = await connect({
  servers: URL.split(","),
  authenticator: credsAuthenticator(await readFile(CREDENTIALS)),
  ...(CA && { tls: { caFile: CA, handshakeFirst: true } }),
});
const about = headers();
about.set("Nats-Msg-Id", key);
about.set("Accept", "application/json");
about.set("Answer", "durable");
const body = JSON.stringify({ prompt, max_tokens: 40 });
let answer = await readAnswer(nc, key);
if (!answer) // the same id again is the same request
  await jetstream(nc).publish(`infer.submit.${TENANT}.${MODEL}.standard`, body, { headers: about });
while (!answer) {
  await setTimeout(500);
  answer = await readAnswer(nc, key);
}
const { text = "", ...rest } = answer;
console.log(text);
console.log(JSON.stringify(rest));
const filter = JSON.stringify({ filter: `infer.answer.${TENANT}.${key}` });
await nc.request(`${API}.STREAM.PURGE.ANSWERS_${TENANT}`, filter, { timeout: 5000 });
await nc.close();
