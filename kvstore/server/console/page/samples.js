// Successive statistics, and the rates between them: as much as five minutes, in this tab only.

const KEPT = 150;

export class Samples {
  #all = [];

  /** Takes one; counters that ran backwards mean another life of the node, and what was before is forgotten. */
  add(stats) {
    const last = this.#all.at(-1);
    if (last && (stats.uptime_s < last.stats.uptime_s || stats.node !== last.stats.node)) this.#all = [];
    this.#all.push({ at: performance.now() / 1000, stats });
    if (this.#all.length > KEPT) this.#all.shift();
  }

  get latest() {
    return this.#all.at(-1)?.stats ?? null;
  }

  /** When the last one came, in seconds of performance.now. */
  get heard() {
    return this.#all.at(-1)?.at ?? -Infinity;
  }

  /** [seconds ago, rate] pairs of a counter, oldest first; null where looking was paused between. */
  rates(counter) {
    const now = this.#all.at(-1)?.at;
    return this.#all.slice(1).map((sample, index) => {
      const before = this.#all[index];
      const seconds = sample.at - before.at;
      return [now - sample.at, seconds > 15 ? null : (counter(sample.stats) - counter(before.stats)) / seconds];
    });
  }

  /** The rate of a counter over the last samples; null before there are two. */
  now(counter) {
    const last = this.#all.at(-1);
    const first = this.#all.at(-4) ?? this.#all[0];
    if (!last || first === last) return null;
    return Math.max(0, (counter(last.stats) - counter(first.stats)) / (last.at - first.at));
  }
}
