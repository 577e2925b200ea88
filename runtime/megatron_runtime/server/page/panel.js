// The service beside the chat: its state, its replicas, and how many tokens it makes.

import { Meters, shown } from "./meter.js";

const POINTS = 60;
const find = (id) => document.getElementById(id);

export class Panel {
  #meters = new Meters();
  #rates = [];
  #rows = new Map();

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
    this.#list(status.replicas, rates.each);
    this.#draw(rates.all);
  }

  /** The service can't be seen. */
  lose(word) {
    this.#meters = new Meters();
    state(word);
    for (const node of document.querySelectorAll("[data-shows=rate]")) node.textContent = "–";
    for (const id of ["running", "waiting"]) find(id).textContent = "–";
    this.#list([], []);
    find("no-replicas").hidden = true;
  }

  #list(replicas, rates) {
    const rows = new Map();
    replicas.forEach((replica, index) => {
      const row = this.#rows.get(replica.group) ?? new Row(replica);
      row.show(replica, rates[index]);
      rows.set(replica.group, row);
    });
    const nodes = [...rows.values()].map((row) => row.node);
    const list = find("replicas");
    if (nodes.length !== list.children.length || nodes.some((node, at) => node !== list.children[at])) {
      list.replaceChildren(...nodes);
    }
    this.#rows = rows;
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

/** One replica in the list; it stays while the replica does, so that readers don't lose their place. */
class Row {
  constructor(replica) {
    this.node = document.createElement("li");
    this.state = text("span", "state");
    this.requests = text("span", "left");
    this.rate = text("span", "right");
    this.gauge = gauge(`KV cache of replica ${replica.group}`);
    this.usage = text("span", "right");
    const name = text("strong", "");
    name.textContent = `Replica ${replica.group}`;
    this.node.append(name, this.state, this.requests, this.rate, this.gauge, this.usage);
  }

  show(replica, rate) {
    const usage = Math.round(replica.kv_usage * 100);
    const state = replica.draining ? "DRAINING" : replica.state;
    this.state.dataset.state = state;
    this.state.textContent = state.toLowerCase();
    this.requests.textContent = `${replica.requests_running} running, ${replica.requests_waiting} waiting`;
    this.rate.textContent = `${shown(rate)} tokens/s`;
    this.gauge.setAttribute("aria-valuenow", usage);
    this.gauge.firstElementChild.style.width = `${usage}%`;
    this.usage.textContent = `KV cache ${usage} %`;
  }
}

function gauge(label) {
  const node = document.createElement("div");
  node.className = "gauge";
  const parts = { role: "meter", "aria-label": label, "aria-valuemin": 0, "aria-valuemax": 100 };
  for (const [name, value] of Object.entries(parts)) node.setAttribute(name, value);
  node.append(document.createElement("div"));
  return node;
}

function text(kind, style) {
  const node = document.createElement(kind);
  node.className = style;
  return node;
}
