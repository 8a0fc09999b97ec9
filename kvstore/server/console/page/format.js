// Numbers as people read them: binary sizes as the settings have them, decimal rates, and no more digits than are meant.

const SIZES = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
const RATES = ["B/s", "kB/s", "MB/s", "GB/s", "TB/s"];

function scaled(value, step, units) {
  let at = 0;
  while (Math.abs(value) >= step && at < units.length - 1) {
    value /= step;
    at += 1;
  }
  return `${at && Math.abs(value) < 100 ? value.toFixed(Math.abs(value) < 10 ? 2 : 1) : Math.round(value)} ${units[at]}`;
}

export const NONE = "–";
export const bytes = (value) => scaled(value, 1024, SIZES);
export const rate = (value) => (value === null ? NONE : scaled(value, 1000, RATES));
export const count = (value) => (value < 0 ? NONE : Math.round(value).toLocaleString("en-US"));
export const sessions = (n) => `${count(n)} session${n === 1 ? "" : "s"}`;
export const perSecond = (value) => (value === null ? NONE : `${value && value < 10 ? value.toFixed(1) : count(value)} /s`);
export const percent = (part, whole) => (whole ? `${((100 * part) / whole).toFixed(1)} %` : NONE);

export function milliseconds(value) {
  if (value === null || value === undefined) return NONE;
  if (value >= 10_000) return duration(value / 1000);
  if (value >= 1000) return `${(value / 1000).toFixed(2)} s`;
  return value >= 10 ? `${value.toFixed(0)} ms` : value >= 1 ? `${value.toFixed(1)} ms` : `${(value * 1000).toFixed(0)} µs`;
}

export function duration(seconds) {
  const whole = Math.max(0, Math.round(seconds));
  const parts = [[86_400, "d"], [3600, "h"], [60, "min"], [1, "s"]];
  const at = parts.findIndex(([size]) => whole >= size);
  if (at < 0) return "0 s";
  const [size, unit] = parts[at];
  const rest = parts[at + 1];
  const more = rest && size !== 60 ? Math.floor((whole % size) / rest[0]) : 0;
  return `${Math.floor(whole / size)} ${unit}${more ? ` ${more} ${rest[1]}` : ""}`;
}

/** Seconds since the epoch as a distance from now. */
export function ago(at) {
  if (!at) return NONE;
  const seconds = Date.now() / 1000 - at;
  return Math.abs(seconds) < 1 ? "now" : seconds > 0 ? `${duration(seconds)} ago` : `in ${duration(-seconds)}`;
}

/** The same as a time, for a tooltip. */
export const exactly = (at) => (at ? new Date(at * 1000).toISOString().replace("T", " ").replace(/\.\d+Z/, " UTC") : "");

// What turns text around or hides in it: a name must not look like another one.
const UNSEEN = /[\p{Cc}\p{Cf}\p{Zl}\p{Zp}]/gu;

/** A name from outside, with what cannot be seen spelled out. */
export const name = (value) => value.replace(UNSEEN, (one) => `\\u{${one.codePointAt(0).toString(16)}}`);

/** The beginning of a digest. */
export const short = (value) => value.slice(0, 12);
