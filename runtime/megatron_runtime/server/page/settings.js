// The parameters of requests, and the API key.

import { find } from "./elements.js";
import { storage } from "./storage.js";

const DEFAULT_TOKENS = 1024;
const RULES = {
  temperature: "Temperature must be a number from 0 to 2.",
  "max-tokens": "Maximum length must be a whole number of at least 1.",
};

/** The fields of the settings. An empty number has the value of its placeholder. */
export class Settings {
  #fields = ["system", "temperature", "max-tokens"].map(find);

  constructor() {
    for (const field of this.#fields) {
      field.value = storage.settings?.[field.name] ?? field.value;
      field.addEventListener("input", () => this.#changed());
    }
    find("settings").addEventListener("submit", (event) => event.preventDefault());
    this.problem();
  }

  /** What is wrong with the values, or null. */
  problem() {
    let first = null;
    for (const [id, rule] of Object.entries(RULES)) {
      const isValid = find(id).checkValidity();
      find(id).setAttribute("aria-invalid", String(!isValid));
      find(`${id}-error`).textContent = isValid ? "" : rule;
      find(`${id}-error`).hidden = isValid;
      first ??= isValid ? null : rule;
    }
    return first;
  }

  get values() {
    const system = find("system").value.trim();
    return { system, temperature: number("temperature"), maxTokens: number("max-tokens") ?? DEFAULT_TOKENS };
  }

  /** Sets the default of the maximum length, so that answers do not take minutes. */
  update({ max_model_len }) {
    find("max-tokens").placeholder = Math.min(DEFAULT_TOKENS, Math.floor(max_model_len / 2));
  }

  #changed() {
    storage.settings = Object.fromEntries(this.#fields.map((each) => [each.name, each.value]));
    this.problem();
  }
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
