// A request's plan in words: its parts, what each means, and why the router chose it.
import { count, plural, seconds } from "./format.js";
import { firstToken } from "./tenants.js";

/** Part of a plan's price: [name, meaning]; the names are those of `headrace explain`. "own" parts are the request's own wait, the others are delays of other requests. */
export const PARTS = {
  call: ["Call the prefill replica", "Overhead of the call to the prefill replica."],
  queue: ["Wait for the engine", "Wait until the engine that computes the prompt begins with it."],
  pull: ["Bring cached KV into DRAM", "The store brings blocks from a disk, a peer or the object store into DRAM."],
  compute: ["Compute the prompt", "The engine computes the prompt tokens whose KV is not stored."],
  load: ["Load cached KV", "KV comes from the store, beyond the time in which the engine computes."],
  transfer: ["Move the KV", "KV moves from the prefill engine to the decode engine over NIXL."],
  handoff: ["Hand over to the decode replica", "From the prefill replica's answer to the first token, without transfer and step."],
  decode_queue: ["Wait for the decode engine", "Wait for the decode engine, beyond the time in which the KV comes."],
  decode: ["First decode step", "The decode engine's step that makes the first token."],
  stall: ["Delay of running answers", "Seconds that this prompt takes from the streams that run on the engine, all added up."],
  behind: ["Delay of later prompts", "Seconds that the prompts after this one wait longer, all added up."],
};
const FOR_OTHERS = ["stall", "behind"];

/** Rows {part, name, meaning, isOwn, local, remote} of a plan's price. Parts that are 0 for every choice are left out. */
export function priceRows(plan) {
  const price = (kind, part) => plan.predicted[`${kind}.${part}`];
  return Object.entries(PARTS)
    .map(([part, [name, meaning]]) => ({ part, name, meaning, isOwn: !FOR_OTHERS.includes(part), local: price("local", part), remote: price("remote", part) }))
    .filter((row) => isVisible(row.local) || isVisible(row.remote));
}

const isVisible = (value) => (value ?? 0) >= 0.00005;

/** The parts of the chosen way that come before the first token, in order: [{part, name, seconds}]. */
export function predictedParts(plan) {
  return priceRows(plan).filter((row) => row.isOwn && isVisible(row[plan.kind])).map((row) => ({ ...row, seconds: row[plan.kind] }));
}

/**
 * Measured parts of a request: [{part, name, seconds}]; `request` is a row of /headrace/v1/requests, null if the gateway
 * does not remember it. A replica measures the first token of an answer that is no stream.
 */
export function measuredParts(request, plan) {
  const queue = request?.queue_s ?? 0;
  const total = request?.total_s ?? request?.age_s ?? null;
  const first = (request ? firstToken(request) : null) ?? (plan.measured ? queue + plan.measured.ttft_s : null);
  const parts = [
    { part: "admission", name: "Gateway queue", seconds: queue },
    ...(first === null ? [] : [{ part: "first", name: "First token", seconds: first - queue }]),
    ...(total === null ? [] : [first === null ? { part: "whole", name: "Whole answer", seconds: total - queue } : { part: "rest", name: restName(request, total - first), seconds: total - first }]),
  ];
  return parts.filter((part) => part.seconds > 0);
}

/** The name of the part after the first token, with the time per token if the gateway counted them. */
function restName(request, rest_s) {
  const further = (request.tokens ?? 0) - 1;
  return further > 0 ? `Rest of the answer, ${plural(further, "token")} of ${seconds(rest_s / further)} each:` : "Rest of the answer";
}

/** Sentences that say what was decided, why, and how it turned out. */
export function planSentences(plan) {
  const where = plan.kind === "remote" ? `Prefill replica ${plan.replica || plan.prefill} computed the prompt, and ${plan.decode} answered.` : `${plan.decode || "The decode replica"} computed the prompt and answered.`;
  const said = [where, `Reason: ${plan.reasons?.[0] ?? "none is known"}${plan.made_by ? ` (planned by the ${plan.made_by})` : ""}.`];
  if (plan.runs?.length) {
    said.push(`Prompt of ${plural(plan.prompt_tokens, "token")}: ${plan.runs.map((run) => `${count(run.tokens)} ${SOURCES[run.source] ?? `from ${run.source}`}`).join(", ")}.`);
  }
  if (plan.explores) said.push("The router chose a more expensive engine in order to measure it again.");
  if (plan.broken?.length) said.push(`No choice keeps every target: this one ${plan.broken.join(" and ")}.`);
  const measured = plan.measured;
  if (measured) {
    const predicted = predictedParts(plan).reduce((sum, part) => sum + part.seconds, 0);
    said.push(`The replica measured ${seconds(measured.ttft_s)} to the first token, and ${seconds(predicted)} was predicted.`);
  }
  return said;
}

const SOURCES = {
  compute: "to compute", hbm: "in the engine's cache", dram: "from the store's DRAM",
  nvme: "from NVMe", remote: "from another machine", object: "from the object store",
};
