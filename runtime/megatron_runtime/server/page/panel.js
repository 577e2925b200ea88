// The service beside the chat: its state, its replicas, and how many tokens it makes.

import { Meters, shown } from "./meter.js";

const POINTS = 60;
const find = (id) => document.getElementById(id);

export class Panel {
  #meters = new Meters();
  #rates = [];

  /** Shows a status as `GET /status` gives it. */
  show(status) {
    const rates = this.#meters.add(performance.now() / 1000, status.replicas);
    find("model").textContent = status.model;
    document.title = `${status.model} – Megatron inference`;
    state(status.state ?? "NO REPLICA");
    for (const node of document.querySelectorAll("[data-shows=rate]")) node.textContent = shown(rates.all);
    find("running").textContent = status.requests_running;
    find("waiting").textContent = status.requests_waiting;
    find("no-replicas").hidden = status.replicas.length > 0;
    const rows = status.replicas.map((replica, index) => row(replica, rates.each[index]));
    find("replicas").replaceChildren(...rows);
    this.#draw(rates.all);
  }

  /** The service can't be seen. */
  lose(word) {
    this.#meters = new Meters();
    state(word);
    for (const node of document.querySelectorAll("[data-shows=rate]")) node.textContent = "–";
    for (const id of ["running", "waiting"]) find(id).textContent = "–";
    find("replicas").replaceChildren();
    find("no-replicas").hidden = true;
  }

  #draw(rate) {
    this.#rates = [...this.#rates, rate].slice(-POINTS);
    const highest = Math.max(...this.#rates, 1);
    const left = POINTS - this.#rates.length;
    const points = this.#rates.map((each, index) => `${left + index},${(19 - (each / highest) * 18).toFixed(2)}`);
    find("curve").setAttribute("points", points.join(" "));
  }
}

function state(name) {
  const node = find("state");
  if (node.dataset.state === name) return; // or it would be read out every second
  node.dataset.state = name;
  node.textContent = name.toLowerCase();
}

function row(replica, rate) {
  const node = document.createElement("li");
  const busy = `${replica.requests_running} running, ${replica.requests_waiting} waiting`;
  const usage = Math.round(replica.kv_usage * 100);
  const doing = replica.draining ? "DRAINING" : replica.state;
  node.append(
    text("strong", `Replica ${replica.group}`),
    text("span", doing.toLowerCase(), "state", { state: doing }),
    text("span", busy, "left"),
    text("span", `${shown(rate)} tokens/s`, "right"),
    gauge(usage, `KV cache of replica ${replica.group}`),
    text("span", `KV cache ${usage} %`, "right"),
  );
  return node;
}

function gauge(percent, label) {
  const node = document.createElement("div");
  node.className = "gauge";
  const parts = { role: "meter", "aria-label": label, "aria-valuemin": 0, "aria-valuemax": 100, "aria-valuenow": percent };
  for (const [name, value] of Object.entries(parts)) node.setAttribute(name, value);
  const filled = document.createElement("div");
  filled.style.width = `${percent}%`;
  node.append(filled);
  return node;
}

function text(kind, words, style = "", data = {}) {
  const node = document.createElement(kind);
  node.textContent = words;
  node.className = style;
  Object.assign(node.dataset, data);
  return node;
}
