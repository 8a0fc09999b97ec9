// The other nodes, and how asking them for blocks went.

import { Facts, Table, h, panel } from "./dom.js";
import { bytes, count, name, percent } from "./format.js";

const MEANS = {
  hits: "the block came",
  through: "the owner was asked to read it from the bucket for all",
  hedged: "the bucket was asked instead of waiting",
  wrong: "the directory was wrong about who has it",
  corrupt: "what came was not what it claims to be",
};

export class MeshView {
  constructor() {
    this.members = new Table("Other nodes", [{ name: "Node", header: true, cell: (each) => name(each.node) }], { key: (each) => each.node, empty: "No other node is known." });
    this.fetches = new Table("Blocks asked of others", [
      { name: "How it ended", header: true, cell: (each) => name(each.how) },
      { name: "Blocks", num: true, cell: (each) => count(each.count) },
      { name: "Meaning", class: "wide", cell: (each) => MEANS[each.how] ?? "a kind of miss: the bucket was asked next" },
    ], { key: (each) => each.how, empty: "Nothing was asked of others yet." });
    this.facts = new Facts();
    this.alone = panel("Mesh", {}, h("p", { class: "empty" }, "This node is in no mesh: it shares blocks with nobody. [peers] in its settings changes that."));
    this.inside = h("div", { hidden: true },
      panel("This node's part", {}, this.facts.element),
      h("div", { class: "columns" }, panel("Members", {}, this.members.element), panel("Blocks asked of others", {}, this.fetches.element)));
    this.element = h("div", {}, this.alone, this.inside,
      panel("Routing", {}, h("p", { class: "note" }, "A node does not route. Where a request goes, and why, is the gateway's to say: its own console, at / of its address, shows its last decisions with their reasons.")));
  }

  show({ samples }) {
    const stats = samples.latest;
    if (!stats) return;
    this.alone.hidden = Boolean(stats.mesh);
    this.inside.hidden = !stats.mesh;
    if (!stats.mesh) return;
    const peer = stats.tiers.peer;
    this.facts.show([
      ["This node", name(stats.node)],
      ["Directory", stats.mesh.directory ? name(stats.mesh.directory) : "in order", stats.mesh.directory ? "bad" : ""],
      ["Found at peers", peer ? `${percent(peer.hits, peer.hits + peer.misses)} of the blocks asked` : null],
      ["Came from peers", peer ? bytes(peer.bytes_out) : null],
    ]);
    this.members.show(stats.mesh.members.map((node) => ({ node })));
    this.fetches.show(Object.entries(stats.mesh.fetches).map(([how, n]) => ({ how, count: n })));
  }
}
