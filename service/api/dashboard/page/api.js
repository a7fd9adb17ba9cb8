// Requests to the server that sent this page. The API key stays in the session's storage of this tab.

const KEY = "gradserve.key";

/** An answer of the server with an error: application/problem+json, or the form of the Open Inference Protocol. */
export class Problem extends Error {
  constructor(status, body) {
    super(body.detail ?? (typeof body.error === "string" ? body.error : body.title) ?? `The server answered ${status}`);
    this.status = status;
    this.title = body.title ?? `Status ${status}`;
    this.tensor = body.tensor ?? null;
    this.parameter = body.parameter ?? null;
  }
}

/** The server did not answer. */
export class Unreachable extends Error {
  title = "No answer";

  constructor() {
    super("The server does not answer");
  }
}

/** The bounds of the server's clock minus this machine's, in milliseconds: each answer's Date narrows them. */
let [least, most] = [-Infinity, Infinity];

/** A server writes its Date once a second and without fractions, so the header may be this old. */
const DATE_AGE_MS = 2000;

function learn(date, sent, received) {
  const at = Date.parse(date ?? "");
  if (Number.isNaN(at)) return;
  const bounds = [at - received, at + DATE_AGE_MS - sent];
  [least, most] = [Math.max(least, bounds[0]), Math.min(most, bounds[1])];
  if (least > most) [least, most] = bounds; // a clock was set
}

/** Return the server's time in seconds since 1970. If both clocks may agree, this machine's is the finer one. */
export function now() {
  const offset = least <= 0 && most >= 0 ? 0 : Number.isFinite(least + most) ? (least + most) / 2 : 0;
  return (Date.now() + offset) / 1000;
}

const listeners = new Set();

/** Call `listener` with what each request met: "answered", "unreachable" or "unauthorized". Return what ends it. */
export function watch(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

function tell(event) {
  listeners.forEach((listener) => listener(event));
}

function stored() {
  try {
    return sessionStorage.getItem(KEY);
  } catch {
    return null;
  }
}

/** Keep the key for this tab, or forget it (null). */
export function setKey(key) {
  if (key === null) sessionStorage.removeItem(KEY);
  else sessionStorage.setItem(KEY, key);
}

export function hasKey() {
  return stored() !== null;
}

/** Return a new text for an Idempotency-Key. Browsers have randomUUID only over HTTPS, so it is not used. */
export function newIdempotencyKey() {
  return Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/**
 * Send a request to a relative path and return the answer, a Response. An object as `json` becomes the body. `key` is
 * the API key; by default the one that is kept.
 * Throws Problem, Unreachable, and the signal's AbortError.
 */
export async function request(path, { method = "GET", headers = {}, json, body, signal, key = stored() } = {}) {
  const head = new Headers(headers);
  if (key !== null) head.set("Authorization", `Bearer ${key}`);
  if (json !== undefined) head.set("Content-Type", "application/json");
  const sent = Date.now();
  const content = json === undefined ? body : JSON.stringify(json);
  const options = { method, headers: head, body: content, signal, cache: "no-store", credentials: "omit" };
  const answer = await arrived(fetch(path, options), signal);
  learn(answer.headers.get("Date"), sent, Date.now());
  if (answer.ok || answer.status === 304) {
    tell("answered");
    return answer;
  }
  const problem = new Problem(answer.status, (await answer.json().catch(() => null)) ?? {});
  tell(problem.status === 401 ? "unauthorized" : [502, 504].includes(problem.status) ? "unreachable" : "answered");
  throw problem;
}

/** Return what a promise of the network brings. One that breaks off is a server that is gone. */
async function arrived(promise, signal) {
  try {
    return await promise;
  } catch (error) {
    if (signal?.aborted) throw error;
    tell("unreachable");
    throw new Unreachable();
  }
}

/** Return the JSON of a GET. */
export async function get(path, options = {}) {
  return arrived((await request(path, options)).json(), options.signal);
}

/** Return all entries of a list, "buffers" or "graphs", which the server answers in pages. */
export async function all(list, options = {}) {
  const found = [];
  let cursor = "";
  do {
    const page = await get(`v1/${list}?limit=1000&cursor=${encodeURIComponent(cursor)}`, options);
    found.push(...page[list]);
    cursor = page.next_cursor;
  } while (cursor !== null);
  return found;
}

/** Return the JSON of a POST of `json`. */
export async function post(path, json, options = {}) {
  return arrived((await request(path, { ...options, method: "POST", json })).json(), options.signal);
}
