// What the counters in the status say since the page was opened: rates, and the KV hit rate.

const MAX_POINTS = 1800; // an hour, at one every two seconds
const RATE_WINDOW_S = 10;

/** The counters of a status document at a time in Unix seconds. */
export function countersOf(status, at_s) {
  const outcomes = status.replicas.map((one) => one.router?.outcomes).filter(Boolean);
  const sum = (all, name) => all.reduce((total, one) => total + (one?.[name] ?? 0), 0);
  const tiers = {};
  for (const node of status.store ?? []) {
    for (const [name, tier] of Object.entries(node.tiers ?? {})) {
      const total = (tiers[name] ??= { hits: 0, misses: 0 });
      total.hits += tier.hits ?? 0;
      total.misses += tier.misses ?? 0;
    }
  }
  return {
    at: at_s,
    promptTokens: sum(outcomes, "prompt_tokens"),
    reachedTokens: sum(outcomes, "reached_tokens"),
    reachableTokens: sum(outcomes, "reachable_tokens"),
    nixlBytes: status.nixl_bytes ?? 0,
    loadBytes: { decode: loaded(status, "decode"), prefill: loaded(status, "prefill") },
    savedBlocks: { decode: saved(status, "decode"), prefill: saved(status, "prefill") },
    tiers,
  };
}

const totalOf = (status, role, name) =>
  status.replicas.filter((one) => one.role === role).reduce((total, one) => total + (one.store?.[name] ?? 0), 0);
const loaded = (status, role) => totalOf(status, role, "load_bytes");
const saved = (status, role) => totalOf(status, role, "saved");

/** The history with one more point. A counter that fell belongs to a replica that started again: the history begins anew. */
export function withPoint(history, point) {
  const last = history.at(-1);
  if (last && (point.at <= last.at || point.promptTokens < last.promptTokens || point.nixlBytes < last.nixlBytes)) return [point];
  return [...history, point].slice(-MAX_POINTS);
}

/** The rate per second of what `read` returns of a point, over the last seconds; null with one point. */
export function rateOf(history, read) {
  const last = history.at(-1);
  if (!last || history.length < 2) return null;
  const first = history.find((point) => point.at >= last.at - RATE_WINDOW_S) ?? history.at(-2);
  const from = first === last ? history.at(-2) : first;
  return Math.max(0, (read(last) - read(from)) / (last.at - from.at));
}

/** The share of prompt tokens that were not computed, at each point over the ten seconds before it; null without prompts. */
export function hitRates(history) {
  let from = 0;
  return history.map((point) => {
    while (history[from].at < point.at - RATE_WINDOW_S) from += 1;
    const tokens = point.promptTokens - history[from].promptTokens;
    return tokens > 0 ? (point.reachedTokens - history[from].reachedTokens) / tokens : null;
  });
}
