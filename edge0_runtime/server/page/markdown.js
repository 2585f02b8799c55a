// Markdown as DOM nodes. marked only says what a text consists of; nothing here makes HTML of a string, so whatever a model
// writes is text: its tags are shown, its images are named and never fetched, and its links go to http, https or mailto.

import { Lexer } from "./vendor/marked.esm.js";
import { el } from "./dom.js";

const LONGEST = 200_000; // characters; beyond, it is shown as it is
const DEEPEST = 32; // of blocks and phrases in each other; a browser's layout has a stack, too
const ALIGN = { left: "left", center: "center", right: "right" };

/** Show `text` in `target`. What has not changed since the last time stays, with the selection in it. */
export function render(target, text) {
  const blocks = parse(text);
  const before = target.edge0Blocks ?? [];
  let same = 0;
  while (same < before.length && same < blocks.length && before[same] === blocks[same].raw) same += 1;
  while (target.childNodes.length > same) target.lastChild.remove();
  target.append(...blocks.slice(same).map((token) => safely(token)));
  target.edge0Blocks = blocks.map((token) => token.raw);
}

function parse(text) {
  if (text.length > LONGEST) return [{ type: "text", raw: text, text }];
  try {
    return new Lexer({ gfm: true, breaks: true }).lex(text).filter((token) => token.type !== "space" && token.type !== "def");
  } catch {
    return [{ type: "text", raw: text, text }]; // nested deeper than the parser's stack
  }
}

function safely(token) {
  try {
    return block(token);
  } catch {
    return plain(token.raw); // too deep: as it is
  }
}

const plain = (text) => el("p", { class: "plain" }, text);

function block(token) {
  switch (token.type) {
    case "heading":
      return el(`h${Math.min(6, token.depth + 2)}`, {}, ...inline(token.tokens)); // below the page's own h1 and h2
    case "code":
      return el("pre", { tabindex: 0, role: "region", "aria-label": token.lang ? `code, ${token.lang}` : "code" }, el("code", {}, token.text));
    case "blockquote":
      return el("blockquote", {}, ...blocks(token.tokens));
    case "hr":
      return el("hr");
    case "list": {
      const start = token.ordered && token.start !== 1 ? { start: token.start } : {};
      return el(token.ordered ? "ol" : "ul", start, ...token.items.map((item) => el("li", {}, ...blocks(item.tokens))));
    }
    case "table":
      return table(token);
    case "paragraph":
      return el("p", {}, ...inline(token.tokens));
    case "checkbox":
      return checkbox(token);
    case "text":
      return token.tokens ? el("span", {}, ...inline(token.tokens)) : plain(token.text);
    default: // raw HTML, and whatever a later marked may add
      return plain(token.raw);
  }
}

const blocks = (tokens) => nested(() => tokens.filter((token) => token.type !== "space" && token.type !== "def").map(block));

function table(token) {
  const cell = (tag, content, index) => el(tag, { class: ALIGN[token.align[index]] }, ...inline(content.tokens));
  const row = (tag, cells) => el("tr", {}, ...cells.map((content, index) => cell(tag, content, index)));
  const head = el("thead", {}, row("th", token.header));
  const body = el("tbody", {}, ...token.rows.map((cells) => row("td", cells)));
  return el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "table" }, el("table", {}, head, body));
}

const checkbox = (token) => el("input", { type: "checkbox", disabled: true, checked: token.checked, "aria-label": token.checked ? "done" : "open" });

const inline = (tokens) => nested(() => (tokens ?? []).map(phrase));

let depth = 0;

function nested(build) {
  if (depth >= DEEPEST) throw new RangeError("too deep");
  depth += 1;
  try {
    return build();
  } finally {
    depth -= 1;
  }
}

function phrase(token) {
  switch (token.type) {
    case "strong":
    case "em":
    case "del":
      return el(token.type, {}, ...inline(token.tokens));
    case "codespan":
      return el("code", {}, token.text);
    case "br":
      return el("br");
    case "link":
      return link(token.href, inline(token.tokens));
    case "image":
      return link(token.href, [`[image: ${token.text || token.href}]`]);
    case "checkbox":
      return checkbox(token);
    case "text":
    case "escape":
      return token.tokens ? el("span", {}, ...inline(token.tokens)) : document.createTextNode(decoded(token.text));
    default: // raw HTML; a break is the one tag that models use in tables
      return /^<br\s*\/?>$/i.test(token.raw) ? el("br") : document.createTextNode(token.raw);
  }
}

const ENTITIES = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0" };

/** The few entities that models write, as characters; others stay as they are. */
function decoded(text) {
  return text.replace(/&(?:#(\d{1,7})|#x([\da-f]{1,6})|(\w{2,6}));/gi, (whole, decimal, hex, name) => {
    if (name) return ENTITIES[name] ?? whole;
    const code = decimal ? Number(decimal) : Number.parseInt(hex, 16);
    return code > 0 && code <= 0x10ffff ? String.fromCodePoint(code) : whole;
  });
}

function link(href, children) {
  if (!/^(https?:|mailto:)/i.test(href) || !URL.canParse(href)) return el("span", { title: href }, ...children);
  return el("a", { href, target: "_blank", rel: "noopener noreferrer nofollow", title: href }, ...children);
}
