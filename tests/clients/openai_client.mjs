// OpenAI's SDK for JavaScript: whole, streamed, responses in the background, a webhook, and an error.
import { on } from "node:events";
import { createServer } from "node:http";
import { createRequire } from "node:module";

const { default: OpenAI } = createRequire(import.meta.url)(process.env.OPENAI_JS);
const [url, apiKey, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey });
const asked = { model, max_tokens: 8, seed: 3, messages: [{ role: "user", content: "hi" }] };

const whole = await client.chat.completions.create(asked);
if (!whole.id.includes(whole._request_id)) throw new Error(`request id ${whole._request_id}`);
let text = "";
for await (const event of await client.chat.completions.create({ ...asked, stream: true }))
  text += event.choices[0]?.delta?.content ?? "";
if (text !== whole.choices[0].message.content) throw new Error(`streamed ${text}`);

const answered = { model, max_output_tokens: 8, temperature: 0, input: "hi" };
const response = await client.responses.create(answered);
const streamed = await client.responses.stream(answered).finalResponse();
if (streamed.output_text !== response.output_text) throw new Error(`said ${streamed.output_text}`);
const shown = await client.responses.retrieve(streamed.id);
if (shown.output_text !== streamed.output_text) throw new Error(`stored ${shown.output_text}`);
const job = await client.responses.create({ ...answered, background: true, stream: true });
let last;
for await (const event of job) last = event;
const after = last.sequence_number - 1;
const tail = await client.responses.retrieve(last.response.id, { stream: true, starting_after: after });
for await (const event of tail)
  if (JSON.stringify(event) !== JSON.stringify(last)) throw new Error(`resumed ${event.type}`);

const receiver = createServer((request, answer) => {
  const pieces = [];
  request.on("data", (piece) => pieces.push(piece));
  request.on("end", () => {
    answer.writeHead(204).end();
    receiver.emit("webhook", Buffer.concat(pieces).toString(), request.headers);
  });
});
await new Promise((listens) => receiver.listen(0, "127.0.0.1", listens));
const endpoint = await client.post("/webhook_endpoints", {
  body: {
    name: "client",
    url: `http://127.0.0.1:${receiver.address().port}/`,
    event_types: ["response.incomplete"],
  },
});
const webhooks = on(receiver, "webhook");
const cut = await client.responses.create({ ...answered, background: true });
for await (const [body, headers] of webhooks) {
  const event = await client.webhooks.unwrap(body, headers, endpoint.signing_secret);
  if (event.type !== "response.incomplete") throw new Error(`told ${event.type}`);
  if (event.data.id === cut.id) break;
}
await client.delete(`/webhook_endpoints/${endpoint.id}`);
receiver.close();

const begun = Date.now();
const late = { model, prompt: "hi", max_tokens: 2000, deadline_ms: 300 };
const code = await client.completions.create(late).then(
  () => "none",
  (error) => error.code,
);
if (code !== "deadline_exceeded") throw new Error(`code ${code}`);
if (Date.now() - begun > 1500) throw new Error("a request whose deadline had passed was repeated");
console.log("openai for JavaScript");
