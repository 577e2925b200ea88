// What the chat asks with, and the key that the server may want.

import { kept } from "./kept.js";

const find = (id) => document.getElementById(id);

const USUAL_TOKENS = 1024;

/** Returns a function that gives the settings; a number that is left out is the placeholder's, or the server's own. */
export function followSettings() {
  const fields = ["system", "temperature", "most"].map((name) => find(name));
  for (const field of fields) {
    field.value = kept.settings?.[field.name] ?? field.value;
    field.addEventListener("input", () => {
      kept.settings = Object.fromEntries(fields.map((each) => [each.name, each.value]));
    });
  }
  find("settings").addEventListener("submit", (event) => event.preventDefault());
  return () => ({ system: find("system").value.trim(), temperature: number("temperature"), most: number("most") });
}

/** Bounds answers whose length nobody chose, so that a model that rambles does not work for minutes. */
export function suitModel({ max_model_len }) {
  find("most").placeholder = Math.min(USUAL_TOKENS, Math.floor(max_model_len / 2));
}

function number(id) {
  const field = find(id);
  return field.value === "" ? Number(field.placeholder) || undefined : field.valueAsNumber;
}

/** The form for the API key. `onKey()` is called when there is another one. */
export class KeyForm {
  constructor(onKey) {
    find("key-form").addEventListener("submit", (event) => {
      event.preventDefault();
      kept.key = find("key").value.trim() || null;
      find("key").value = "";
      find("key-form").hidden = true;
      this.#show();
      onKey();
      find("question").focus();
    });
    find("forget-key").addEventListener("click", () => {
      kept.key = null;
      this.#show();
      onKey();
    });
    this.#show();
  }

  ask(why) {
    find("key-why").textContent = why;
    if (!find("key-form").hidden) return;
    find("key-form").hidden = false;
    find("key").focus();
  }

  #show() {
    find("forget-key").hidden = !kept.key;
  }
}
