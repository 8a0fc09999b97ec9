// What collections did, what the next one would do and why.

import { post } from "./api.js";
import { Facts, Table, h, panel, text } from "./dom.js";
import { bytes, count, duration, milliseconds, name } from "./format.js";
import { learn, namespace } from "./names.js";
import { when } from "./when.js";

const MEANS = {
  expired: "their time to live is over, or only such sessions name them",
  capacity: "the bucket is over its limit, and these are the least useful bytes",
  superseded: "versions that are no longer kept, or older generations of a block",
  orphan: "manifests of families that are gone",
  unnamed: "blocks that no session names",
  dead: "heads of families that died long ago",
};

export class CollectorView {
  constructor() {
    this.last = new Facts();
    this.usage = new Table("Live blocks by namespace", [
      { name: "Namespace", header: true, class: "wide", cell: (each) => namespace(each.namespace) },
      { name: "Blocks", num: true, cell: (each) => count(each.blocks) },
      { name: "Stored", num: true, cell: (each) => bytes(each.bytes) },
    ], { key: (each) => each.namespace, empty: "Not known until a collection has run." });
    this.button = h("button", { type: "button", class: "primary", onclick: () => this.#try() }, "Dry run");
    this.said = h("p", { class: "note", role: "status" }, "A dry run reads the bucket as a collection would, and changes nothing.");
    this.would = new Facts();
    this.reasons = new Table("What would go, by reason", [
      { name: "Reason", header: true, cell: (each) => each.reason },
      { name: "Things", num: true, class: "wide", cell: (each) => count(each.count) },
      { name: "Because", class: "wide", cell: (each) => MEANS[each.reason] ?? "" },
    ], { key: (each) => each.reason, empty: "Nothing would go." });
    this.examples = new Table("The first things that would go", [
      { name: "Kind", header: true, cell: (each) => each.kind },
      { name: "Key", class: "code wide", cell: (each) => name(each.key) },
      { name: "Reason", cell: (each) => each.reason },
      { name: "Size", num: true, cell: (each) => bytes(each.size) },
    ], { key: (each) => `${each.kind} ${each.key} ${each.gen} ${each.branch}`, empty: "Nothing would go." });
    this.found = h("div", { class: "found", hidden: true },
      h("div", { class: "columns" }, this.would.element, h("div", {}, h("h3", {}, "By reason"), this.reasons.element)),
      h("h3", {}, "Examples"), this.examples.element);
    this.element = h("div", {},
      h("div", { class: "columns" },
        panel("Collections by this node", {}, this.last.element),
        panel("Live blocks by namespace", {}, this.usage.element,
          h("p", { class: "note" }, "As the last collection counted them, whichever node ran it."))),
      panel("What the next one would do", { actions: this.button }, this.said, this.found));
  }

  show({ samples }) {
    const stats = samples.latest?.collector, whole = samples.latest?.whole !== false;
    if (!stats) return;
    const runs = Object.entries(stats.runs).map(([how, n]) => `${name(how)} ${count(n)}`).join(", ");
    this.last.show([
      ["Last success", stats.last_success ? when(stats.last_success) : "none since the node started"],
      ["Now", !whole ? null : stats.running ? `running: ${count(stats.heads)} heads and ${count(stats.listed)} objects seen` : "resting"],
      ["Runs, dry ones too", whole ? runs || "none" : null],
      ["Overdue", stats.late_s > 60 ? duration(stats.late_s) : null, "warn"],
      ["Deleted", whole ? `${count(stats.deleted)} objects, ${bytes(stats.freed)}` : null],
      ["Error", name(stats.error), "bad"],
    ]);
    learn(stats.usage.map((each) => each.namespace));
    this.usage.show(stats.usage);
  }

  async #try() {
    this.button.disabled = true;
    text(this.said, "Reading the bucket …");
    const begun = performance.now();
    try {
      this.#found(await post("/v1/collect", { dry_run: true }, { patience: 0 }));
      text(this.said, `Nothing was changed. It took ${milliseconds(performance.now() - begun)}.`);
    } catch (problem) {
      this.found.hidden = true;
      text(this.said, `${problem.status === 403 ? "This token may not collect: " : ""}${problem.message}${problem.remedy ? `: ${problem.remedy}` : ""}`);
    } finally {
      this.button.disabled = false;
      this.button.focus();
    }
  }

  #found(done) {
    this.found.hidden = false;
    this.would.show([
      ["Epoch", count(done.epoch)],
      ["Families", count(done.heads)],
      ["Sessions to expire", count(done.expired)],
      ["Sessions to evict", count(done.evicted)],
      ["Manifests", `${count(done.manifests_deleted)} would go, ${count(done.manifests_kept)} stay`],
      ["Blocks", `${count(done.blocks_deleted)} would go, ${count(done.blocks_kept)} stay`],
      ["Bytes", `${bytes(done.bytes_deleted)} would go, ${bytes(done.live_bytes)} live`],
      ...done.warnings.map((warning, index) => [`Warning ${index + 1}`, name(warning), "warn"]),
    ]);
    this.reasons.show(Object.entries(done.reasons).map(([reason, n]) => ({ reason, count: n })));
    this.examples.show(done.examples);
  }
}
