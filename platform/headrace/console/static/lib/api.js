// Requests to the gateway that serves this page, with the reader's key. The key goes into the Authorization header only.

const KEPT_AT = "headrace-console-key";
let key = sessionStorage.getItem(KEPT_AT) ?? "";

/** Use a key from now on. With `remember` it stays in this tab, also after a reload, until the tab is closed. */
export function setKey(typed, remember) {
  key = typed;
  if (remember) sessionStorage.setItem(KEPT_AT, typed);
  else sessionStorage.removeItem(KEPT_AT);
}

export const hasKey = () => key !== "";

const authorization = () => (key ? { authorization: `Bearer ${key}` } : {});

/** The error of a refusal: its message and `status`, which is 0 if the gateway gave no answer. */
export class Refusal extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }

  /** Whether another key would help. */
  get needsKey() {
    return this.status === 401 || this.status === 403;
  }
}

/** Send a request and return the answer's Response. Raises a Refusal unless its status is 2xx. */
export async function send(method, path, { body, headers, signal } = {}) {
  let answer;
  try {
    answer = await fetch(path, {
      method, signal, cache: "no-store",
      headers: { ...authorization(), ...(body === undefined ? {} : { "content-type": "application/json" }), ...headers },
      body: body === undefined ? undefined : JSON.stringify(body),
    });
  } catch (problem) {
    if (problem.name === "AbortError") throw problem;
    throw new Refusal("The gateway does not answer.", 0);
  }
  if (answer.ok) return answer;
  const document = await answer.json().catch(() => ({}));
  throw new Refusal(document.error?.message ?? `The gateway answered with status ${answer.status}.`, answer.status);
}

export const getJson = async (path) => (await send("GET", path)).json();

export const putJson = async (path, body) => (await send("PUT", path, { body })).json();

export const getPlan = (id) => getJson(`/headrace/v1/plans/${encodeURIComponent(id)}`);
