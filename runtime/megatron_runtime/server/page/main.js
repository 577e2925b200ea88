// Entry point: connects the parts of the page, and polls the status once a second while the page is visible or shows a
// growing answer.

import { readStatus } from "./api.js";
import { Chat } from "./chat.js";
import { find } from "./elements.js";
import { Panel } from "./panel.js";
import { KeyForm, Settings } from "./settings.js";

const POLL_MS = 1000;
const RETRY_MS = 3000;

const panel = new Panel();
const keyForm = new KeyForm(() => {
  showPanel(false);
  poll();
});
const settings = new Settings();
const chat = new Chat(settings, (error) => {
  if (error.status === 401) askForKey(error);
});
let timer = null;
let polling = Promise.resolve();

/** Polls now, or after the poll in flight, which may use another key. */
function poll() {
  clearTimeout(timer);
  if (document.visibilityState === "visible" || chat.isAnswering) polling = polling.then(pollNow);
}

async function pollNow() {
  clearTimeout(timer);
  let wait = POLL_MS;
  try {
    const status = await readStatus();
    panel.show(status);
    chat.update(status);
    settings.update(status);
  } catch (error) {
    wait = disconnect(error);
  }
  if (wait !== null) timer = setTimeout(poll, wait);
}

/** Shows that there is no status; returns the delay of the next poll, or null to wait for a key. */
function disconnect(error) {
  chat.update(null);
  if (error.status === 401) {
    panel.disconnect("LOCKED");
    askForKey(error);
    return null;
  }
  panel.disconnect("UNREACHABLE");
  return error.retryAfter ? error.retryAfter * 1000 : RETRY_MS;
}

function askForKey(error) {
  showPanel(true);
  keyForm.show(error.message);
}

function showPanel(shows) {
  document.body.classList.toggle("shows-panel", shows);
  find("show-panel").setAttribute("aria-expanded", String(shows));
}

find("show-panel").addEventListener("click", () => showPanel(!document.body.classList.contains("shows-panel")));
document.addEventListener("visibilitychange", poll);
poll();
