// One rate as a line: at least a minute, at most five; on the scale of its own maximum.

import { s } from "./dom.js";

const WIDTH = 160, HEIGHT = 28, LEAST_S = 60;

export class Spark {
  constructor(label) {
    this.line = s("path", { class: "line" });
    this.area = s("path", { class: "area" });
    const base = s("path", { class: "base", d: `M0 ${HEIGHT - 0.5}H${WIDTH}` });
    this.element = s("svg", { class: "spark", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": label },
      base, this.area, this.line);
  }

  /** `points` as Samples.rates gives them. */
  show(points) {
    const most = Math.max(1e-9, ...points.map(([, value]) => value ?? 0));
    const seconds = Math.max(LEAST_S, points[0]?.[0] ?? 0);
    const runs = [[]];
    for (const [ago, value] of points) {
      if (value === null) runs.push([]);
      else runs.at(-1).push([WIDTH * (1 - ago / seconds), HEIGHT - 1.5 - (HEIGHT - 4) * (value / most)]);
    }
    const drawn = runs.filter((run) => run.length > 1);
    const path = (run) => run.map(([x, y], index) => `${index ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");
    this.line.setAttribute("d", drawn.map(path).join(""));
    this.area.setAttribute("d", drawn.map((run) => `${path(run)}V${HEIGHT}H${run[0][0].toFixed(1)}Z`).join(""));
  }
}
