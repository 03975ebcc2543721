// Requests, tokens, errors and waits of each tenant, over the finished requests that the gateway remembers.

/** The value at a share of the sorted values, or null without values. */
export function quantile(values, share) {
  if (!values.length) return null;
  const sorted = [...values].sort((a, b) => a - b);
  return sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))];
}

/** A server's error. A client that left or that asked wrongly is none. */
export const isError = (one) => one.status >= 500 || (one.status === 200 && Boolean(one.error));

/** Seconds to the first token. Of an answer in one piece the gateway sees no first token, only the first bytes. */
export const firstToken = (one) => (one.streamed === false ? null : one.ttft_s);

/** Rows by tenant, the one with the most requests first. `inFlight` are added as a count of their own. */
export function byTenant(finished, inFlight) {
  const rows = new Map();
  const row = (tenant) => {
    const name = tenant ?? null;
    if (!rows.has(name)) rows.set(name, { tenant: name, requests: 0, running: 0, errors: 0, refused: 0, tokens: 0, waits: [] });
    return rows.get(name);
  };
  for (const one of finished) {
    const of = row(one.tenant);
    of.requests += 1;
    of.tokens += one.tokens ?? 0;
    of.errors += isError(one) ? 1 : 0;
    of.refused += one.status >= 400 && one.status < 499 ? 1 : 0;
    if (firstToken(one) !== null) of.waits.push(one.ttft_s);
  }
  for (const one of inFlight) row(one.tenant).running += 1;
  return [...rows.values()]
    .map(({ waits, ...of }) => ({ ...of, ttft_p50_s: quantile(waits, 0.5), ttft_p99_s: quantile(waits, 0.99) }))
    .sort((a, b) => b.requests - a.requests || b.running - a.running);
}
