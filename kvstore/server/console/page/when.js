// Times as distances from now. They stay true for as long as they are shown.

import { h, text } from "./dom.js";
import { NONE, ago, exactly } from "./format.js";

const SAYS = { past: ago, end: (at) => (at < Date.now() / 1000 ? `expired ${ago(at)}` : ago(at)) };

/** An element that says how long ago something was, or, of an "end", when it will be. `at`: seconds since the epoch; 0 is unknown. */
export function when(at, kind = "past") {
  if (!at) return h("span", {}, NONE);
  return h("time", { datetime: new Date(at * 1000).toISOString(), title: exactly(at), "data-at": at, "data-kind": kind }, SAYS[kind](at));
}

/** Says all times on the page anew. */
export function tick() {
  for (const node of document.querySelectorAll("time[data-at]")) text(node, SAYS[node.dataset.kind](Number(node.dataset.at)));
}
