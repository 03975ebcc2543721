// A document of the gateway that is fetched again at an interval while the page is visible.
import { useEffect, useState } from "../vendor/htm-preact.js";
import { getJson } from "./api.js";

/**
 * Return {data, error}: the last document, and the error of the last request if it failed. A refused key ends the
 * requests until `session` changes.
 */
export function usePolled(path, interval_ms, isWanted, session) {
  const [found, setFound] = useState({ data: null, error: null });
  useEffect(() => {
    if (!isWanted) return undefined;
    let timer = 0;
    let isOver = false;
    const fetchOnce = async () => {
      if (!document.hidden) {
        try {
          const data = await getJson(path);
          if (isOver) return;
          setFound({ data, error: null });
        } catch (error) {
          if (isOver) return;
          setFound((last) => ({ data: last.data, error }));
          if (error.needsKey) return;
        }
      }
      timer = setTimeout(fetchOnce, interval_ms);
    };
    fetchOnce();
    return () => { isOver = true; clearTimeout(timer); };
  }, [path, interval_ms, isWanted, session]);
  return found;
}
