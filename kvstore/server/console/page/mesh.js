// The other nodes, and how asking them for blocks went.

import { Facts, Table, h, panel, text } from "./dom.js";
import { bytes, count, name, percent } from "./format.js";

const MEANS = {
  hits: "the block came",
  absent: "whoever was asked has it not: the bucket was asked next",
  through: "the owner was asked to read it from the bucket for all",
  hedged: "the bucket was asked instead of waiting",
  wrong: "the directory was wrong about who has it",
  corrupt: "what came was not what it claims to be",
};

/** Blocks that a node neither gave nor said it has not. */
function troubled({ others }, before) {
  const node = before instanceof Element ? before : h("span");
  const said = Object.entries(others).filter(([, n]) => n).map(([how, n]) => `${name(how)} ${count(n)}`).join(", ");
  node.className = said ? "bad" : "";
  text(node, said || "none");
  return node;
}

export class MeshView {
  constructor() {
    this.members = new Table("Other nodes", [
      { name: "Node", header: true, cell: (each) => name(each.node) },
      { name: "Gave", num: true, cell: (each) => count(each.hits) },
      { name: "Had not", num: true, cell: (each) => count(each.absent) },
      { name: "No use", class: "wide", cell: troubled },
    ], { key: (each) => each.node, empty: "No other node is known." });
    this.fetches = new Table("Blocks asked of others", [
      { name: "How it ended", header: true, cell: (each) => name(each.how) },
      { name: "Blocks", num: true, class: "wide", cell: (each) => count(each.count) },
      { name: "Meaning", class: "wide", cell: (each) => MEANS[each.how] ?? "a kind of miss: the bucket was asked next" },
    ], { key: (each) => each.how, empty: "Nothing was asked of others yet." });
    this.facts = new Facts();
    this.alone = panel("Mesh", {}, h("p", { class: "empty" }, "This node is in no mesh: it shares blocks with nobody. [peers] in its settings changes that."));
    this.others = panel("Mesh", { hidden: true }, h("p", { class: "empty" }, "This node is in a mesh. Which nodes are, and what they gave, is told to tokens with scope admin."));
    this.inside = h("div", { hidden: true },
      panel("This node's part", {}, this.facts.element),
      h("div", { class: "columns" }, panel("Members", {}, this.members.element,
        h("p", { class: "note" }, "Blocks that each was asked for, since this node started. No use: no answer in time, none at all, or not what it claims to be.")), panel("Blocks asked of others", {}, this.fetches.element)));
    this.element = h("div", {}, this.alone, this.others, this.inside,
      panel("Routing", {}, h("p", { class: "note" }, "A node does not route. Where a request goes, and why, is the gateway's to say: its own console, at / of its address, shows its last decisions with their reasons.")));
  }

  show({ samples }) {
    const stats = samples.latest;
    if (!stats) return;
    const told = stats.whole !== false;
    this.alone.hidden = Boolean(stats.mesh);
    this.others.hidden = told || !stats.mesh;
    this.inside.hidden = !told || !stats.mesh;
    if (!told || !stats.mesh) return;
    const peer = stats.tiers.peer;
    this.facts.show([
      ["This node", name(stats.node)],
      ["Directory", stats.mesh.directory ? name(stats.mesh.directory) : "in order", stats.mesh.directory ? "bad" : ""],
      ["Found at peers", peer ? `${percent(peer.hits, peer.hits + peer.misses)} of the blocks asked` : null],
      ["Came from peers", peer ? bytes(peer.bytes_out) : null],
    ]);
    this.members.show(stats.mesh.members.map((node) => {
      const { hits = 0, absent = 0, ...others } = stats.mesh.by_member[node] ?? {};
      return { node, hits, absent, others };
    }));
    this.fetches.show(Object.entries(stats.mesh.fetches).map(([how, n]) => ({ how, count: n })));
  }
}
