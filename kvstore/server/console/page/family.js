// A session's versions, and the forks of its family that are known, as a tree.

import { get, ofSession } from "./api.js";
import { h, text } from "./dom.js";
import { count, name, sessions } from "./format.js";
import { keyOf, linkOf } from "./names.js";
import { tree } from "./tree.js";
import { when } from "./when.js";

const DRAWN = 24; // relatives whose versions are asked for
const PAGE = 1000;

export class Family {
  /** `list` has the sessions that were read; `restore(version)` restores one of the session's own versions. */
  constructor(list, restore) {
    this.list = list;
    this.restore = restore;
    this.session = null;
    this.whole = null; // the family of which all are known, and they
    this.tree = h("div", { class: "tree" });
    this.note = h("p", { class: "note", role: "status" });
    this.all = h("button", { type: "button", class: "quiet", hidden: true, onclick: () => this.#search() }, "Look through all sessions");
    this.element = h("div", {}, h("h3", {}, "Versions and forks"), this.tree, h("div", { class: "after" }, this.note, this.all));
  }

  /** Nothing, until another session is shown: what stands here is not its own. */
  clear() {
    this.session = null;
    this.tree.replaceChildren();
    text(this.note, "");
    this.all.hidden = true;
  }

  /** Forget what looking through all sessions found: they are read anew. */
  forget() {
    this.whole = null;
  }

  /** Raises what asking for the session's own versions raised. */
  async show(session) {
    this.session = session;
    const known = this.whole?.family === session.family ? this.whole.sessions : this.list.family(session.family);
    const others = known.filter((each) => keyOf(each) !== keyOf(session));
    const family = [session, ...others.slice(0, DRAWN)];
    const versions = await Promise.all(family.map(async (each) => {
      try {
        return (await get(ofSession(each, "versions"))).versions;
      } catch (problem) {
        if (each === session) throw problem;
        return []; // it went while we looked
      }
    }));
    if (this.session !== session) return;
    const grown = tree(family.map((each, index) => ({ session: each, versions: versions[index] })));
    this.tree.replaceChildren(h("ul", {}, grown.map((node) => this.#branch(node))));
    this.#say(others.length);
  }

  #say(others) {
    const whole = this.list.whole || this.whole?.family === this.session.family;
    const left = Math.max(0, others - DRAWN);
    text(this.note, [
      others ? "Each fork stands under the version that it began as." : whole ? "No other session is of its family." : "",
      left ? `${count(left)} more of its family are not drawn.` : "",
      whole ? "" : `Only what is in the list (${sessions(this.list.sessions.length)}) was looked at: what it began as, and forks of it, may be missing.`,
    ].filter(Boolean).join(" "));
    this.all.hidden = whole;
  }

  /** Every session of the tenant, page after page, for those of this family. Ends early where another session is shown. */
  async #search() {
    const session = this.session, found = [];
    this.all.disabled = true;
    try {
      for (let cursor = "", read = 0, more = true; more;) {
        const page = await get(`/v1/sessions?${new URLSearchParams({ cursor, limit: PAGE })}`, { patience: 60_000 });
        if (this.session !== session) return;
        found.push(...page.sessions.filter((each) => each.family === session.family));
        read += page.sessions.length;
        text(this.note, `${sessions(read)} looked through …`);
        cursor = page.cursor;
        more = Boolean(cursor);
      }
      this.whole = { family: session.family, sessions: found };
      await this.show(session);
    } catch (problem) {
      if (this.session === session) text(this.note, [problem.message, problem.remedy].filter(Boolean).join(": "));
    } finally {
      this.all.disabled = false;
    }
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
              h("span", { class: "soft" }, when(version.at)),
              version.current ? h("span", { class: "tag" }, "current") : null),
            own ? h("button", { type: "button", class: "quiet", "aria-label": `Restore version ${version.version}`, onclick: () => this.restore(version.version) }, "Restore") : null),
          forks.length ? h("ul", {}, forks.map((fork) => this.#branch(fork))) : null)),
        strays.map((fork) => this.#branch(fork))));
  }
}
