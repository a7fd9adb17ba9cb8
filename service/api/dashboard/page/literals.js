// What a reader typed into a form, as text of JSON, of Python and of a shell.

const NUMBERS = { NaN: "nan", Infinity: "inf", "-Infinity": "-inf" };

/** The JSON text of nested lists, a line for each row of a matrix. */
export function listText(value) {
  if (!Array.isArray(value)) return JSON.stringify(value);
  if (!value.some(Array.isArray)) return `[${value.map((each) => JSON.stringify(each)).join(", ")}]`;
  const inner = value.map((each) => listText(each).replaceAll("\n", "\n "));
  return `[${inner.join(",\n ")}]`;
}

/** The JSON text as Python: True for true, nan for "NaN". Numbers are written as the reader wrote them. */
export function pythonOfJson(text) {
  const token = /"(?:[^"\\]|\\.)*"|true|false|null/g;
  const words = { true: "True", false: "False", null: "None" };
  return text.replace(token, (found) => words[found] ?? pythonOfString(JSON.parse(found)));
}

function pythonOfString(text) {
  return Object.hasOwn(NUMBERS, text) ? NUMBERS[text] : JSON.stringify(text);
}

/** The text of an attribute as Python: a number, the list of a text with commas, or a string. */
export function pythonOfAttribute(text, type) {
  if (type.startsWith("list[")) return `[${listed(text).map((each) => JSON.stringify(each)).join(", ")}]`;
  if (!/^(int|float)\b/.test(type)) return JSON.stringify(text);
  if (/^[+-]?\d+$/.test(text)) return text.replace(/^([+-]?)0+(?=\d)/, "$1"); // digits beyond 2^53 stay
  return Number.isFinite(Number(text)) ? String(Number(text)) : JSON.stringify(text);
}

/** The parts of a text between commas. */
export function listed(text) {
  return text.split(",").map((each) => each.trim()).filter(Boolean);
}

/** The text as one word of a POSIX shell. */
export function quoted(text) {
  return `'${text.replaceAll("'", "'\\''")}'`;
}
