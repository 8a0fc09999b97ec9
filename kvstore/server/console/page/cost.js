// What each tenant and namespace cost and saved on this node, by the prices that it was told.

import { Facts, Table, h, panel } from "./dom.js";
import { NONE, bytes, count, duration, name, short } from "./format.js";
import { tierName } from "./names.js";

const total = (counts) => Object.values(counts).reduce((all, each) => all + each, 0);
const spelled = (tokens) => Object.entries(tokens).map(([tier, n]) => `${tierName(tier)} ${count(n)}`).join(", ") || NONE;
const seconds = (value) => (value < 0 ? `−${duration(-value)}` : duration(value));

/** Small sums keep the digits that say something. */
function money(value) {
  const size = Math.abs(value);
  if (size && size < 0.0001) return "< 0.0001";
  return `${value < 0 ? "−" : ""}${size.toFixed(size >= 1 || !size ? 2 : 4)}`;
}

const PRICED = {
  put_1000: "1,000 PUT or COPY",
  get_1000: "1,000 GET or HEAD",
  list_1000: "1,000 LIST",
  gb_month: "GB stored, a month",
  gb_egress: "GB read",
  gpu_hour: "GPU, an hour",
};

function whose(cost) {
  const namespace = cost.model || (cost.namespace.length > 16 ? short(cost.namespace) : cost.namespace) || (cost.tenant ? "no namespace" : "the node's own work");
  return name(cost.tenant ? `${cost.tenant} / ${namespace}` : namespace);
}

export class CostView {
  constructor() {
    this.told = {}; // prices; 0 is unknown, and so is a sum by it
    const sum = (field, ...prices) => (each) => (prices.some((price) => this.told[price]) ? money(each[field]) : NONE);
    this.money = new Table("Estimated cost and saving", [
      { name: "Tenant and model", header: true, class: "wide", cell: whose },
      { name: "Requests", num: true, cell: sum("requests_cost", "put_1000", "get_1000", "list_1000") },
      { name: "Egress", num: true, cell: sum("egress_cost", "gb_egress") },
      { name: "Storage / month", num: true, cell: (each) => (each.stored < 0 ? NONE : sum("month_cost", "gb_month")(each)) },
      { name: "Time avoided", num: true, cell: (each) => (each.recompute_s ? seconds(each.avoided_s) : NONE) },
      { name: "Saved", num: true, class: "wide", cell: (each) => (each.recompute_s ? sum("saved", "gpu_hour")(each) : NONE) },
    ], { key: (each) => JSON.stringify([each.tenant, each.namespace]), empty: "Nothing was counted yet." });
    this.counts = new Table("What was counted", [
      { name: "Tenant and model", header: true, class: "wide", cell: whose },
      { name: "Store requests", num: true, cell: (each) => count(total(each.requests)) },
      { name: "Sent", num: true, cell: (each) => bytes(each.sent) },
      { name: "Fetched", num: true, cell: (each) => bytes(each.fetched) },
      { name: "Stored", num: true, cell: (each) => (each.stored < 0 ? "unknown" : bytes(each.stored)) },
      { name: "Waited for loads", num: true, class: "wide", cell: (each) => `${each.load_s.toFixed(1)} s` },
      { name: "Tokens given", class: "wide", cell: (each) => spelled(each.tokens) },
    ], { key: (each) => JSON.stringify([each.tenant, each.namespace]), empty: "Nothing was counted yet." });
    this.prices = new Facts();
    this.empty = h("p", { class: "empty" }, "This node reports no cost.");
    this.unit = h("p", { class: "note" });
    this.element = h("div", {}, panel("Estimated, since this node started", {}, this.empty, this.money.element, this.unit),
      panel("Counted, since this node started", {}, this.counts.element),
      panel("Prices", {}, this.prices.element));
  }

  show({ samples }) {
    const stats = samples.latest;
    if (!stats) return;
    const known = Array.isArray(stats.cost);
    this.empty.hidden = known;
    this.money.element.hidden = !known;
    if (!known) return;
    const prices = stats.prices ?? {};
    this.told = prices;
    const sparing = stats.cost.some((each) => each.recompute_s);
    this.unit.textContent = `${prices.currency ? `In ${name(prices.currency)}, by [prices] of this node's settings. ` : ""}${sparing ? "Time avoided: of computing, at the rate that the settings state, less the time that loading took." : "Without a rate of computing (prices.prefill), what was avoided is not estimated."}`;
    this.money.show(stats.cost);
    this.counts.show(stats.cost);
    this.prices.show([
      ["Source", name(prices.source ?? "")],
      ...Object.entries(PRICED).map(([field, what]) => [what, prices[field] ? `${prices[field]} ${name(prices.currency)}` : "not known"]),
    ]);
  }
}
