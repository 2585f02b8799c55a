// Numbers for people; "–" where there is none.

const NONE = "–";
const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

/** Three significant digits, grouped. */
export function figures(value, unit = "") {
  if (!isNumber(value)) return NONE;
  const digits = Math.abs(value) >= 100 ? { maximumFractionDigits: 0 } : { maximumSignificantDigits: 3 };
  return value.toLocaleString("en", digits) + unit;
}

export function bytes(value) {
  if (!isNumber(value)) return NONE;
  let unit = 0;
  while (Math.abs(value) >= 1024 && unit < UNITS.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${figures(value)} ${UNITS[unit]}`;
}

export const share = (part, whole) => (whole > 0 ? `${figures((100 * part) / whole)} %` : NONE);

/** [1, 2, 3, 7] -> "1..3, 7". */
export function runs(numbers) {
  const parts = [];
  for (const number of numbers) {
    const last = parts.at(-1);
    if (last && last[1] === number - 1) last[1] = number;
    else parts.push([number, number]);
  }
  return parts.map(([first, last]) => (first === last ? `${first}` : `${first}..${last}`)).join(", ");
}
