// The node's HTTP API. The token, where one is needed, stays in this tab and travels only as a header.

const KEY = "kvtier.token";
const PATIENCE_MS = 10_000;

/** An answer that says no, or no answer (status 0). */
export class Problem extends Error {
  constructor(status, detail, remedy = "", kind = "") {
    super(detail);
    Object.assign(this, { status, remedy, kind });
  }
}

export const token = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
};

/** Called when an answer is 401. */
export const refused = new EventTarget();

function headers(more) {
  const said = token.get();
  return { Accept: "application/json", ...(said ? { Authorization: `Bearer ${said}` } : {}), ...more };
}

async function asked(method, path, { body, signal } = {}) {
  const options = { method, signal, headers: headers(body && { "Content-Type": "application/json" }), cache: "no-store", credentials: "omit" };
  if (body) options.body = JSON.stringify(body);
  let answer;
  try {
    answer = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem(0, error.name === "TimeoutError" ? "no answer in time" : "no answer");
  }
  return answer;
}

async function problem(answer) {
  let said = {};
  try {
    said = await answer.json();
  } catch {
    // not ours: a proxy's page, say
  }
  const found = new Problem(answer.status, said.detail ?? `HTTP ${answer.status}`, said.remedy, said.kind);
  if (answer.status === 401) refused.dispatchEvent(new CustomEvent("refused", { detail: found }));
  return found;
}

async function json(method, path, body, { patience = PATIENCE_MS, also = [] } = {}) {
  const answer = await asked(method, path, { body, signal: patience ? AbortSignal.timeout(patience) : undefined });
  if (!answer.ok && !also.includes(answer.status)) throw await problem(answer);
  return answer.json();
}

export const get = (path, options) => json("GET", path, undefined, options);
export const post = (path, body = {}, options = undefined) => json("POST", path, body, options);
export const remove = (path, options) => json("DELETE", path, undefined, options);

/** A path to a session; `more` are query parameters. */
export function ofSession(session, call = "", more = {}) {
  const query = new URLSearchParams({ namespace: session.namespace, lane: session.lane, ...more });
  return `/v1/sessions/${encodeURIComponent(session.id)}${call && `/${call}`}?${query}`;
}

/** Server-sent events as JSON, through fetch, because an EventSource cannot send a token. */
export async function* events(path, signal) {
  const answer = await asked("GET", path, { signal });
  if (!answer.ok) throw await problem(answer);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    held += value;
    const parts = held.split("\n\n");
    held = parts.pop();
    for (const part of parts) {
      const data = part.split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6)).join("\n");
      if (data) yield JSON.parse(data);
    }
  }
}
