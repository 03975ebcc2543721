// The app's health in one sentence, from the status document: what an operator must know first.
import { percent, plural, replicaName, shortId } from "./format.js";

/** Minimum share of failed requests in the last minute that counts as degraded. */
const MANY_ERRORS = 0.05;

/**
 * Return {level, text, problems}. `level` is "ok", "warn", "bad" or "unknown".
 *
 * `error` is that of the last request for the status, `status` the last document, `last` the last minute of the history.
 */
export function healthOf(error, status, last) {
  if (error) return { level: "bad", text: "No answer from the gateway", problems: [error.message] };
  if (!status) return { level: "unknown", text: "Asking the gateway ...", problems: [] };
  const decode = status.replicas.filter((one) => one.role === "decode" && stateOf(status, one) !== "down");
  const problems = [...missingReplicas(status), ...unhealthyReplicas(status), ...failingParts(status), ...failedRequests(last)];
  if (!decode.length) return { level: "bad", text: "Failing: no decode replica answers", problems };
  if (!problems.length) return { level: "ok", text: "Healthy", problems };
  const more = problems.length > 1 ? ` (and ${plural(problems.length - 1, "more problem")})` : "";
  return { level: "warn", text: `Degraded: ${problems[0]}${more}`, problems };
}

function missingReplicas(status) {
  return ["decode", "prefill"].flatMap((role) => {
    const { missing, expected } = missingOf(status, role);
    return missing ? [`${missing} of ${expected} ${role} replicas ${missing === 1 ? "does" : "do"} not answer`] : [];
  });
}

/** State of a replica as the gateway's probes and reports show it: "" if it is healthy, else "suspect" or "down". */
export function stateOf(status, one) {
  const state = status.gateway?.router?.unhealthy?.[one.replica_id] ?? "";
  return state === "draining" ? "" : state;
}

function unhealthyReplicas(status) {
  return status.replicas.filter((one) => stateOf(status, one)).map((one) => `${replicaName(one)} is ${stateOf(status, one)}`);
}

/** How many of a role's replicas Ray Serve runs or starts (`expected`), and how many of these gave no status (`missing`). */
export function missingOf(status, role) {
  const answered = status.replicas.filter((one) => one.role === role);
  const names = new Set([role, ...answered.map((one) => one.deployment)]);
  const expected = Object.entries(status.expected_replicas ?? {}).reduce((sum, [name, n]) => sum + (names.has(name) || name.startsWith(`${role}:`) ? n : 0), 0);
  return { expected, missing: Math.max(0, expected - answered.length) };
}

function failingParts(status) {
  const found = [];
  for (const one of status.replicas) {
    for (const [name, target] of Object.entries(one.router?.prefill ?? {})) {
      if (target.breaker && target.breaker.state !== "closed") {
        found.push(`${replicaName(one)} sends no prompts to prefill replica ${shortId(name)}: ${target.breaker.reason || "it failed"}`);
      }
    }
  }
  for (const node of status.store ?? []) {
    if (!node.tiers) found.push(`the KV store of machine ${shortId(node.machine)} does not answer`);
    for (const [name, tier] of Object.entries(node.tiers ?? {})) {
      if (!["on", "off"].includes(tier.state)) found.push(`the store's tier ${name} of machine ${shortId(node.machine)} is ${tier.state}`);
    }
  }
  if (status.gateway?.keys_stale) found.push("the gateway cannot read the file of API keys again");
  for (const part of status.incomplete ?? []) found.push(`the status is incomplete: ${part}`);
  return found;
}

function failedRequests(last) {
  const rate = last?.error_rate ?? 0;
  return rate >= MANY_ERRORS ? [`${percent(rate)} of the last minute's requests failed`] : [];
}
