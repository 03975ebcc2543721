// The app's health as the gateway judges it, in one sentence: what an operator must know first.
import { plural } from "./format.js";
import { gatewayModels } from "./models.js";

const LEVELS = { ok: "ok", degraded: "warn", failing: "bad" };
const WORDS = { degraded: "Degraded", failing: "Failing" };

/**
 * Return {level, text, problems}. `level` is "ok", "warn", "bad" or "unknown".
 *
 * `error` is that of the last request for the status, `status` the last document.
 */
export function healthOf(error, status) {
  if (error) return { level: "bad", text: "No answer from the gateway", problems: [error.message] };
  if (!status) return { level: "unknown", text: "Asking the gateway ...", problems: [] };
  if (!status.health) return { level: "unknown", text: "The gateway does not tell the app's health", problems: status.incomplete ?? [] };
  const { state, problems } = status.health;
  if (!problems.length) return { level: LEVELS[state], text: "Healthy", problems };
  const more = problems.length > 1 ? ` (and ${plural(problems.length - 1, "more problem")})` : "";
  return { level: LEVELS[state], text: `${WORDS[state]}: ${problems[0]}${more}`, problems };
}

/** State of a replica as the gateway's probes and reports show it: "" if it is healthy, else "suspect" or "down". */
export function stateOf(status, one) {
  const state = gatewayModels(status).map(([, model]) => model.router?.unhealthy?.[one.replica_id]).find(Boolean) ?? "";
  return state === "draining" ? "" : state;
}
