// Requests to the server that this page came from. The API key, where it has one, stays in this tab's sessionStorage.

const KEY = "edge0.api-key";

/** The server said no, or could not be reached; the message is for the user. */
export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

let askForKey = async () => null;
let asking = null;

/** `ask(wrong)` shows the dialog and gives a key, or null where the user won't; `wrong`: one was given and refused. */
export function onKeyNeeded(ask) {
  askForKey = ask;
}

async function newKey(refused) {
  if (sessionStorage.getItem(KEY) !== refused) return; // another request has got one meanwhile
  asking ??= askForKey(refused !== null).finally(() => (asking = null));
  const key = await asking;
  if (key === null) throw new Refused(401, "The server asks for its API key; nothing works without it. Reload the page to give it.");
  sessionStorage.setItem(KEY, key);
}

/** GET, or POST where there is a body. Throws Refused; an AbortError where `signal` says so. */
export async function call(path, { body, signal } = {}) {
  for (;;) {
    const key = sessionStorage.getItem(KEY);
    const headers = key === null ? {} : { Authorization: `Bearer ${key}` };
    const options = { headers, signal, cache: "no-store", credentials: "omit" };
    if (body !== undefined) {
      headers["Content-Type"] = "application/json";
      Object.assign(options, { method: "POST", body: JSON.stringify(body) });
    }
    const response = await fetch(path, options).catch((problem) => {
      throw problem.name === "AbortError" ? problem : new Refused(0, "The server can't be reached; is it running?");
    });
    if (response.status === 401) {
      await newKey(key);
      continue;
    }
    if (!response.ok) {
      const content = await response.json().catch(() => null);
      throw new Refused(response.status, content?.error?.message ?? `The server answered with status ${response.status}.`);
    }
    return response;
  }
}

/** The data of a response's server-sent events. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const parts = (buffer + value).split(/\r?\n\r?\n/);
      buffer = parts.pop();
      for (const part of parts) {
        const lines = part.split(/\r?\n/).filter((line) => line.startsWith("data:"));
        if (lines.length) yield lines.map((line) => line.slice(5).replace(/^ /, "")).join("\n");
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // whoever stops reading has no use for how that went
  }
}

/** Pieces of a chat answer: {text, finish, tokens}. Throws Refused where it fails, also midway. */
export async function* answer(model, messages, fields, signal) {
  const body = { model, messages, ...fields, stream: true, stream_options: { include_usage: true } };
  const response = await call("v1/chat/completions", { body, signal });
  for await (const data of events(response)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Refused(500, chunk.error.message);
    const choice = chunk.choices?.[0];
    yield {
      text: choice?.delta?.content ?? "",
      finish: choice?.finish_reason ?? null,
      tokens: chunk.usage?.completion_tokens ?? null,
    };
  }
  throw new Refused(0, "The connection ended before the answer did.");
}
