// One session: what it is, and what can be done with it.

import { get, ofSession, post, remove } from "./api.js";
import { Facts, confirmed, h, text } from "./dom.js";
import { Family } from "./family.js";
import { bytes, count, duration, name } from "./format.js";
import { keyOf, learn, namespace } from "./names.js";
import { Restoring } from "./restoring.js";
import { when } from "./when.js";

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
    this.family = new Family(list, (version) => this.#restore(version));
    this.body = h("div", {},
      h("div", { class: "acts" }, this.restore, h("label", { for: "tier" }, "into"), this.tier, h("span", { class: "gap" }), this.pin, this.delete),
      this.progress, this.facts.element, this.family.element);
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
    this.family.clear();
    if (!session) return;
    text(this.heading, name(session.id));
    text(this.said, "Reading …");
    this.body.hidden = true;
    this.progress.replaceChildren(...[this.restores.get(keyOf(session))?.element].filter(Boolean));
    this.heading.focus({ preventScroll: true });
    await this.refresh();
  }

  /** What is shown of it is hidden until it is read again, by another token. */
  forget() {
    this.session &&= { ...this.session }; // what is under way was asked for before
    this.body.hidden = true;
    text(this.said, "");
  }

  async refresh() {
    const wanted = this.session;
    if (!wanted) return;
    try {
      const found = await get(ofSession(wanted));
      if (this.session !== wanted) return;
      await learn([found.namespace]);
      this.#shown(found);
      text(this.said, "");
      await this.list.loaded;
      if (this.session && keyOf(this.session) === keyOf(wanted)) await this.family.show(found);
    } catch (problem) {
      if (this.session === wanted || (this.session && keyOf(this.session) === keyOf(wanted))) this.#failed(problem, { gone: problem.status === 404 || problem.status === 410, before: this.body.hidden ? "" : "Not read: " });
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
      ["Written", when(session.updated)],
      ["Expires", session.pinned ? "never, it is pinned" : session.expires ? when(session.expires, "end") : "never"],
      ["Time to live", session.ttl_s ? `${duration(session.ttl_s)}${session.sliding ? ", renewed by use" : ""}` : "none"],
      ["Namespace", namespace(session.namespace)],
      ["Lane", name(session.lane)],
      ...Object.entries(session.labels).map(([key, value]) => [`Label ${name(key)}`, name(value)]),
    ]);
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

  #failed(problem, { gone = false, before = "" } = {}) {
    if (gone) this.body.hidden = true;
    this.list.missed(problem);
    const why = problem.status === 403 ? `This token may not do that: ${problem.message}` : problem.message;
    text(this.said, before + [why, problem.remedy].filter(Boolean).join(" – "));
  }
}
