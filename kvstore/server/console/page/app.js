// Starts the page: which views there are, which one is shown, and the loop that asks the node.

import { Problem, get, refused, token } from "./api.js";
import { h, text } from "./dom.js";
import { duration, name } from "./format.js";
import { Samples } from "./samples.js";
import { askForToken } from "./signin.js";
import { tick } from "./when.js";
import { CollectorView } from "./collector.js";
import { CostView } from "./cost.js";
import { MeshView } from "./mesh.js";
import { RoutingView } from "./routing.js";
import { SessionsView } from "./sessions.js";
import { TiersView } from "./tiers.js";

const EVERY_MS = 2000, LONGEST_MS = 15_000, READY_EVERY = 3;
const at = (id) => document.getElementById(id);
const gateway = document.documentElement.dataset.face === "gateway";
const VIEWS = gateway
  ? [["routing", "Routing", RoutingView]]
  : [["tiers", "Tiers", TiersView], ["sessions", "Sessions", SessionsView], ["collector", "Collector", CollectorView],
    ["mesh", "Mesh", MeshView], ["cost", "Cost", CostView]];
const what = gateway ? "gateway" : "node";

const state = { samples: new Samples(), health: null, engines: [], decisions: [], problem: null };
const views = new Map();
let shown = null;

// --- which view ---

function route() {
  const parts = location.hash.replace(/^#\/?/, "").split("/").map((part) => {
    try { return decodeURIComponent(part); } catch { return ""; }
  });
  const [id, title, View] = VIEWS.find(([known]) => known === parts[0]) ?? VIEWS[0];
  if (!views.has(id)) views.set(id, new View(state));
  const view = views.get(id);
  if (view !== shown) {
    at("main").replaceChildren(view.element);
    shown = view;
  }
  for (const link of document.querySelectorAll("#views a")) {
    if (link.dataset.view === id) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = `${title} – kvtier`;
  view.route?.(parts.slice(1));
  view.show?.(state);
}

// --- what is asked, and how often ---

/** A node that is not ready says so with 503; one that is overloaded answers 503, too, and says nothing of itself. */
async function ready() {
  const said = await get("/readyz", { also: [503] });
  if (said.degraded === undefined) throw new Problem(503, said.detail ?? "HTTP 503", said.remedy, said.kind);
  return said;
}

let timer = 0, failures = 0, round = 0, asking = false, downSince = null;

async function ask() {
  if (asking || document.hidden) return;
  asking = true;
  clearTimeout(timer);
  try {
    if (gateway) {
      [state.engines, state.decisions] = await Promise.all([get("/v1/engines"), get("/v1/decisions")]);
    } else {
      if (round % READY_EVERY === 0 || failures) state.health = await ready();
      round += 1;
      state.samples.add(await get("/v1/stats"));
    }
    [state.problem, downSince, failures] = [null, null, 0];
  } catch (error) {
    if (!(error instanceof Problem)) throw error;
    state.problem = error;
    failures += 1;
    downSince = error.status ? null : (downSince ?? new Date());
  } finally {
    asking = false;
    const wait = failures ? Math.min(LONGEST_MS, EVERY_MS * 2 ** Math.min(failures - 1, 3)) : EVERY_MS;
    if (state.problem?.status !== 401) timer = setTimeout(ask, wait);
  }
  head();
  shown?.show?.(state);
  tick();
}

document.addEventListener("visibilitychange", () => {
  if (document.hidden) clearTimeout(timer);
  else ask();
});

// --- what stands above every view ---

function head() {
  const { health, problem } = state;
  const stats = state.samples.latest;
  const degraded = Object.entries(health?.degraded ?? {});
  const [tone, word] = standing(problem, health, degraded.length);
  at("state").className = `state ${tone}`;
  text(at("state"), word);
  const who = gateway ? ["gateway"] : [health?.node ?? stats?.node, health && `version ${health.version}`, stats && `up ${duration(stats.uptime_s)}`];
  text(at("who"), who.filter(Boolean).map(String).map(name).join(" · "));
  at("leave").hidden = !token.get();
  at("own").hidden = stats?.whole !== false;
  notices([...troubles(problem), ...(problem && !problem.status ? [] : degraded)]);
}

function standing(problem, health, degraded) {
  if (problem && !problem.status) return ["bad", "No answer"];
  if (problem?.status === 401) return ["bad", "Token needed"];
  if (problem && !health) return ["bad", `Error ${problem.status}`];
  if (gateway) return state.engines.some((each) => each.up && !each.draining) ? ["good", "Ready"] : ["bad", "No engine"];
  if (!health) return ["", "Connecting"];
  if (!health.ok) return ["bad", "Not ready"];
  return degraded ? ["warn", "Degraded"] : ["good", "Ready"];
}

function troubles(problem) {
  if (!problem) return [];
  if (!problem.status) {
    return [[`No answer from this ${what}`, `since ${downSince.toLocaleTimeString()}. What is shown is what it said last. Still trying.`]];
  }
  if (problem.status === 401) return [["This needs a token", problem.message]];
  return [[problem.status === 403 ? `This token may not see ${gateway ? "engines and decisions" : "statistics"}` : `Error ${problem.status}`, [problem.message, problem.remedy].filter(Boolean).join(": ")]];
}

let told = "";
function notices(pairs) {
  const now = JSON.stringify(pairs);
  if (now === told) return;
  told = now;
  const lines = pairs.map(([part, why]) => h("p", {}, h("strong", {}, name(part)), " ", name(why)));
  if ([401, 403].includes(state.problem?.status)) lines[0].append(" ", h("button", { type: "button", onclick: signIn }, state.problem.status === 401 ? "Enter a token" : "Enter another token"));
  at("notices").replaceChildren(...lines);
}

// --- tokens ---

let signingIn = false;
async function signIn(event) {
  if (signingIn) return;
  signingIn = true;
  const wrong = event.type === "refused" && token.get() ? event.detail.message : "";
  const given = await askForToken(wrong);
  signingIn = false;
  if (given === null) return;
  token.set(given);
  for (const view of views.values()) view.forget?.(); // another token may be another tenant's
  await ask();
  for (const view of views.values()) view.again?.();
}
refused.addEventListener("refused", signIn);
at("leave").addEventListener("click", () => {
  token.set("");
  location.reload();
});

at("views").append(...VIEWS.map(([id, title]) => h("li", {}, h("a", { href: `#/${id}`, "data-view": id }, title))));
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault(); // the fragment says which view is shown
  at("main").focus();
});
addEventListener("hashchange", route);
route();
ask();
