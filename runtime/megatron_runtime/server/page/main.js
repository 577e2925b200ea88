// Puts the parts of the page together, and looks at the service once a second while someone looks at the page.

import { readStatus } from "./api.js";
import { Chat } from "./chat.js";
import { Panel } from "./panel.js";
import { followSettings, KeyForm, suitModel } from "./settings.js";

const POLL_MS = 1000;
const RETRY_MS = 3000;
const find = (id) => document.getElementById(id);

const panel = new Panel();
const keyForm = new KeyForm(() => {
  showPanel(false);
  look();
});
const chat = new Chat(followSettings(), (problem) => {
  if (problem.status === 401) askForKey(problem);
});
let timer = null;
let looking = Promise.resolve();

/** Looks now, or right after the look that is under way, which may have begun with another key. */
function look() {
  clearTimeout(timer);
  if (document.visibilityState === "visible") looking = looking.then(lookNow);
}

async function lookNow() {
  clearTimeout(timer);
  let wait = POLL_MS;
  try {
    const status = await readStatus();
    panel.show(status);
    chat.follow(status);
    suitModel(status);
  } catch (problem) {
    wait = lose(problem);
  }
  if (wait !== null) timer = setTimeout(look, wait);
}

/** Shows that the service can't be seen; returns how long to wait, or null to wait for a key. */
function lose(problem) {
  chat.follow(null);
  if (problem.status === 401) {
    panel.lose("LOCKED");
    askForKey(problem);
    return null;
  }
  panel.lose("UNREACHABLE");
  return problem.retryAfter ? problem.retryAfter * 1000 : RETRY_MS;
}

function askForKey(problem) {
  showPanel(true);
  keyForm.ask(problem.message);
}

function showPanel(shows) {
  document.body.classList.toggle("shows-panel", shows);
  find("show-panel").setAttribute("aria-expanded", String(shows));
}

find("show-panel").addEventListener("click", () => showPanel(!document.body.classList.contains("shows-panel")));
document.addEventListener("visibilitychange", look);
look();
