// What each tier holds, how often it had what was asked for, and what moves through it now.

import { Facts, Table, h, panel, text } from "./dom.js";
import { NONE, bytes, count, duration, milliseconds, name, perSecond, percent, rate } from "./format.js";
import { tierName } from "./names.js";
import { Spark } from "./spark.js";

const ORDER = ["device", "dram", "nvme", "peer", "bucket"];
const sum = (counts) => Object.values(counts).reduce((total, each) => total + each, 0);

/** A bar with its words: how much of a limit is used. */
function used(tier, before) {
  if (!tier.limit) return NONE;
  const part = Math.min(1, tier.used / tier.limit);
  const words = `${bytes(tier.used)} of ${bytes(tier.limit)}`;
  const node = before instanceof Element ? before : h("div", { class: "used" }, h("span", { class: "meter", "aria-hidden": "true" }, h("span")), h("span"));
  node.firstChild.firstChild.style.setProperty("inline-size", `${(100 * part).toFixed(1)}%`);
  text(node.lastChild, words);
  return node;
}

/** Blocks that made room, were not taken, or were not what they claim to be. */
function lost({ evictions, declined, dropped, corrupt, errors }, before) {
  const node = before instanceof Element ? before : h("span");
  node.className = corrupt || errors ? "bad" : "";
  text(node, spelled({ evicted: evictions, declined, dropped, corrupt, errors }));
  return node;
}

/** The upper end of the bucket of a histogram that holds a quantile. */
function quantile(latency, q) {
  const total = latency.counts.reduce((all, each) => all + each, 0);
  if (!total) return null;
  let seen = 0;
  const at = latency.counts.findIndex((each) => (seen += each) >= q * total);
  return latency.bounds_s[at] ?? Infinity;
}

function readTime(latency) {
  const total = latency.counts.reduce((all, each) => all + each, 0);
  if (!total) return NONE;
  const bound = quantile(latency, 0.99);
  const most = bound === Infinity ? `> ${milliseconds(1000 * latency.bounds_s.at(-1))}` : `≤ ${milliseconds(1000 * bound)}`;
  return `mean ${milliseconds((1000 * latency.total_s) / total)}, p99 ${most}`;
}

const spelled = (counts) => Object.entries(counts).filter(([, n]) => n).map(([what, n]) => `${name(what)} ${count(n)}`).join(", ") || "none";

/** `get ok`, `get absent`, ... by verb. */
function byVerb(requests) {
  const found = {};
  for (const [key, n] of Object.entries(requests)) found[key.split(" ")[0]] = (found[key.split(" ")[0]] ?? 0) + n;
  return found;
}

const unlike = (requests) => Object.fromEntries(Object.entries(requests).filter(([key]) => !key.endsWith(" ok")));

export class TiersView {
  constructor() {
    this.sparks = new Map();
    this.tiers = new Table("Tiers, nearest first", [
      { name: "Tier", header: true, cell: (tier) => tierName(tier.key) },
      { name: "Used", class: "wide", cell: used },
      { name: "Hit rate", num: true, class: "wide", cell: (tier) => percent(tier.hits, tier.hits + tier.misses) },
      { name: "Reads over time", class: "wide", cell: (tier) => this.#reads(tier) },
      { name: "Out", num: true, cell: (tier) => rate(tier.out) },
      { name: "In", num: true, cell: (tier) => rate(tier.in) },
      { name: "Read time", num: true, class: "wide", cell: (tier) => readTime(tier.reads) },
      { name: "Left out or lost", class: "wide", cell: lost },
    ], { empty: "No statistics yet." });
    [this.readers, this.writers, this.bucket, this.node] = [new Facts(), new Facts(), new Facts(), new Facts()];
    this.operators = [panel("Writers", {}, this.writers.element), panel("Bucket", {}, this.bucket.element), panel("Node", {}, this.node.element)];
    this.element = h("div", {},
      panel("Tiers", {}, this.tiers.element,
        h("p", { class: "note" }, "Counts are since the node started. Hit rate: of the blocks that a tier was asked for. Out and in: over the last six seconds. Lines: since this page was opened, at most five minutes.")),
      h("div", { class: "columns" },
        panel("Readers", {}, this.readers.element),
        this.operators));
  }

  #reads(tier) {
    if (!this.sparks.has(tier.key)) {
      const spark = new Spark(`Blocks read from ${tierName(tier.key)} a second, over time`);
      this.sparks.set(tier.key, { spark, words: h("span"), element: null });
    }
    const one = this.sparks.get(tier.key);
    one.element ??= h("div", { class: "reads" }, one.spark.element, one.words);
    one.spark.show(tier.points);
    text(one.words, perSecond(tier.rate));
    return one.element;
  }

  show({ samples }) {
    const stats = samples.latest;
    if (!stats) return this.tiers.show([]);
    const whole = stats.whole !== false; // else these are not told, not none
    for (const each of this.operators) each.hidden = !whole;
    const names = Object.keys(stats.tiers).sort((a, b) => ORDER.indexOf(a) - ORDER.indexOf(b));
    this.tiers.show(names.map((key) => {
      const of = (field) => (each) => each.tiers[key]?.[field] ?? 0;
      return { ...stats.tiers[key], key, points: samples.rates(of("hits")), rate: samples.now(of("hits")), out: samples.now(of("bytes_out")), in: samples.now(of("bytes_in")) };
    }));
    const reads = (kind) => ["complete", "partial", "miss"].map((how) => [how, Object.entries(stats.reads).filter(([key]) => key.includes(kind) && key.includes(how)).reduce((all, [, n]) => all + n, 0)]);
    const given = names.filter((key) => stats.tiers[key].tokens).map((key) => `${tierName(key)} ${count(stats.tiers[key].tokens)}`);
    this.readers.show([
      ["Gets", whole ? spelled(Object.fromEntries(reads("get"))) : null],
      ["Look-ups", whole ? spelled(Object.fromEntries(reads("lookup"))) : null],
      ["Tokens given", whole ? given.join(", ") || "none" : null],
      ["Tokens missed", whole ? spelled(stats.tokens_missed) : null],
      ["Leases held", count(stats.leases)],
      ["Waiting to be written", whole ? null : bytes(stats.queued_bytes)],
    ]);
    const { pending = 0, pending_bytes = 0, ...outcomes } = stats.commits;
    this.writers.show([
      ["Commits", spelled(outcomes)],
      ["Commits under way", `${count(pending)}, ${bytes(pending_bytes)}`],
      ["Waiting to be written", bytes(stats.queued_bytes)],
    ]);
    const store = stats.bucket;
    this.bucket.show(stats.store ? [
      ["Store", name(stats.store)],
      ["Requests", spelled(byVerb(stats.store_requests))],
      ["Other answers", spelled(unlike(stats.store_requests))],
      ["Breaker", store.breaker === "closed" ? "closed" : `${store.breaker}, ${count(store.refused)} refused`, store.breaker === "closed" ? "" : "bad"],
      ["Opened", store.opened ? count(store.opened) : null],
      ["Second reads", store.hedges_sent ? `${count(store.hedges_sent)}, ${count(store.hedges_won)} won` : null],
      ["Window", store.window_bytes ? bytes(store.window_bytes) : null],
      ["Codec", store.codec_why ? `${store.codec}: ${store.codec_why}` : store.codec],
      ["Link, codec", store.link_rate ? `${rate(store.link_rate)}, ${rate(store.codec_rate)}` : null],
      ["Corrupt reads", sum(store.corrupt_reads) ? spelled(store.corrupt_reads) : null, "bad"],
    ] : [["Store", "none is set: blocks stay on this host, and there are no sessions"]]);
    this.node.show([
      ["Up", duration(stats.uptime_s)],
      ["Restores running", count(stats.restores)],
      ["Restores ended", spelled(stats.restored)],
      ["Held for their use", bytes(stats.held_bytes)],
      ["Hints", spelled(stats.hints)],
      ["Restarted tasks", sum(stats.restarts) ? spelled(stats.restarts) : null, "bad"],
    ]);
  }
}
