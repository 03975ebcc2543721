// A question before a change. The browser's own dialog keeps the focus, and Escape cancels.
import { html, useEffect, useRef } from "../vendor/htm-preact.js";

export function Dialog({ title, children, confirm, onConfirm, onCancel }) {
  const dialog = useRef(null);
  useEffect(() => {
    const box = dialog.current;
    box.showModal();
    return () => box.close(); // gives the focus back to the button that asked
  }, []);
  const cancel = (event) => { event.preventDefault(); onCancel(); };
  return html`<dialog ref=${dialog} aria-labelledby="dialog-title" onCancel=${cancel}>
    <h2 id="dialog-title">${title}</h2>${children}
    <p class="buttons"><button type="button" class="primary" id="dialog-confirm" onClick=${onConfirm}>${confirm}</button>
      <button type="button" id="dialog-cancel" onClick=${onCancel}>Cancel</button></p></dialog>`;
}
