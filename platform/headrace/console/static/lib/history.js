// The series of /headrace/v1/history as lines of a chart.

const MIN_ELAPSED_S = 3; // of the step that has not ended

/**
 * A series with rates per second in place of counts, up to `now`. The last step has not ended: its counts are divided by
 * the seconds that have passed, and it is left out while these are few.
 */
export function ratesOf(series, now) {
  const isShown = (at) => now - at >= MIN_ELAPSED_S;
  const kept = series.at.filter(isShown).length;
  const perSecond = (values) => values.slice(0, kept).map((value, n) => value / Math.min(series.step_s, now - series.at[n]));
  const same = (values) => values.slice(0, kept);
  return {
    at: same(series.at),
    requests: perSecond(series.requests),
    errors: perSecond(series.errors),
    tokens: perSecond(series.tokens),
    ttft_p50_s: same(series.ttft_p50_s),
    ttft_p99_s: same(series.ttft_p99_s),
    tpot_p99_s: same(series.tpot_p99_s),
  };
}
