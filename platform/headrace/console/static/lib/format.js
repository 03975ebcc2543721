// Numbers, times and names as the reader sees them. A value that is not known is "-".

const unknown = (value) => value === null || value === undefined || Number.isNaN(value);

/** A number with at most three digits that matter: 0.123, 1.23, 12.3, 123, 1,234. */
export function number(value) {
  if (unknown(value)) return "-";
  const size = Math.abs(value);
  const digits = size >= 100 || value === Math.round(value) ? 0 : size >= 10 ? 1 : size >= 1 ? 2 : 3;
  return value.toLocaleString("en-US", { maximumFractionDigits: digits });
}

/** Seconds in the unit that fits: ms, s, min, h or d. */
export function seconds(value) {
  if (unknown(value)) return "-";
  if (value === 0) return "0 ms";
  if (value < 0.001) return "<1 ms";
  if (value < 0.01) return `${(1000 * value).toFixed(1)} ms`;
  if (value < 0.9995) return `${(1000 * value).toFixed(0)} ms`;
  if (value < 60) return `${value.toFixed(value < 10 ? 2 : 1)} s`;
  if (value < 3600) return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
  if (value < 86400) return `${Math.floor(value / 3600)} h ${Math.round((value % 3600) / 60)} min`;
  return `${Math.floor(value / 86400)} d ${Math.round((value % 86400) / 3600)} h`;
}

export function bytes(value) {
  if (unknown(value)) return "-";
  let at = 0;
  for (; value >= 1024 && at < 4; at += 1) value /= 1024;
  return `${value.toFixed(at && value < 100 ? 1 : 0)} ${["B", "KiB", "MiB", "GiB", "TiB"][at]}`;
}

/** A share of 1 as a percentage; small ones keep a digit. */
export function percent(share) {
  if (unknown(share)) return "-";
  const value = 100 * share;
  return `${value === 0 || value >= 10 ? value.toFixed(0) : value.toFixed(1)} %`;
}

export const count = (value) => (unknown(value) ? "-" : Math.round(value).toLocaleString("en-US"));

/** "1 replica", "2 replicas". */
export const plural = (n, noun) => `${count(n)} ${noun}${n === 1 ? "" : "s"}`;

/** The local time of a moment, in Unix seconds: 14:03:07. */
export const clock = (at_s) => new Date(1000 * at_s).toLocaleTimeString("en-GB");

/** "decode/1a2b3c4d" of a replica's document. */
export const replicaName = (one) => `${one.deployment ?? one.role}/${shortId(one.replica_id)}`;

export const shortId = (id) => String(id ?? "?").slice(0, 8);
