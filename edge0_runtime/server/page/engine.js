// The live panel: /v1/engine once, then its events for as long as the page can be seen.

import { call, events, Refused } from "./api.js";
import { byId, definitions, el } from "./dom.js";
import { bytes, figures, runs, share } from "./format.js";
import { HeatMaps } from "./heatmap.js";

const NOW_SECONDS = 2;
const STEPS_DRAWN = 120;
const STATES = { idle: "ready", prompt: "reading the prompt", answer: "answering" };
const SUMS = ["steps", "seconds", "blocked_seconds", "bytes_read", "loads", "hits", "misses", "guessed", "guessed_right"];

const nothing = () => Object.fromEntries(SUMS.map((name) => [name, 0]));
let maps = null;
let recent = []; // events of the last NOW_SECONDS of decoding
let answer = nothing();
let steps = [];
let states = {}; // model -> what it does
let models = new Map(); // name -> how it is served

/** Watch the engine while the page is visible; `onState(text)` hears of every change, `onEngine(data)` of /v1/engine. */
export async function watchEngine(onState, onEngine) {
  for (let failures = 0; ; failures += 1) {
    if (document.hidden) await new Promise((seen) => document.addEventListener("visibilitychange", seen, { once: true }));
    if (document.hidden) continue;
    const controller = new AbortController();
    const leave = () => document.hidden && controller.abort();
    document.addEventListener("visibilitychange", leave);
    try {
      const data = await (await call("v1/engine", { signal: controller.signal })).json();
      onEngine(data);
      begin(data);
      const response = await call("v1/engine/events", { signal: controller.signal });
      failures = 0;
      for await (const event of events(response)) take(JSON.parse(event), onState);
      onState("the server has ended; looking for it again");
    } catch (problem) {
      if (problem.name === "AbortError") continue;
      onState(problem.message ?? "the connection broke");
      if (problem instanceof Refused && problem.status === 401) return;
    } finally {
      document.removeEventListener("visibilitychange", leave);
    }
    await new Promise((again) => setTimeout(again, Math.min(10, 2 ** failures) * 1000));
  }
}

function begin(data) {
  if (!maps || maps.experts !== data.experts || maps.layers.length !== data.layers.length) maps = new HeatMaps(data);
  models = new Map(data.models.map((model) => [model.name, model]));
  states = {};
  byId("serving").replaceChildren(...data.models.map((model) => el("li", {}, serving(model, data))));
  byId("adapters").replaceChildren(...data.models.flatMap((model) => adapterViews(model)));
  showPlan(data.plan);
  showMemory(data.memory, data.plan);
  showTotals(data.models[0].stats);
  showFigures();
  showLayers();
}

function take(event, onState) {
  if (event.state !== states[event.model]) {
    if (event.state === "prompt" || (event.state === "answer" && states[event.model] === "idle")) [recent, answer] = [[], nothing()];
    states[event.model] = event.state;
    const busy = Object.entries(states).find(([, state]) => state !== "idle");
    const who = busy && models.size > 1 ? `${busy[0]}: ` : "";
    onState(who + STATES[busy ? busy[1] : "idle"]);
  }
  if (event.steps) {
    for (const name of SUMS) answer[name] += event[name];
    recent.push(event);
    while (recent.length > 1 && sum(recent, "seconds") - recent[0].seconds > NOW_SECONDS) recent.shift();
    steps = [...steps, ...event.recent].slice(-STEPS_DRAWN);
    maps.add(event.cells, event.steps, models.get(event.model).predicted_layers);
    showFigures();
    drawSteps();
    if (byId("layers").closest("details").open) showLayers();
  }
  showMemory(event.memory);
  showTotals(event.stats);
}

const sum = (list, name) => list.reduce((total, one) => total + one[name], 0);

// -- numbers ----------------------------------------------------------------------------------------------------------

const FIGURES = [
  ["tokens/s", (of) => figures(of.steps / of.seconds)],
  ["a step", (of) => figures((1000 * of.seconds) / of.steps, " ms")],
  ["of it waiting for experts", (of) => figures((1000 * of.blocked_seconds) / of.steps, " ms")],
  ["read a step", (of) => bytes(of.bytes_read / of.steps)],
  ["experts that were in memory", (of) => share(of.hits, of.hits + of.misses)],
  ["guesses that were right", (of) => share(of.guessed_right, of.guessed)],
];

function showFigures() {
  const now = Object.fromEntries(SUMS.map((name) => [name, sum(recent, name)]));
  const rows = FIGURES.map(([name, of]) => el("tr", {}, el("th", { scope: "row" }, name), el("td", {}, of(now)), el("td", {}, of(answer))));
  byId("figures").tBodies[0].replaceChildren(...rows);
}

function serving(model, { experts, layers }) {
  const routed = model.predicted_layers.length ? `layers ${runs(model.predicted_layers)} routed a token ahead` : "every layer by its own gate";
  const parts = [
    `${model.base}, tier ${model.tier}: ${model.k} of ${experts} experts in ${layers.length} layers; arm ${model.arm}`,
    `prerouter ${model.prerouter ? "on" : "off"} (${routed})`,
    model.lora ? `recovery LoRA on (${model.lora_modules} modules)` : "recovery LoRA off",
  ];
  return `${model.name}: ${parts.join(", ")}`;
}

let budget = null;

function showMemory(memory, plan) {
  if (plan) budget = plan.budget_bytes;
  const bar = (value, most, name) => (most ? el("meter", { min: 0, max: most, value: Math.min(value, most), "aria-label": name }) : "");
  const row = (name, text, value, most) => el("tr", {}, el("th", { scope: "row" }, name), el("td", {}, text), el("td", {}, bar(value, most, name)));
  const { allocator, process } = memory;
  byId("memory").tBodies[0].replaceChildren(
    row("allocator", `${bytes(allocator)}, at most ${bytes(memory.allocator_peak)}`, allocator, budget),
    row("process", `${bytes(process)}, at most ${bytes(memory.process_peak)}`, process, memory.process_peak),
    row("budget", budget ? bytes(budget) : "none", 0, 0),
    row("experts", memory.experts_room === null ? "all, in mlx-lm's modules" : `${bytes(memory.experts_held)} of ${bytes(memory.experts_room)}`, memory.experts_held, memory.experts_room),
  );
}

function showPlan(plan) {
  const ms = plan?.floor_ms_per_token;
  const pairs = plan && [
    ["memory budget", bytes(plan.budget_bytes)],
    ["base", bytes(plan.resident_bytes + plan.widened_bytes + (plan.embedding_held ? plan.embedding_bytes : 0))],
    ["adapters", bytes(plan.adapter_bytes)],
    ["context", `${bytes(plan.context_bytes)} for ${figures(plan.context)} tokens`],
    ["activations", `${bytes(plan.workspace_bytes)}, prompts by ${plan.prefill_chunk} tokens`],
    ["experts", `${plan.slots} of ${plan.experts} fit, ${bytes(plan.slot_nbytes)} each`],
    ["a token needs", `${plan.step_experts} experts, ${plan.predicted_experts} of them known a token ahead`],
    ["expected reads", `${bytes(plan.bytes_per_token)} a token`],
    ["disk", plan.disk_bytes_per_second && `${bytes(plan.disk_bytes_per_second)}/s${ms ? `: at least ${figures(ms, " ms")} a token` : ""}`],
  ];
  byId("plan").replaceChildren(...(pairs ? definitions(pairs) : [el("dd", {}, "none: everything is in memory")]));
}

function showTotals(stats) {
  byId("totals").replaceChildren(...definitions(Object.entries(stats).map(([name, value]) => [name.replaceAll("_", " "), name.endsWith("_bytes") ? bytes(value) : figures(value)])));
}

function showLayers() {
  const rows = maps.rows().map(([layer, ...cells]) => el("tr", {}, el("th", { scope: "row" }, layer), ...cells.map((cell) => el("td", {}, cell))));
  byId("layers").tBodies[0].replaceChildren(...rows);
}

// -- provenance -------------------------------------------------------------------------------------------------------

const short = (hash) => (hash ? hash.slice(0, 12) : null);

function adapterViews({ name, adapters, fingerprint, belong_together: together }) {
  const head = el("dl", {}, ...definitions([["model", name], ["base", short(fingerprint)], ["belong together", together]]));
  const parts = Object.entries(adapters ?? {}).map(([kind, adapter]) => adapterView(kind, adapter));
  return [head, ...(adapters ? parts : [el("p", {}, "The adapter files can't be read any more.")])];
}

function adapterView(kind, adapter) {
  if (!adapter) return el("section", {}, el("h3", {}, kind), el("p", {}, "no file"));
  const made = adapter.provenance;
  const pairs = [
    ["served", adapter.served ? "yes" : "no"],
    ["file", adapter.file],
    ["sha256", short(adapter.sha256)],
    ["size", bytes(adapter.payload_bytes)],
    ["made by", made && `edge0_train ${made.tool_version}, commit ${short(made.commit)}`],
    ["teacher", made?.teacher && `${made.teacher.id} (${made.teacher.revision})`],
    ["data", made?.data && `${short(made.data.fingerprint)}, ${figures(made.data.rows)} rows`],
  ];
  const phases = (made?.phases ?? []).map((phase) => {
    const metrics = Object.entries(phase.metrics).map(([name, value]) => `${name} ${figures(value)}`).join(", ");
    return el("li", {}, `${phase.phase}: ${figures(phase.steps)} steps, ${figures(phase.tokens)} tokens, seed ${phase.seed}, ${phase.time}`, el("br"), el("span", { class: "note" }, metrics));
  });
  return el("section", {}, el("h3", {}, kind), el("dl", {}, ...definitions(pairs)), el("ol", { class: "phases" }, ...phases));
}

// -- steps ------------------------------------------------------------------------------------------------------------

function drawSteps() {
  const canvas = byId("steps");
  const context = canvas.getContext("2d");
  const style = getComputedStyle(document.documentElement);
  const longest = Math.max(...steps.map(([seconds]) => seconds));
  const width = canvas.width / STEPS_DRAWN;
  context.clearRect(0, 0, canvas.width, canvas.height);
  steps.forEach(([seconds, blocked], at) => {
    const height = (canvas.height * seconds) / longest;
    const waiting = (canvas.height * blocked) / longest;
    context.fillStyle = style.getPropertyValue("--ran");
    context.fillRect(at * width, canvas.height - height, width - 1, height - waiting);
    context.fillStyle = style.getPropertyValue("--read");
    context.fillRect(at * width, canvas.height - waiting, width - 1, waiting);
  });
  const mean = (index) => figures((1000 * steps.reduce((total, step) => total + step[index], 0)) / steps.length, " ms");
  canvas.setAttribute("aria-label", `the last ${steps.length} steps: ${mean(0)} each, ${mean(1)} of it waiting, the longest ${figures(1000 * longest, " ms")}`);
}
