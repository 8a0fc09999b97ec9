// Where the gateway sent requests lately, and what it predicted for each engine.

import { Table, h, panel } from "./dom.js";
import { count, duration, milliseconds, name } from "./format.js";
import { tierName } from "./names.js";

const SOURCES = ["gpu", "dram", "nvme", "peer", "bucket", "computed"];

/** Tokens of a prompt, by where their KV was to come from. */
function spelled(tokens) {
  const found = SOURCES.filter((source) => tokens[source]).map((source) => `${count(tokens[source])} ${source === "computed" ? "computed" : `from ${tierName(source)}`}`);
  return found.join(", ") || "none";
}

const chosen = (decision) => decision.candidates.find((each) => each.candidate === decision.engine);

function measured(decision) {
  if (decision.first_byte_ms !== null) return `took ${milliseconds(decision.first_byte_ms)}`;
  return decision.under_way ? "under way" : "not measured";
}

export class RoutingView {
  constructor() {
    this.engines = new Table("Engines", [
      { name: "Engine", header: true, cell: (each) => name(each.engine) },
      { name: "State", cell: (each) => h("span", { class: each.up ? null : "bad" }, each.up ? (each.draining ? "draining" : "up") : "down") },
      { name: "Running", num: true, cell: (each) => count(each.running) },
      { name: "Sent", num: true, cell: (each) => count(each.sent) },
      { name: "Failed", num: true, cell: (each) => count(each.failed) },
      { name: "Address", class: "code wide", cell: (each) => name(each.url) },
    ], { key: (each) => each.engine, empty: "No answer yet." });
    this.decisions = h("ol", { class: "decisions" });
    this.none = h("p", { class: "empty" }, "No request was sent to an engine yet.");
    this.element = h("div", {},
      panel("Engines", {}, this.engines.element),
      panel("Last decisions, newest first", {}, this.none, this.decisions,
        h("p", { class: "note" }, "Predicted time to first token: queue, load and compute, and what the choice costs others; took: from asking to the first byte of a stream. Open one for all engines that were compared.")));
    this.known = new Map();
  }

  show({ engines, decisions }) {
    this.engines.show(engines);
    this.none.hidden = decisions.length > 0;
    const key = (each) => String(each.number);
    const seen = new Map(decisions.map((each) => [key(each), each]));
    for (const [number, one] of this.known) {
      if (!seen.has(number)) {
        one.element.remove();
        this.known.delete(number);
      }
    }
    for (const each of [...decisions].reverse()) { // oldest first, so that each new one goes to the top
      if (!this.known.has(key(each))) {
        const one = new Decision();
        this.known.set(key(each), one);
        this.decisions.prepend(one.element);
      }
      this.known.get(key(each)).show(each);
    }
  }
}

class Decision {
  constructor() {
    this.cells = ["when", "to", "tokens", "predicted", "measured"].map((what) => h("span", { class: what }));
    this.table = new Table("Engines compared", [
      { name: "Engine", header: true, cell: (each) => name(each.candidate) },
      { name: "Price", num: true, cell: (each) => milliseconds(each.price) },
      { name: "First token", num: true, cell: (each) => milliseconds(each.ms) },
      { name: "Queue", num: true, cell: (each) => milliseconds(each.queue_ms) },
      { name: "Load", num: true, cell: (each) => milliseconds(each.load_ms) },
      { name: "Compute", num: true, cell: (each) => milliseconds(each.compute_ms) },
      { name: "Cost to others", num: true, cell: (each) => milliseconds(each.imbalance_ms) },
      { name: "Tokens from", class: "wide", cell: (each) => spelled(each.tokens) },
    ], { key: (each) => each.candidate, empty: "Nothing was known of this prompt: it went to the least loaded engine." });
    this.element = h("li", {}, h("details", {}, h("summary", {}, this.cells), this.table.element));
  }

  show(decision) {
    const priced = chosen(decision);
    const words = [
      decision.age_s < 1 ? "now" : `${duration(decision.age_s)} ago`,
      name(decision.engine),
      priced ? `tokens: ${spelled(priced.tokens)}` : "prompt not known",
      priced ? `predicted ${milliseconds(priced.ms)}` : "by load alone",
      measured(decision),
    ];
    words.forEach((word, index) => {
      if (this.cells[index].textContent !== word) this.cells[index].textContent = word;
    });
    this.table.show(decision.candidates);
  }
}
