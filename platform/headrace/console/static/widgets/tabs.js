// The ARIA tabs pattern: one tab is in the tab order, arrow keys, Home and End move between the tabs.
import { html, useRef } from "../vendor/htm-preact.js";

export function Tabs({ tabs, selected, onSelect }) {
  const list = useRef(null);
  const onKey = (event) => {
    const at = tabs.findIndex((tab) => tab.id === selected);
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: tabs.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    const next = tabs[(to + tabs.length) % tabs.length];
    onSelect(next.id);
    list.current.querySelector(`#tab-${next.id}`).focus();
  };
  return html`<div class="tabs" role="tablist" aria-label="Parts of the console" ref=${list} onKeyDown=${onKey}>
    ${tabs.map((tab) => html`<button key=${tab.id} id="tab-${tab.id}" type="button" role="tab" aria-controls="panel" aria-selected=${tab.id === selected}
      tabindex=${tab.id === selected ? 0 : -1} onClick=${() => onSelect(tab.id)}>${tab.label}</button>`)}
  </div>`;
}
