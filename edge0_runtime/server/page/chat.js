// The conversation on the screen: asking, streaming, stopping, regenerating, editing.

import { answer } from "./api.js";
import { Conversation } from "./conversation.js";
import { byId, el } from "./dom.js";
import { figures } from "./format.js";
import { render } from "./markdown.js";
import { samplingFields, systemPrompt } from "./settings.js";

const list = byId("messages");
const prompt = byId("prompt");
const conversation = new Conversation();
let models = () => [];
let running = null; // the AbortController of the answers that are being written

/** `chosen` gives the ids of the models that answer: one, or two to be compared. */
export function startChat(chosen) {
  models = chosen;
  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    const text = prompt.value;
    if (running || text.trim() === "") return;
    if (ask(conversation.turns.length, text)) prompt.value = "";
  });
  prompt.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    byId("composer").requestSubmit();
  });
  byId("stop").addEventListener("click", () => running?.abort());
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && running) running.abort();
  });
  byId("new").addEventListener("click", () => {
    running?.abort();
    conversation.clear();
    show();
    prompt.focus();
  });
  show();
}

/** Put `text` where turn `index` is and have it answered; whether that began. What stood there and after it is gone. */
function ask(index, text) {
  const fields = samplingFields();
  if (fields === null || running) return false;
  const turn = conversation.ask(index, text, models());
  const controller = new AbortController();
  busy(controller);
  show();
  list.scrollTop = list.scrollHeight;
  const views = [...list.lastElementChild.querySelectorAll(".answer")];
  const all = turn.answers.map((given, at) => write(index, given, views[at], fields, controller.signal));
  Promise.all(all).then(() => {
    conversation.keep();
    if (running === controller) busy(null);
    show();
  });
  return true;
}

/** Stream one answer into its view. It never throws: what went wrong is part of the answer. */
async function write(index, given, view, fields, signal) {
  const began = performance.now();
  const seconds = () => (performance.now() - began) / 1000;
  const draw = drawer(view, given);
  try {
    const messages = conversation.messages(index, given.model, systemPrompt());
    for await (const { text, finish, tokens } of answer(given.model, messages, fields, signal)) {
      if (text) given.firstSecond ??= seconds();
      given.text += text;
      given.finish = finish ?? given.finish;
      given.tokens = tokens ?? given.tokens;
      if (text) draw();
    }
  } catch (problem) {
    if (problem.name === "AbortError") given.finish = "stopped";
    else given.problem = problem.message;
  }
  given.seconds = seconds();
  draw.done();
}

/** Draws an answer as it grows, in a few milliseconds of every frame at most. */
function drawer(view, given) {
  let waiting = null;
  const draw = () => {
    const began = performance.now();
    const atEnd = list.scrollHeight - list.scrollTop - list.clientHeight < 40;
    render(view.querySelector(".text"), given.text);
    if (atEnd) list.scrollTop = list.scrollHeight;
    return performance.now() - began;
  };
  const later = () => {
    waiting = setTimeout(() => (waiting = null), 16 + 4 * draw()); // a long text is drawn less often
  };
  const drawn = () => {
    if (waiting === null) later();
  };
  drawn.done = () => clearTimeout(waiting);
  return drawn;
}

function busy(controller) {
  running = controller;
  list.setAttribute("aria-busy", String(running !== null)); // a screen reader then reads the answer once, whole
  byId("stop").hidden = running === null;
  byId("send").disabled = running !== null;
}

// -- what is shown ----------------------------------------------------------------------------------------------------

function show() {
  const atEnd = list.scrollHeight - list.scrollTop - list.clientHeight < 40;
  list.replaceChildren(...conversation.turns.map(turnView));
  if (!conversation.turns.length) list.append(el("p", { class: "note" }, "Nothing said yet."));
  if (atEnd) list.scrollTop = list.scrollHeight;
}

function turnView(turn, index) {
  return el("div", { class: "turn" }, questionView(turn, index), el("div", { class: "answers" }, ...turn.answers.map((given) => answerView(given, index))));
}

function questionView({ user }, index) {
  const text = el("p", { class: "text plain" }, user);
  const edit = el("button", { type: "button", disabled: running !== null, onclick: () => editView(view, user, index) }, "Edit");
  const view = el("article", { class: "question", "aria-label": "You" }, el("h3", {}, "You"), text, el("div", { class: "actions" }, edit));
  return view;
}

function editView(view, user, index) {
  const field = el("textarea", { rows: 3, "aria-label": "Edit the message" });
  field.value = user;
  const send = () => {
    if (field.value.trim() !== "" && ask(index, field.value)) prompt.focus();
  };
  const cancel = () => {
    show();
    list.querySelectorAll(".question button")[index]?.focus();
  };
  field.addEventListener("keydown", (event) => {
    if (event.key === "Escape") cancel();
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send();
  });
  const buttons = [el("button", { type: "button", onclick: send }, "Send again"), el("button", { type: "button", onclick: cancel }, "Cancel")];
  view.replaceChildren(el("h3", {}, "You"), field, el("div", { class: "actions" }, ...buttons));
  field.focus();
}

function answerView(given, index) {
  const text = el("div", { class: "text" });
  render(text, given.text);
  const view = el("article", { class: "answer", "aria-label": `Answer of ${given.model}` }, el("h3", {}, given.model), text);
  if (given.problem) view.append(el("p", { class: "problem", role: "alert" }, given.problem));
  view.append(el("p", { class: "note" }, summary(given)));
  if (given.seconds === null) return view;
  const again = () => {
    if (ask(index, conversation.turns[index].user)) prompt.focus();
  };
  const actions = [el("button", { type: "button", disabled: running !== null, onclick: again }, "Regenerate")];
  if (navigator.clipboard) actions.push(el("button", { type: "button", onclick: () => navigator.clipboard.writeText(given.text) }, "Copy"));
  view.append(el("div", { class: "actions" }, ...actions));
  return view;
}

const ENDS = { length: "cut at the most tokens", stopped: "stopped" };

function summary({ finish, tokens, seconds, firstSecond }) {
  if (seconds === null) return "answering";
  const speed = tokens > 1 && seconds > firstSecond ? `${figures((tokens - 1) / (seconds - firstSecond))} tokens/s` : null;
  const parts = [tokens === null ? null : `${tokens} tokens`, speed, firstSecond === null ? null : `first text after ${figures(firstSecond)} s`, ENDS[finish]];
  return parts.filter(Boolean).join(", ");
}
