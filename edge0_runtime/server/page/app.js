// The page: models, API key, the two views. See edge0_runtime/server/page/__init__.py for what lies where.

import { call, onKeyNeeded } from "./api.js";
import { startChat } from "./chat.js";
import { byId, el } from "./dom.js";
import { watchEngine } from "./engine.js";
import { restoreSettings, showDefaults } from "./settings.js";

onKeyNeeded((wrong) => {
  const dialog = byId("key-dialog");
  if (wrong) byId("key-note").textContent = "That is not the server's key. It stays in this tab and is forgotten with it.";
  byId("key").value = "";
  dialog.showModal();
  return new Promise((given) => {
    byId("key-form").onsubmit = (event) => {
      event.preventDefault();
      given(byId("key").value);
      dialog.close();
    };
    byId("key-cancel").onclick = () => dialog.close();
    dialog.onclose = () => given(null); // after a submitted key this comes too late to matter
  });
});

for (const view of ["chat", "engine"]) {
  byId(`show-${view}`).addEventListener("click", () => {
    document.body.classList.toggle("engine", view === "engine");
    for (const other of ["chat", "engine"]) byId(`show-${other}`).setAttribute("aria-pressed", String(other === view));
  });
}

function problem(text) {
  byId("problem").textContent = text;
  byId("problem").hidden = text === "";
}

async function showModels() {
  const { data } = await (await call("v1/models")).json();
  const options = () => data.map(({ id }) => el("option", { value: id }, id));
  byId("model").replaceChildren(...options());
  byId("other-model").replaceChildren(el("option", { value: "" }, "none"), ...options());
  byId("models").hidden = data.length < 2;
}

const chosen = () => [...new Set([byId("model").value, byId("other-model").value])].filter(Boolean);

restoreSettings();
startChat(chosen);
showModels().catch((failed) => problem(failed.message));
watchEngine(
  (text) => (byId("state").textContent = text),
  (data) => showDefaults(data.models[0].defaults),
);
byId("prompt").focus();
