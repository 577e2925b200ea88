// The parameters of requests, and the API key.

import { storage } from "./storage.js";

const find = (id) => document.getElementById(id);

const DEFAULT_TOKENS = 1024;

/** Returns a function that reads the settings; an empty number is the placeholder, or else the server's default. */
export function readSettings() {
  const fields = ["system", "temperature", "max-tokens"].map((name) => find(name));
  for (const field of fields) {
    field.value = storage.settings?.[field.name] ?? field.value;
    field.addEventListener("input", () => {
      storage.settings = Object.fromEntries(fields.map((each) => [each.name, each.value]));
    });
  }
  find("settings").addEventListener("submit", (event) => event.preventDefault());
  return () => ({ system: find("system").value.trim(), temperature: number("temperature"), maxTokens: number("max-tokens") });
}

/** Sets the default maximum length of answers, so that they do not take minutes. */
export function limitTokens({ max_model_len }) {
  find("max-tokens").placeholder = Math.min(DEFAULT_TOKENS, Math.floor(max_model_len / 2));
}

function number(id) {
  const field = find(id);
  return field.value === "" ? Number(field.placeholder) || undefined : field.valueAsNumber;
}

/** The form for the API key. `onKey()` is called when the key changes. */
export class KeyForm {
  constructor(onKey) {
    find("key-form").addEventListener("submit", (event) => {
      event.preventDefault();
      storage.key = find("key").value.trim() || null;
      find("key").value = "";
      find("key-form").hidden = true;
      this.#render();
      onKey();
      find("question").focus();
    });
    find("forget-key").addEventListener("click", () => {
      storage.key = null;
      this.#render();
      onKey();
    });
    this.#render();
  }

  show(reason) {
    find("key-reason").textContent = reason;
    if (!find("key-form").hidden) return;
    find("key-form").hidden = false;
    find("key").focus();
  }

  #render() {
    find("forget-key").hidden = !storage.key;
  }
}
