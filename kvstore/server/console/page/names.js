// Sessions, tiers and namespaces: what tells them apart, and as people know them. Which model a namespace is of is asked for once, and again when one turns up that is not known.

import { get } from "./api.js";
import { name, short } from "./format.js";

const AGAIN_MS = 30_000;
const models = new Map();
let last = -Infinity;

/** Learns what namespaces there are; says nothing where that fails, because digests will do. */
export async function learn(namespaces) {
  if (namespaces.every((each) => models.has(each)) || performance.now() - last < AGAIN_MS) return;
  last = performance.now();
  try {
    for (const each of (await get("/v1/namespaces")).namespaces) models.set(each.namespace, each.fields.model);
  } catch {
    // the caller shows digests
  }
}

const TIERS = { gpu: "GPU", device: "Device", dram: "DRAM", nvme: "NVMe", peer: "Peers", bucket: "Bucket" };

/** A tier, by its name in statistics. */
export const tierName = (tier) => TIERS[tier] ?? name(tier);

/** A namespace as people know it. */
export const namespace = (id) => (models.has(id) ? `${name(models.get(id))} (${short(id)})` : short(id));

/** Tells a session from all others: ids may be equal between namespaces and lanes. */
export const keyOf = (session) => JSON.stringify([session.id, session.namespace, session.lane]);

/** Where the page shows a session. */
export const linkOf = (session) => `#/sessions/${[session.id, session.namespace, session.lane].map(encodeURIComponent).join("/")}`;
