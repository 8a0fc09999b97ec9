// One restore, followed by its events until it ends.

import { Problem, events, remove } from "./api.js";
import { h, text } from "./dom.js";
import { bytes, count, milliseconds, name, rate } from "./format.js";
import { tierName } from "./names.js";

const OVER = new Set(["ready", "partial", "failed", "cancelled", "dropped"]);
const SAYS = {
  resolving: "Finding the session",
  staging: "Restoring",
  ready: "Restored",
  partial: "Restored in part",
  failed: "Failed",
  cancelled: "Cancelled",
  dropped: "Dropped",
};
const AGAIN_MS = 1000, TRIES = 5;

/** For a screen reader: a quarter at a time, and the end. */
const announce = (words) => text(document.getElementById("said"), words);

export class Restoring {
  constructor(status) {
    this.status = status;
    this.told = 0;
    this.stopping = new AbortController();
    this.bar = h("progress", { max: 1, "aria-label": "Restore" });
    this.word = h("strong");
    this.numbers = h("span", { class: "num" });
    this.more = h("p", { class: "note" });
    this.cancel = h("button", { type: "button", class: "quiet", onclick: () => this.#cancel() }, "Cancel");
    this.element = h("div", { class: "restoring" }, h("div", { class: "line" }, this.word, this.numbers, this.cancel), this.bar, this.more);
    this.#show(status);
  }

  get over() {
    return OVER.has(this.status.state);
  }

  /** Stops looking; the restore itself goes on. */
  stop() {
    this.stopping.abort();
  }

  /** Until it ends. A stream that breaks off is taken up again, for a while. */
  async follow() {
    for (let tries = 0; !this.over && tries < TRIES && !this.stopping.signal.aborted; tries += 1) {
      try {
        for await (const status of events(`/v1/restores/${encodeURIComponent(this.status.restore_id)}/events`, this.stopping.signal)) {
          this.#show(status);
          tries = 0;
        }
      } catch (error) {
        if (error.name === "AbortError") return;
        if (error instanceof Problem && error.status) return this.#lost(error.message);
      }
      if (!this.over) await new Promise((resolve) => setTimeout(resolve, AGAIN_MS));
    }
    if (!this.over && !this.stopping.signal.aborted) this.#lost("no answer; what became of it is not known");
  }

  async #cancel() {
    try {
      this.#show(await remove(`/v1/restores/${encodeURIComponent(this.status.restore_id)}`));
    } catch (problem) {
      text(this.more, problem.message);
    }
  }

  #lost(why) {
    text(this.word, "Lost sight of it");
    text(this.more, why);
    this.bar.hidden = this.cancel.hidden = true;
  }

  #show(status) {
    this.status = status;
    const { state, tokens, staged_tokens: staged, bytes: all, staged_bytes: done } = status;
    const part = tokens ? staged / tokens : this.over && state === "ready" ? 1 : null;
    if (part === null) this.bar.removeAttribute("value");
    else this.bar.value = part;
    this.element.dataset.state = state;
    text(this.word, `${SAYS[state] ?? name(state)}${status.version ? ` v${status.version}` : ""}`);
    text(this.numbers, tokens === null || tokens === undefined ? "" : `${count(staged)} of ${count(tokens)} tokens${all ? `, ${bytes(done)} of ${bytes(all)}` : ""}`);
    const from = Object.entries(status.by_tier).map(([tier, size]) => `${bytes(size)} from ${tierName(tier)}`).join(", ");
    const pace = done && status.elapsed_ms ? rate((1000 * done) / status.elapsed_ms) : "";
    const left = !this.over && status.eta_ms !== null ? `${milliseconds(status.eta_ms)} left` : "";
    const took = this.over ? `took ${milliseconds(status.elapsed_ms)}` : "";
    text(this.more, [from, pace, left, took, name(status.error)].filter(Boolean).join(" · "));
    this.cancel.hidden = this.over;
    this.bar.hidden = this.over && state !== "ready" && state !== "partial";
    this.#tell(part);
  }

  #tell(part) {
    if (this.over) return announce(`${SAYS[this.status.state]}: ${this.numbers.textContent}. ${this.status.error}`);
    const quarter = Math.floor(4 * (part ?? 0));
    if (quarter > this.told) announce(`${25 * quarter} percent restored`);
    this.told = Math.max(this.told, quarter);
  }
}
