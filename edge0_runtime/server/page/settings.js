// The settings form: fields of a request, kept while the tab lives.

import { byId } from "./dom.js";

const KEPT = "edge0.settings";
const form = byId("settings-form");
const inputs = [...form.querySelectorAll("[name]")];

export function restoreSettings() {
  const kept = JSON.parse(sessionStorage.getItem(KEPT) ?? "{}");
  for (const input of inputs) input.value = kept[input.name] ?? "";
  form.addEventListener("input", () => {
    sessionStorage.setItem(KEPT, JSON.stringify(Object.fromEntries(inputs.map((input) => [input.name, input.value]))));
  });
  form.addEventListener("submit", (event) => event.preventDefault());
}

/** Show the model's own values where a field is empty. */
export function showDefaults(defaults) {
  for (const [name, value] of Object.entries(defaults)) form.elements[name].placeholder = value;
}

export const systemPrompt = () => byId("system").value.trim();

/** The fields that are filled in, as numbers; null after the first wrong one has been pointed out. */
export function samplingFields() {
  const wrong = inputs.find((input) => !input.checkValidity());
  if (wrong) {
    byId("settings").open = true;
    wrong.reportValidity();
    return null;
  }
  const numbers = inputs.filter((input) => input.type === "number" && input.value !== "");
  return Object.fromEntries(numbers.map((input) => [input.name, Number(input.value)]));
}
