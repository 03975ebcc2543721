// The settings in force, and their change: each change says its effect and asks first.
import { html, useState } from "../vendor/htm-preact.js";
import { putJson } from "../lib/api.js";
import { plural, replicaName, seconds } from "../lib/format.js";
import { Card, DocsPage, Table } from "../widgets/layout.js";
import { Dialog } from "../widgets/dialog.js";

const LASTS = "The change holds for all replicas, also for those that start later, until it is changed again or the app is deleted. Requests that run are not touched.";
const SETTINGS = [
  {
    id: "policy", title: "Where prompts are computed", path: "/headrace/v1/router", field: "policy", docs: ["routing.md#placement-policies", "Placement policies"],
    inForce: (status) => status.replicas.filter((one) => one.role === "decode").map((one) => one.router?.policy),
    choices: {
      cost: ["By cost", "Each prompt is computed where it is predicted to cost the fewest seconds.", "prompts are computed where they cost the fewest seconds"],
      local: ["Decode replicas only", "Decode replicas compute all prompts themselves. Prefill replicas get no more prompts, and running streams may slow down.", "decode replicas compute all prompts"],
      remote: ["Prefill replicas", "Every prompt that may leave its decode replica goes to a prefill replica, also where that takes longer.", "prefill replicas compute prompts"],
    },
  },
  {
    id: "speculation", title: "Speculative decoding", path: "/headrace/v1/speculation", field: "mode", docs: ["speculation.md", "Speculative decoding"],
    inForce: (status) => status.replicas.map((one) => one.speculation?.mode).filter(Boolean),
    choices: {
      auto: ["Automatic", "Each step verifies as many draft tokens as are predicted to save time.", "replicas choose the number of draft tokens"],
      off: ["Off", "No draft tokens are verified. Answers stay the same, tokens may take longer.", "no draft tokens are verified"],
    },
  },
];

export function Settings({ status }) {
  return html`<div class="grid">${SETTINGS.map((setting) => html`<${Setting} setting=${setting} status=${status} />`)}<${Fits} status=${status} /></div>`;
}

function Setting({ setting, status }) {
  const [asked, setAsked] = useState(null);
  const [result, setResult] = useState("");
  const inForce = [...new Set(setting.inForce(status).filter(Boolean))];
  const nameOf = (value) => setting.choices[value]?.[0] ?? value;
  const apply = async (value) => {
    setAsked(null);
    try {
      const answer = await putJson(setting.path, { [setting.field]: value });
      const replicas = typeof answer.replicas === "number" ? answer.replicas : (answer.replicas?.length ?? 0);
      setResult(answer.note ?? `Done: ${setting.choices[value][2]}. ${plural(replicas, "replica")} ${replicas === 1 ? "has" : "have"} the setting.`);
    } catch (problem) {
      setResult(`Not changed: ${problem.message}`);
    }
  };
  return html`<${Card} title=${setting.title} id=${setting.id}>
    <p>In force: <b class="in-force">${inForce.length ? inForce.map(nameOf).join(" and ") : "off in all replicas"}</b>${inForce.length > 1 ? " (the replicas differ)" : ""}</p>
    <ul class="choices">${Object.entries(setting.choices).map(([value, [name, effect]]) => {
      const isCurrent = inForce.length === 1 && inForce[0] === value;
      return html`<li><button type="button" data-value=${value} disabled=${isCurrent} aria-describedby=${`${setting.id}-${value}`} onClick=${() => { setResult(""); setAsked(value); }}>${name}${isCurrent ? " (in force)" : " ..."}</button>
        <span id=${`${setting.id}-${value}`} class="soft">${effect}</span></li>`;
    })}</ul>
    <p role="status" class="result">${result}</p>
    <p class="soft"><${DocsPage} page=${setting.docs[0]}>${setting.docs[1]}<//></p>
    ${asked && html`<${Dialog} title=${`${setting.title}: ${nameOf(asked)}?`} confirm=${`Change to "${nameOf(asked)}"`} onConfirm=${() => apply(asked)} onCancel=${() => setAsked(null)}>
      <p>${setting.choices[asked][1]}</p><p>${LASTS}</p><//>`}<//>`;
}

/** The models that routers have fitted, as numbers: for a look at wrong predictions. */
function Fits({ status }) {
  const number = (value) => (typeof value === "number" ? String(Number(value.toPrecision(4))) : Array.isArray(value) ? `[${value.map(number).join(", ")}]` : String(value));
  const rows = status.replicas.filter((one) => one.router?.fits).flatMap((one) => Object.entries(one.router.fits).map(([name, terms]) => ({
    key: `${one.replica_id} ${name}`, cells: [replicaName(one), name.replaceAll("_", " "), Object.entries(terms ?? {}).map(([term, value]) => `${term.replaceAll("_", " ")} ${number(value)}`).join(", ")] })));
  const steps = status.replicas.filter((one) => one.speculation?.step_s).map((one) => ({ key: one.replica_id, cells: [replicaName(one), one.speculation.mode ?? "-", one.speculation.step_s.slice(0, 8).map(seconds).join(", ")] }));
  return html`<section class="card wide" aria-labelledby="fits-title"><details id="fits"><summary><h2 id="fits-title">Fitted cost models</h2></summary>
    <p class="soft">Each decode replica fits the seconds of steps, transfers and loads to what it measures. The router's predictions are made from these.</p>
    <${Table} label="Fitted cost models" none="Nothing is fitted yet." columns=${[{ name: "Replica" }, { name: "Model" }, { name: "Terms" }]} rows=${rows} />
    ${steps.length > 0 && html`<h3>Seconds of a decode step, by running requests</h3><${Table} label="Decode steps" columns=${[{ name: "Replica" }, { name: "Speculative decoding" }, { name: "Step" }]} rows=${steps} />`}
  </details></section>`;
}
