// Markdown as elements: marked makes HTML of a model's text, DOMPurify lets a few kinds of elements through. HTML in the
// text is shown as text, nothing is loaded, and links lead to http, https and mailto addresses alone.

import { button, copy, element } from "./dom.js";
import { Lexer, Marked } from "./vendor/marked.esm.js";
import DOMPurify from "./vendor/purify.es.mjs";

const LONGEST = 20000; // characters of a block at most; a longer one is shown as it is
const SCHEMES = ["http:", "https:", "mailto:"];
const DEEPEST = 20; // lists and quotes inside each other: more would take long
const DEEP = new RegExp(`^(?:[ \\t]*(?:>|(?:[*+-]|\\d{1,9}[.)])[ \\t])){${DEEPEST}}`, "m");
const ITEM = /^([ \t]+)(?:[*+-]|\d{1,9}[.)])[ \t]/gm;
const ALLOWED = {
  ALLOWED_TAGS: "p a code pre strong em s h5 h6 hr br ul ol li blockquote table thead tbody tr th td #text".split(" "),
  ALLOWED_ATTR: ["href", "start", "class"],
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  ADD_URI_SAFE_ATTR: ["start"], // a number
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};
const SIGNS = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" };
const escaped = (text) => text.replace(/[&<>"]/g, (sign) => SIGNS[sign]);
const marked = new Marked({
  renderer: {
    html: ({ text }) => escaped(text),
    // A picture is not loaded: it is a link.
    image: ({ href, text }) => `<a href="${escaped(href)}">${escaped(text || href)}</a>`,
    // An answer stands below a heading of the fourth level.
    heading({ tokens, depth }) {
      const tag = depth === 1 ? "h5" : "h6";
      return `<${tag}>${this.parser.parseInline(tokens)}</${tag}>`;
    },
    del({ tokens }) {
      return `<s>${this.parser.parseInline(tokens)}</s>`;
    },
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
  },
});
const shown = new WeakMap(); // box -> the sources of its blocks

// Shows a text in a box; blocks that are there already stay, so that a growing answer can be selected.
export function render(box, text) {
  const parts = blocks(text), before = shown.get(box) || [];
  let same = 0;
  while (same < parts.length && parts[same].raw === before[same]) same++;
  while (box.childNodes.length > same) box.lastChild.remove();
  box.append(...parts.slice(same).map(made));
  shown.set(box, parts.map((part) => part.raw));
}

const as_it_is = (text) => ({ type: "plain", raw: text, text });

const is_deep = (text) => DEEP.test(text) || new Set([...text.matchAll(ITEM)].map((item) => item[1])).size > DEEPEST;

function blocks(text) {
  if (is_deep(text)) return [as_it_is(text)];
  const lexer = new Lexer(marked.defaults);
  try {
    lexer.blockTokens(text, lexer.tokens);
    for (const { src, tokens } of lexer.inlineQueue) {
      if (src.length <= LONGEST) lexer.inlineTokens(src, tokens);
      else tokens.push({ type: "text", raw: src, text: escaped(src), escaped: true });
    }
  } catch (error) {
    if (error instanceof RangeError) return [as_it_is(text)]; // the stack ends
    throw error;
  }
  return lexer.tokens.filter(({ type }) => type !== "space" && type !== "def");
}

function made(part) {
  if (part.type === "plain") return element("p", part.text);
  if (part.type === "code") return code(part.text, part.lang || "");
  const content = DOMPurify.sanitize(marked.parser([part]), ALLOWED);
  content.querySelectorAll("a").forEach(check_link);
  content.querySelectorAll("pre").forEach((each) => {
    const inner = each.firstElementChild, language = /language-(\S+)/.exec(inner?.className)?.[1] || "";
    each.replaceWith(code((inner || each).textContent.replace(/\n$/, ""), language));
  });
  content.querySelectorAll("table").forEach(scroll);
  content.querySelectorAll("[class]").forEach((each) => each.closest("figure, .table") || each.removeAttribute("class"));
  if (content.childElementCount === 1 && !stray_text(content)) return content.firstElementChild;
  const box = element("p");
  box.append(content);
  return box;
}

const stray_text = (node) => [...node.childNodes].some((each) => each.nodeType === Node.TEXT_NODE && each.data.trim());

function check_link(node) {
  const address = node.getAttribute("href") || "", url = URL.canParse(address) ? new URL(address) : null;
  if (!url || !SCHEMES.includes(url.protocol)) return node.replaceWith(...node.childNodes);
  node.removeAttribute("class");
  Object.assign(node, { href: url.href, title: url.href, target: "_blank", rel: "noopener noreferrer nofollow" });
}

function code(text, language) {
  const box = element("figure", "", "code"), caption = element("figcaption", element("span", language.slice(0, 30) || "code"));
  const listing = element("pre", element("code", text));
  listing.tabIndex = 0;
  listing.setAttribute("role", "region");
  listing.setAttribute("aria-label", "Code");
  caption.append(button("Copy", "small", () => copy(text), "Copy this code"));
  box.append(caption, listing);
  return box;
}

function scroll(table) {
  const box = element("div", "", "table");
  box.tabIndex = 0;
  box.setAttribute("role", "region");
  box.setAttribute("aria-label", "Table");
  table.replaceWith(box);
  box.append(table);
}
