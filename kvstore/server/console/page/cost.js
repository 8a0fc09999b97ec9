// What the bucket is estimated to cost, by tenant and namespace.

import { Table, h, panel } from "./dom.js";
import { name } from "./format.js";

export class CostView {
  constructor() {
    this.element = h("div", {}, panel("Cost", {}, h("p", { class: "empty" }, "Not reported by this node.")));
  }
}
