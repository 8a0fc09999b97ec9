// One session: what it is, its versions and forks, and what can be done with it.

import { get, ofSession, post, remove } from "./api.js";
import { Facts, confirmed, h, text } from "./dom.js";
import { ago, bytes, count, duration, name } from "./format.js";
import { learn, namespace } from "./names.js";
import { Restoring } from "./restoring.js";
import { tree } from "./tree.js";
import { keyOf, linkOf } from "./sessions.js";

const RELATIVES = 24; // whose versions are asked for, of a family

export class SessionPanel {
  constructor(list) {
    this.list = list;
    this.session = null;
    this.restores = new Map(); // by session: they go on while something else is looked at
    this.heading = h("h2", { tabindex: "-1" });
    this.said = h("p", { class: "note", role: "status" });
    this.facts = new Facts();
    this.tier = h("select", { id: "tier" }, h("option", { value: "dram" }, "DRAM"), h("option", { value: "nvme", disabled: true }, "NVMe"));
    this.restore = h("button", { type: "button", class: "primary", onclick: () => this.#restore() }, "Restore");
    this.pin = h("button", { type: "button", onclick: () => this.#pin() }, "Pin");
    this.delete = h("button", { type: "button", class: "danger", onclick: () => this.#delete() }, "Delete …");
    this.progress = h("div");
    this.forks = h("div", { class: "tree" });
    this.body = h("div", {},
      h("div", { class: "acts" }, this.restore, h("label", { for: "tier" }, "into"), this.tier, h("span", { class: "gap" }), this.pin, this.delete),
      this.progress, this.facts.element, h("h3", {}, "Versions and forks"), this.forks,
      h("p", { class: "note" }, "Of its family, the forks that are in the list beside it. Each stands under the version that it began as."));
    this.element = h("section", { class: "panel detail", "aria-label": "Session", hidden: true },
      h("div", { class: "title" }, this.heading, h("a", { href: "#/sessions" }, "All sessions")), this.said, this.body);
  }

  /** What the node has decides what can be restored to. */
  allow(stats) {
    if (stats) this.tier.options[1].disabled = !stats.tiers.nvme;
  }

  async open(session) {
    const same = session && this.session && keyOf(session) === keyOf(this.session);
    this.element.hidden = !session;
    if (same) return;
    this.session = session;
    if (!session) return;
    text(this.heading, name(session.id));
    text(this.said, "");
    this.body.hidden = true;
    this.progress.replaceChildren(...[this.restores.get(keyOf(session))?.element].filter(Boolean));
    this.heading.focus({ preventScroll: true });
    await this.refresh();
  }

  async refresh() {
    const wanted = this.session;
    if (!wanted) return;
    try {
      const found = await get(ofSession(wanted));
      if (this.session !== wanted) return;
      await learn([found.namespace]);
      this.#shown(found);
      await this.list.loaded;
      await this.#family(found);
    } catch (problem) {
      if (this.session === wanted || (this.session && keyOf(this.session) === keyOf(wanted))) this.#failed(problem, { gone: problem.status === 404 || problem.status === 410 });
    }
  }

  #shown(session) {
    this.session = session;
    this.body.hidden = false;
    text(this.pin, session.pinned ? "Unpin" : "Pin");
    this.facts.show([
      ["Version", count(session.version)],
      ["Tokens", `${count(session.tokens)} in ${count(session.blocks)} blocks`],
      ["Stored", bytes(session.bytes)],
      ["Written", ago(session.updated)],
      ["Expires", session.pinned ? "never, it is pinned" : session.expires ? ago(session.expires) : "never"],
      ["Time to live", session.ttl_s ? `${duration(session.ttl_s)}${session.sliding ? ", renewed by use" : ""}` : "none"],
      ["Namespace", namespace(session.namespace)],
      ["Lane", name(session.lane)],
      ...Object.entries(session.labels).map(([key, value]) => [`Label ${name(key)}`, name(value)]),
    ]);
  }

  async #family(session) {
    const others = this.list.family(session.family).filter((each) => keyOf(each) !== keyOf(session));
    const family = [session, ...others.slice(0, RELATIVES)];
    const versions = await Promise.all(family.map(async (each) => {
      try {
        return (await get(ofSession(each, "versions"))).versions;
      } catch (problem) {
        if (each === session) throw problem;
        return []; // it went while we looked
      }
    }));
    if (!this.session || keyOf(this.session) !== keyOf(session)) return;
    const grown = tree(family.map((each, index) => ({ session: each, versions: versions[index] })));
    this.forks.replaceChildren(h("ul", {}, grown.map((node) => this.#branch(node))));
    if (others.length > RELATIVES) this.forks.append(h("p", { class: "note" }, `${count(others.length - RELATIVES)} more of its family are in the list.`));
  }

  #branch({ session, versions, strays }) {
    const own = keyOf(session) === keyOf(this.session);
    const title = own ? h("strong", {}, h("bdi", {}, name(session.id))) : h("a", { href: linkOf(session) }, h("bdi", {}, name(session.id)));
    return h("li", { class: own ? "own" : null }, title,
      h("ul", {},
        versions.map(({ version, forks }) => h("li", {},
          h("div", { class: "version" },
            h("span", { class: "said" },
              h("span", { class: "v" }, `v${version.version}`),
              h("span", {}, `${count(version.tokens)} tokens`),
              h("span", { class: "soft" }, ago(version.at)),
              version.current ? h("span", { class: "tag" }, "current") : null),
            own ? h("button", { type: "button", class: "quiet", "aria-label": `Restore version ${version.version}`, onclick: () => this.#restore(version.version) }, "Restore") : null),
          forks.length ? h("ul", {}, forks.map((fork) => this.#branch(fork))) : null)),
        strays.map((fork) => this.#branch(fork))));
  }

  async #restore(version = null) {
    const session = this.session;
    this.restores.get(keyOf(session))?.stop();
    const body = { tier: this.tier.value, priority: "interactive", ...(version === null ? {} : { version }) };
    try {
      const status = await post(ofSession(session, "restore"), body);
      const restoring = new Restoring(status);
      this.restores.set(keyOf(session), restoring);
      this.progress.replaceChildren(restoring.element);
      text(this.said, "");
      await restoring.follow();
    } catch (problem) {
      this.#failed(problem);
    }
  }

  async #pin() {
    const session = this.session;
    try {
      const after = await post(ofSession(session, session.pinned ? "unpin" : "pin"));
      this.list.changed(session, after);
      this.#shown(after);
      text(this.said, after.pinned ? "Pinned: it never expires and is never evicted from the bucket." : "Unpinned: its time to live begins anew.");
    } catch (problem) {
      this.#failed(problem);
    }
  }

  async #delete() {
    const session = this.session;
    const lines = [
      `Session ${name(session.id)} has ${count(session.tokens)} tokens in ${count(session.blocks)} blocks, ${bytes(session.bytes)}. Deleting it cannot be undone.`,
      "Its forks stay. Blocks that nothing else names go with the next collections.",
    ];
    if (!(await confirmed("Delete this session?", lines, "Delete session"))) return this.delete.focus();
    try {
      await remove(ofSession(session));
      this.list.changed(session, null);
      this.restores.get(keyOf(session))?.stop();
      this.session = null;
      location.hash = "#/sessions";
      text(this.list.said, `Session ${name(session.id)} was deleted.`);
      this.list.input.focus();
    } catch (problem) {
      this.#failed(problem);
    }
  }

  #failed(problem, { gone = false } = {}) {
    if (gone) this.body.hidden = true;
    const why = problem.status === 403 ? `This token may not do that: ${problem.message}` : problem.message;
    text(this.said, [why, problem.remedy].filter(Boolean).join(" – "));
  }
}
