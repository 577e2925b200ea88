// The panel beside the chat: state of the service, replica groups, and tokens per second.

import { element, find } from "./elements.js";
import { Meters, shown } from "./meter.js";

const POINTS = 60;
const STATES = { LOCKED: "API key required", UNREACHABLE: "not reachable" };

export class Panel {
  #meters = new Meters();
  #rates = [];
  #rows = new Map();

  /** Shows a response of `GET /status`. */
  show(status) {
    const rates = this.#meters.add(performance.now() / 1000, status.replica_groups);
    find("model").textContent = status.model;
    document.title = `${status.model} – Megatron inference`;
    state(status.state ?? "NO REPLICA GROUP");
    for (const node of document.querySelectorAll("[data-shows=rate]")) node.textContent = shown(rates.all);
    find("running").textContent = status.requests_running;
    find("waiting").textContent = status.requests_waiting;
    find("no-replica-groups").hidden = status.replica_groups.length > 0;
    this.#list(status.replica_groups, rates.each);
    this.#draw(rates.all);
  }

  /** Shows a state without a status. */
  disconnect(name) {
    this.#meters = new Meters();
    state(name);
    for (const node of document.querySelectorAll("[data-shows=rate]")) node.textContent = "–";
    for (const id of ["running", "waiting"]) find(id).textContent = "–";
    this.#list([], []);
    find("no-replica-groups").hidden = true;
  }

  #list(groups, rates) {
    const rows = new Map();
    groups.forEach((group, at) => {
      const row = this.#rows.get(group.index) ?? new Row(group);
      row.show(group, rates[at]);
      rows.set(group.index, row);
    });
    const nodes = [...rows.values()].map((row) => row.node);
    const list = find("replica-groups");
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
  if (node.dataset.state === name) return; // otherwise screen readers announce it every second
  node.dataset.state = name;
  node.textContent = STATES[name] ?? name.toLowerCase();
}

/** One replica group in the list. Its nodes are reused, so that screen readers keep their position. */
class Row {
  constructor(group) {
    this.node = element("li", {});
    this.state = element("span", { class: "state" });
    this.requests = element("span", { class: "left" });
    this.rate = element("span", { class: "right" });
    this.gauge = gauge(`KV cache of replica group ${group.index}`);
    this.usage = element("span", { class: "right" });
    const name = element("strong", {}, `Replica group ${group.index}`);
    this.node.append(name, this.state, this.requests, this.rate, this.gauge, this.usage);
  }

  show(group, rate) {
    const usage = Math.round(group.kv_usage * 100);
    const state = group.draining ? "DRAINING" : group.state;
    this.state.dataset.state = state;
    this.state.textContent = state.toLowerCase();
    this.requests.textContent = `${group.requests_running} running, ${group.requests_waiting} waiting`;
    this.rate.textContent = `${shown(rate)} tokens/s`;
    this.gauge.setAttribute("aria-valuenow", usage);
    this.gauge.firstElementChild.style.width = `${usage}%`;
    this.usage.textContent = `KV cache ${usage} %`;
  }
}

function gauge(label) {
  const parts = { class: "gauge", role: "meter", "aria-label": label, "aria-valuemin": 0, "aria-valuemax": 100 };
  return element("div", parts, element("div", {}));
}
