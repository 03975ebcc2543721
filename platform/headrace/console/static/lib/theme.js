// The page's colours: as the system says, light, or dark. The choice stays in this browser.
import { useState } from "../vendor/htm-preact.js";

const KEPT_AT = "headrace-console-colours";
const THEMES = ["system", "light", "dark"];

const kept = () => (THEMES.includes(localStorage.getItem(KEPT_AT)) ? localStorage.getItem(KEPT_AT) : "system");

/** Apply the choice of an earlier visit. */
export function savedTheme() {
  document.documentElement.dataset.theme = kept();
}

export const nextTheme = (theme) => THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];

export function useTheme() {
  const [theme, setTheme] = useState(kept);
  return [theme, (chosen) => {
    localStorage.setItem(KEPT_AT, chosen);
    document.documentElement.dataset.theme = chosen;
    setTheme(chosen);
  }];
}
