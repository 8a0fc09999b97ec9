// Sessions by the beginning of their ids, in pages; beside them, the one that was chosen. They are read when somebody asks, and once
// more where nobody could be reached, or the token was refused, and that is over.

import { get } from "./api.js";
import { Table, h, panel, text } from "./dom.js";
import { bytes, count, name, sessions, short } from "./format.js";
import { keyOf, linkOf } from "./names.js";
import { SessionPanel } from "./session.js";
import { when } from "./when.js";

const PAGE = 50, TYPING_MS = 300;

export class SessionsView {
  constructor(state) {
    this.state = state;
    this.sessions = [];
    this.prefix = this.cursor = "";
    this.read = null; // when, and with what prefix, the list was
    this.lost = null; // since when something that was asked for has no answer
    this.asked = 0;
    this.chosen = "";
    this.input = h("input", { id: "prefix", type: "search", autocomplete: "off", spellcheck: "false", oninput: () => this.#typed() });
    this.table = new Table("Sessions", [
      { name: "Session", header: true, class: "id wide", cell: (each, before) => this.#link(each, before) },
      { name: "Version", num: true, cell: (each) => count(each.version) },
      { name: "Tokens", num: true, cell: (each) => count(each.tokens) },
      { name: "Stored", num: true, cell: (each) => bytes(each.bytes) },
      { name: "Written", num: true, cell: (each) => when(each.updated) },
      { name: "Expires", num: true, class: "wide", cell: (each) => (each.pinned ? "pinned" : each.expires ? when(each.expires, "end") : "never") },
    ], { key: keyOf });
    this.more = h("button", { type: "button", hidden: true, onclick: () => this.#load() }, "More");
    this.said = h("p", { class: "note", role: "status" });
    this.panel = new SessionPanel(this);
    const search = h("form", { class: "search", role: "search", onsubmit: (event) => { event.preventDefault(); this.refresh(); } },
      h("label", { for: "prefix" }, "Ids that begin with"), this.input, h("button", { type: "submit" }, "Search"));
    this.list = panel("Sessions", { class: "list", actions: h("button", { type: "button", class: "quiet", onclick: () => this.again() }, "Refresh") },
      search, this.table.element, h("div", { class: "after" }, this.said, this.more));
    this.element = h("div", { class: "split" }, this.list, this.panel.element);
    this.loaded = this.refresh();
  }

  show({ samples, problem }) {
    this.panel.allow(samples.latest);
    if (this.lost !== null && !problem && samples.heard > this.lost) this.again();
  }

  /** Something was asked for in vain: where that was for want of a node or a token, it is asked for again when there is one. */
  missed({ status }) {
    if (status === 0 || status === 401) this.lost = performance.now() / 1000;
  }

  /** Whether the list has all sessions there are. */
  get whole() {
    return this.read?.prefix === "" && !this.cursor;
  }

  /** Nothing of what is shown stays: it is another tenant's, perhaps. */
  forget() {
    this.asked += 1; // what is under way was asked for before
    this.#empty();
    this.more.hidden = true;
    text(this.said, "");
    this.panel.forget();
  }

  /** List and session again: somebody asked for it, or gave another token. */
  again() {
    this.lost = null;
    this.panel.family.forget();
    this.loaded = this.refresh();
    this.panel.refresh();
  }

  /** `parts`: id, namespace and lane of the session to show; nothing shows the list alone. */
  async route(parts) {
    const [id = "", namespace = "", lane = ""] = parts;
    const chosen = id ? { id, namespace, lane } : null;
    this.chosen = chosen ? keyOf(chosen) : "";
    this.element.classList.toggle("open", Boolean(chosen));
    this.#mark();
    await this.panel.open(chosen);
  }

  /** From the first page again. */
  async refresh() {
    clearTimeout(this.typing);
    this.prefix = this.input.value;
    await this.#load({ anew: true });
  }

  /** Sessions of a family that are on the pages loaded. */
  family(family) {
    return this.sessions.filter((each) => each.family === family);
  }

  /** Takes a session as it is now; null: it is gone. */
  changed(before, after) {
    const at = this.sessions.findIndex((each) => keyOf(each) === keyOf(before));
    if (at >= 0) this.sessions.splice(at, 1, ...(after ? [after] : []));
    this.table.show(this.sessions);
  }

  #typed() {
    clearTimeout(this.typing);
    this.typing = setTimeout(() => this.refresh(), TYPING_MS);
  }

  async #load({ anew = false } = {}) {
    const asked = (this.asked += 1);
    const query = new URLSearchParams({ prefix: this.prefix, cursor: anew ? "" : this.cursor, limit: PAGE });
    this.table.element.setAttribute("aria-busy", "true");
    if (!this.read) text(this.said, "Reading …");
    try {
      const page = await get(`/v1/sessions?${query}`, { patience: 60_000 });
      if (asked !== this.asked) return; // somebody typed on
      this.sessions = anew ? page.sessions : [...this.sessions, ...page.sessions];
      this.cursor = page.cursor;
      text(this.table.note, this.prefix ? "No session has an id that begins so." : "There is no session yet: an engine, or a client's commit, makes one.");
      this.table.show(this.sessions);
      this.#mark();
      this.more.hidden = !page.cursor;
      this.read = { prefix: this.prefix, at: new Date().toLocaleTimeString() };
      text(this.said, `${this.sessions.length ? `${sessions(this.sessions.length)}${page.cursor ? ", and more" : ""}, read` : "Read"} at ${this.read.at}`);
    } catch (problem) {
      if (asked !== this.asked) return;
      this.missed(problem);
      const kept = this.read && this.read.prefix === this.prefix; // else it would pass for what was searched
      if (!kept) this.#empty();
      this.more.hidden = !kept || !this.cursor;
      text(this.said, [kept ? `Not read: ${problem.message}` : problem.message, problem.remedy, kept && `What is shown is of ${this.read.at}.`].filter(Boolean).join(". "));
    } finally {
      if (asked === this.asked) this.table.element.removeAttribute("aria-busy");
    }
  }

  #empty() {
    this.read = null;
    this.cursor = "";
    this.table.show((this.sessions = []));
    this.table.note.hidden = true;
  }

  #link(session, before) {
    const node = before instanceof Element ? before : h("span", {}, h("a", {}, h("bdi")), h("span", { class: "note" }));
    const [link, more] = node.children;
    link.href = linkOf(session);
    text(link.firstChild, name(session.id));
    const elsewhere = session.namespace !== this.sessions[0].namespace;
    text(more, [elsewhere && ` namespace ${short(session.namespace)}`, session.lane !== "main" && ` lane ${name(session.lane)}`].filter(Boolean).join(","));
    return node;
  }

  #mark() {
    for (const row of this.table.body.children) {
      const chosen = row.dataset.key === this.chosen;
      row.classList.toggle("chosen", chosen);
      const link = row.querySelector("a");
      if (chosen) link.setAttribute("aria-current", "true");
      else link.removeAttribute("aria-current");
    }
  }
}
