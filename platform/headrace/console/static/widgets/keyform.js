// The form for an administrator's key, shown where the gateway refuses to answer without one.
import { html, useRef } from "../vendor/htm-preact.js";
import { hasKey, setKey } from "../lib/api.js";
import { Alert } from "./layout.js";

export function KeyForm({ why, onKey }) {
  const field = useRef(null);
  const remember = useRef(null);
  const take = (event) => {
    event.preventDefault();
    setKey(field.current.value.trim(), remember.current.checked);
    onKey();
  };
  return html`<section class="card key" aria-labelledby="key-title"><h2 id="key-title">Administrator's key</h2>
    <${Alert}>${hasKey() ? `The key was not accepted: ${why}` : why}<//>
    <form onSubmit=${take}>
      <label for="key">API key with the role admin</label>
      <input id="key" ref=${field} type="password" autocomplete="off" required />
      <label class="check"><input id="remember" ref=${remember} type="checkbox" aria-describedby="remember-note" /> Remember in this tab</label>
      <p class="soft" id="remember-note">With it, a reload does not ask again: the browser keeps the key in this tab's storage until you close the tab.
        Without it, the key is only in this page's memory. It is in no URL either way.</p>
      <button type="submit" class="primary">Show the app</button>
    </form></section>`;
}
