// The console: asks the gateway for its documents while the page is visible, and shows the chosen tab.
import { html, render, useEffect, useRef, useState } from "./vendor/htm-preact.js";
import { countersOf, withPoint } from "./lib/counters.js";
import { healthOf } from "./lib/health.js";
import { seconds } from "./lib/format.js";
import { grafana, rayDashboard } from "./lib/links.js";
import { modelNames } from "./lib/models.js";
import { usePolled } from "./lib/polled.js";
import { nextTheme, savedTheme, useTheme } from "./lib/theme.js";
import { TABS } from "./tabs/index.js";
import { Header } from "./widgets/header.js";
import { KeyForm } from "./widgets/keyform.js";
import { Tabs } from "./widgets/tabs.js";

const STATUS_MS = 2000;
const HISTORY_MS = 5000;
const USAGE_MS = 10000; // the ledger is written every five seconds

/** The tab and its part in the URL: "#requests/ID". */
function useHash() {
  const read = () => {
    const [tab, ...part] = location.hash.slice(1).split("/");
    return { tab: TABS.find(({ id }) => id === tab) ?? TABS[0], part: safeDecode(part.join("/")) };
  };
  const [found, setFound] = useState(read);
  useEffect(() => {
    const onChange = () => setFound(read());
    addEventListener("hashchange", onChange);
    return () => removeEventListener("hashchange", onChange);
  }, []);
  return found;
}

function safeDecode(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

const go = (tab, part = "") => { location.hash = part ? `${tab}/${encodeURIComponent(part)}` : tab; };

function Console() {
  const [session, setSession] = useState(0);
  const [theme, setTheme] = useTheme();
  const { tab, part } = useHash();
  const state = usePolled("/headrace/v1/console", STATUS_MS, true, session);
  const needsKey = Boolean(state.error?.needsKey);
  const isShown = state.data !== null && !needsKey;
  const history = usePolled("/headrace/v1/history", HISTORY_MS, isShown, session);
  const requests = usePolled("/headrace/v1/requests", STATUS_MS, isShown && tab.needs.includes("requests"), session);
  const usage = usePolled("/headrace/v1/usage", USAGE_MS, isShown && tab.needs.includes("usage"), session);
  const version = usePolled("/version", 600000, isShown, session);
  const counters = useCounters(state.data);
  const status = state.data;
  const models = status ? modelNames(status) : [];
  const health = needsKey ? { level: "unknown", text: "A key is needed", problems: [] } : healthOf(state.error, status);
  useEffect(() => { document.title = `${health.level === "ok" ? "" : `${health.text} - `}Headrace console`; }, [health.level, health.text]);

  let body;
  if (needsKey) body = html`<${KeyForm} why=${state.error.message} onKey=${() => setSession(session + 1)} />`;
  else if (!status) body = html`<div class="card empty"><p role=${state.error ? "alert" : "status"}>${state.error ? `${state.error.message} The page asks again every two seconds.` : "Asking the gateway for the state of the app ..."}</p></div>`;
  else {
    const { View } = tab;
    body = html`<${Tabs} tabs=${TABS} selected=${tab.id} onSelect=${(id) => go(id)} />
      ${state.error && html`<p class="alert" role="alert">${state.error.message} What you see is the last state that the gateway told.</p>`}
      <div id="panel" role="tabpanel" aria-labelledby="tab-${tab.id}" tabindex="0">
        <${View} key=${tab.id} status=${status} history=${history} counters=${counters} requests=${requests} usage=${usage} models=${models} theme=${theme} part=${part} onPart=${(id) => go(tab.id, id)} /></div>`;
  }
  return html`<a class="skip" href="#panel" onClick=${(event) => { event.preventDefault(); document.getElementById("panel")?.focus(); }}>Skip to the content</a>
    <${Header} model=${models.join(", ")} health=${health} isLocked=${needsKey} updated_s=${counters.at(-1)?.at} history=${history.data} counters=${counters} theme=${theme} onTheme=${() => setTheme(nextTheme(theme))} />
    <main>${body}</main>
    <${Footer} version=${version.data?.version} history=${history.data} ray=${status?.ray} />`;
}

/** The status's counters since the page was opened. */
function useCounters(status) {
  const points = useRef([]);
  const last = useRef(null);
  if (status && status !== last.current) {
    last.current = status;
    points.current = withPoint(points.current, countersOf(status, Date.now() / 1000));
  }
  return points.current;
}

function Footer({ version, history, ray }) {
  const dashboard = rayDashboard(ray, location);
  const board = grafana(ray);
  return html`<footer><p>Headrace ${version ?? ""}${history ? `, gateway up for ${seconds(history.now - history.started_at)}` : ""}</p>
    <nav aria-label="Other pages"><a href="/metrics">Metrics</a> <a href="/openapi.json">OpenAPI</a>
      ${dashboard?.href && html`<a href=${dashboard.href}>Ray's dashboard</a>`} ${board && html`<a href=${board}>Grafana</a>`}
      <a href="/console/vendor/LICENSES.txt">Licences</a></nav></footer>`;
}

savedTheme();
render(html`<${Console} />`, document.getElementById("app"));
