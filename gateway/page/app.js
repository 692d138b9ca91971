// The page: a form that runs one generation at a time, and shows its text, rate and stages.

import { Client } from "./millstream.js";

const KEPT = "millstream.key";
const PATIENCE_MS = 15000;
const page = (id) => document.getElementById(id);

let client = null;
let stream = null; // the generation under way
let began = 0; // when the generation was submitted, by performance.now()
let unshown = ""; // text that has come since the last frame of the screen
let first = null; // when the first chunk came, by performance.now()
let tokens = 0;
let firstCount = 0; // tokens of the first chunk, which the rate leaves out

// --- key and models ---------------------------------------------------------------------------

function restoreKey() {
  const kept = localStorage.getItem(KEPT);
  if (kept === null) return;
  page("key").value = kept;
  page("remember").checked = true;
  loadModels();
}

function keepKey() {
  if (page("remember").checked && page("key").value) {
    localStorage.setItem(KEPT, page("key").value);
  } else {
    localStorage.removeItem(KEPT);
  }
}

async function loadModels() {
  const key = page("key").value.trim();
  keepKey();
  if (!key) return showModels([], "enter a key first", "");
  try {
    const answer = await fetch("/v1/models", { headers: { Authorization: `Bearer ${key}` } });
    const body = await answer.json();
    if (!answer.ok) return showModels([], "no models", `${body.error.code}: ${body.error.message}`);
    const able = body.data.filter((m) => m.task === "generate");
    able.sort((a, b) => (b.workers > 0) - (a.workers > 0)); // models with workers come first
    showModels(able.map((m) => m.id), "no models", "");
  } catch (error) {
    showModels([], "no models", `The gateway cannot be reached: ${error.message}`);
  }
}

function showModels(names, placeholder, note) {
  const select = page("model");
  const chosen = select.value;
  const options = names.map((name) => new Option(name, name, false, name === chosen));
  select.replaceChildren(...(options.length ? options : [new Option(placeholder, "")]));
  select.disabled = names.length === 0;
  page("key-note").textContent = note;
}

// Metrics may be on a port of their own, which this page does not know.
async function linkMetrics() {
  const answer = await fetch("/metrics", { method: "HEAD" }).catch(() => null);
  page("metrics").hidden = !answer?.ok;
}

// --- running ----------------------------------------------------------------------------------

async function run() {
  if (stream || !page("ask").reportValidity()) return;
  clear();
  running(true);
  try {
    stream = clientOf(page("key").value.trim()).generate(ask(), { observe: showFrame });
    for await (const chunk of stream) showChunk(chunk);
    showDone(await stream.ended);
  } catch (error) {
    showError(error);
  }
  stream = null;
  running(false);
  showRate();
}

function clientOf(key) {
  if (client?.key !== key) {
    client?.close();
    client = Object.assign(new Client({ key, patienceMs: PATIENCE_MS }), { key });
    client.addEventListener("connection", (event) => showConnection(event.detail));
  }
  return client;
}

function ask() {
  const prompt = page("prompt").value;
  const asked = page("chat").checked ? { messages: [{ role: "user", content: prompt }] } : { prompt };
  return {
    ...asked,
    model: page("model").value,
    max_tokens: page("max-tokens").valueAsNumber,
    temperature: page("temperature").valueAsNumber,
  };
}

function cancel() {
  if (!stream) return;
  showStatus("running", "Cancelling …");
  stream.cancel();
}

// --- showing ----------------------------------------------------------------------------------

const REASONS = { stop: "Finished", length: "Finished: token limit reached", cancelled: "Cancelled" };

function showConnection({ state, failures }) {
  if (!stream || state === "open") return;
  const attempt = failures ? ` (attempt ${failures + 1})` : "";
  if (stream.requestId) showStatus("resuming", `Connection lost, resuming${attempt} …`);
  else showStatus("running", `Connecting${attempt} …`);
}

function showFrame(frame) {
  if (frame.type === "started") return showStarted(frame);
  page("request-id").textContent = frame.request_id;
  showStatus("running", "Accepted");
}

function showStarted(frame) {
  const again = frame.attempt > 1 ? `, attempt ${frame.attempt}` : "";
  showStatus("running", `Running on ${frame.model}@${frame.version}${again}`);
}

function showChunk(chunk) {
  if (first === null) {
    first = performance.now();
    firstCount = chunk.count;
    page("ttft").textContent = milliseconds(first - began);
  }
  tokens += chunk.count;
  if (!unshown) requestAnimationFrame(showText);
  unshown += chunk.text;
}

// Once a frame: each call lays out the whole answer, and a stream has more chunks than a screen frames.
function showText() {
  if (!unshown) return;
  const output = page("output");
  const atEnd = output.scrollHeight - output.scrollTop - output.clientHeight < 40;
  output.firstChild.appendData(unshown);
  unshown = "";
  if (atEnd) output.scrollTop = output.scrollHeight;
  page("tokens").textContent = tokens;
  showRate();
}

function showRate() {
  const seconds = (performance.now() - first) / 1000;
  if (tokens > firstCount) page("rate").textContent = ((tokens - firstCount) / seconds).toFixed(1);
}

function showDone(done) {
  showText();
  showStatus(done.finish_reason, REASONS[done.finish_reason] ?? done.finish_reason);
  page("tokens").textContent = `${done.usage.prompt_tokens} in, ${done.usage.completion_tokens} out`;
  showStages(done.timing);
}

function showStages(timing) {
  const entries = Object.entries(timing);
  const longest = Math.max(...entries.map(([, ms]) => ms), 0.001);
  const rows = entries.map(([stage, ms]) => stageRow(stage, ms, ms / longest));
  page("stages").tBodies[0].replaceChildren(...rows);
  page("stages").hidden = entries.length === 0;
}

function stageRow(stage, ms, share) {
  const row = document.createElement("tr");
  const [name, bar, time] = ["th", "td", "td"].map((tag) => row.appendChild(document.createElement(tag)));
  name.scope = "row";
  name.textContent = stage.replaceAll("_", " ");
  bar.appendChild(document.createElement("span")).style.width = `${Math.max(100 * share, 0.5)}%`;
  time.textContent = milliseconds(ms);
  return row;
}

function showError(error) {
  showText();
  const wait = error.retryAfterMs ? ` – try again in ${milliseconds(error.retryAfterMs)}` : "";
  page("error").textContent = `${error.code ?? error.name}: ${error.message}${wait}`;
  page("error").hidden = false;
  showStatus("failed", "Failed");
}

function showStatus(state, text) {
  page("status").dataset.state = state;
  page("status").textContent = text;
}

function milliseconds(ms) {
  return ms < 1000 ? `${ms.toFixed(ms < 10 ? 1 : 0)} ms` : `${(ms / 1000).toFixed(2)} s`;
}

function clear() {
  began = performance.now();
  first = null;
  tokens = firstCount = 0;
  unshown = "";
  showStatus("running", "Connecting …");
  page("output").replaceChildren(document.createTextNode(""));
  for (const id of ["ttft", "rate", "tokens", "request-id"]) page(id).textContent = "–";
  page("error").hidden = true;
  page("stages").hidden = true;
}

// Screen readers read the answer once, when it is complete: `aria-busy` holds them back until then.
function running(is) {
  page("run").disabled = is;
  page("cancel").disabled = !is;
  page("output").setAttribute("aria-busy", is);
}

// --- wiring -----------------------------------------------------------------------------------

page("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  run();
});
page("cancel").addEventListener("click", cancel);
page("key").addEventListener("change", loadModels);
page("remember").addEventListener("change", keepKey);
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") cancel();
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    run();
  }
});
restoreKey();
linkMetrics();
