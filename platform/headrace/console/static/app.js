// The console: asks for the app's state every two seconds while the page is visible, and shows it.
// The key that the reader types stays in this page's memory and goes only into the Authorization header.
import { html, render, useEffect, useRef, useState } from "/console/vendor/htm-preact.js";
import { Actions, Advice, Fits, Load, Plan, Replicas, Requests, SpeculativeDecoding, Tiers, Topology } from "/console/views.js";

const EVERY_MS = 2000;
const KEPT = 300; // points of the load chart: ten minutes

let key = "";

async function ask(method, path, body) {
  const headers = {};
  if (key) headers.authorization = `Bearer ${key}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  const answer = await fetch(path, { method, headers, body: body && JSON.stringify(body), cache: "no-store" });
  const said = await answer.json().catch(() => ({}));
  if (!answer.ok) throw Object.assign(new Error(said.error?.message ?? `status ${answer.status}`), { status: answer.status });
  return said;
}

/** Numbers of the load chart at one moment. */
function pointOf(state) {
  const of = (role) => state.replicas.filter((one) => one.role === role);
  const sum = (role, name) => of(role).reduce((total, one) => total + (one[name] ?? 0), 0);
  return [
    Date.now() / 1000,
    sum("decode", "running"), sum("decode", "waiting"),
    sum("prefill", "running"), sum("prefill", "waiting"),
  ];
}

function KeyForm({ why, onKey }) {
  const field = useRef(null);
  const take = (event) => {
    event.preventDefault();
    onKey(field.current.value.trim());
  };
  return html`<section aria-labelledby="key-title">
    <h2 id="key-title">Administrator's key</h2>
    <p role="alert">${why}</p>
    <form onSubmit=${take}>
      <label for="key">API key</label>
      <input id="key" ref=${field} type="password" autocomplete="off" required />
      <button type="submit">Show the app</button>
    </form>
  </section>`;
}

function Console() {
  const [state, setState] = useState(null);
  const [error, setError] = useState(null);
  const [asked, setAsked] = useState(0);
  const [plan, setPlan] = useState({});
  const [done, setDone] = useState("");
  const points = useRef([]);

  useEffect(() => {
    let timer = 0;
    let over = false;
    const look = async () => {
      if (!document.hidden) {
        try {
          const found = await ask("GET", "/headrace/v1/console");
          if (over) return;
          points.current = [...points.current, pointOf(found)].slice(-KEPT);
          setState(found);
          setError(null);
        } catch (problem) {
          if (over) return;
          setError(problem);
          if (problem.status === 401 || problem.status === 403) return; // until there is a key
        }
      }
      timer = setTimeout(look, EVERY_MS);
    };
    look();
    return () => { over = true; clearTimeout(timer); };
  }, [asked]);

  const showPlan = async (id) => {
    setPlan({ id });
    try {
      setPlan({ id, told: await ask("GET", `/headrace/v1/plans/${encodeURIComponent(id)}`) });
    } catch (problem) {
      setPlan({ id, error: problem.message });
    }
  };
  const order = async (path, body) => {
    try {
      const { note } = await ask("PUT", path, body);
      setDone(note ?? `Done: ${JSON.stringify(body)}`);
    } catch (problem) {
      setDone(`Refused: ${problem.message}`);
    }
  };

  if (error && (error.status === 401 || error.status === 403)) {
    return html`<main><h1>Headrace</h1>
      <${KeyForm} why=${error.message} onKey=${(typed) => { key = typed; setAsked(asked + 1); }} /></main>`;
  }
  if (!state) return html`<main><h1>Headrace</h1><p role="status">${error ? error.message : "Asking the gateway ..."}</p></main>`;
  const model = state.replicas.find((one) => one.model)?.model ?? "";
  return html`<main>
    <h1>Headrace <small>${model}</small></h1>
    <p role="status" id="updated">${error ? `No answer: ${error.message}` : `Updated ${new Date().toLocaleTimeString()}`}</p>
    <${Topology} state=${state} />
    <${Load} points=${points.current} />
    <${Advice} state=${state} />
    <${Replicas} state=${state} />
    <${Tiers} state=${state} />
    <${Requests} state=${state} onPlan=${showPlan} />
    <${Plan} plan=${plan} onPlan=${showPlan} />
    <${SpeculativeDecoding} state=${state} />
    <${Fits} state=${state} />
    <${Actions} done=${done} order=${order} />
    <footer><p><a href="/metrics">Metrics</a> · <a href="/openapi.json">OpenAPI</a> · <a href="/console/vendor/LICENSES.txt">Licences</a></p></footer>
  </main>`;
}

render(html`<${Console} />`, document.getElementById("app"));
