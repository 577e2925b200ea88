// Renders Markdown as DOM nodes. markdown-it parses the text; its HTML renderer is not used, so no text becomes HTML.

import MarkdownIt from "./vendor/markdown-it.esm.min.mjs";
import { element } from "./elements.js";

const parser = new MarkdownIt({ html: false, linkify: true, breaks: true });
parser.validateLink = (url) => /^(https?|mailto):/i.test(url);

const TAGS = new Set("p ul ol li blockquote table thead tbody tr th td hr em strong s a br".split(" "));
// The headings of an answer are below the heading of its turn.
const HEADINGS = { h1: "h3", h2: "h4", h3: "h5", h4: "h6", h5: "h6", h6: "h6" };

/** The nodes of a text, which may be incomplete. */
export function markdown(text) {
  const root = document.createElement("div");
  build(parser.parse(text, {}), root);
  return [...root.childNodes];
}

/** Replaces the content of a node from the first block that differs, so that focus and selection before it stay. */
export function drawMarkdown(node, text) {
  const nodes = markdown(text);
  const old = [...node.childNodes];
  let same = 0;
  while (same < old.length && same < nodes.length && old[same].isEqualNode(nodes[same])) same += 1;
  for (const each of old.slice(same)) each.remove();
  node.append(...nodes.slice(same));
}

function build(tokens, root) {
  let parent = root;
  for (const token of tokens) {
    if (token.type === "inline") build(token.children, parent);
    else if (token.nesting > 0) parent = open(token, parent);
    else if (token.nesting < 0) parent = close(token, parent);
    else parent.append(leaf(token));
  }
}

function open(token, parent) {
  if (token.hidden) return parent; // a paragraph in a tight list
  const tag = HEADINGS[token.tag] ?? token.tag;
  if (!TAGS.has(tag) && !token.tag.startsWith("h")) throw new Error(`no rendering of ${token.type}`);
  const node = document.createElement(tag);
  if (tag === "ol" && token.attrGet("start")) node.start = token.attrGet("start");
  if (tag === "a") linkTo(node, token.attrGet("href"), token.attrGet("title"));
  const align = /text-align:(\w+)/.exec(token.attrGet("style") ?? "");
  if (align) node.className = align[1];
  parent.append(tag === "table" ? scrolled(node) : node);
  return node;
}

function close(token, parent) {
  if (token.hidden) return parent;
  return token.tag === "table" ? parent.parentElement.parentElement : parent.parentElement;
}

function leaf(token) {
  switch (token.type) {
    case "fence":
    case "code_block":
      return codeBlock(token.content, token.info.trim().split(/\s/, 1)[0]);
    case "code_inline":
      return element("code", {}, token.content);
    case "image":
      return image(token);
    case "softbreak":
    case "hardbreak":
      return document.createElement("br");
    case "hr":
      return document.createElement("hr");
    default:
      return document.createTextNode(token.content);
  }
}

/** A link: the page loads nothing from other sites. */
function image(token) {
  const url = token.attrGet("src");
  const node = element("a", {}, token.content || url);
  linkTo(node, url, token.attrGet("title"));
  return node;
}

function linkTo(node, url, title) {
  node.href = url;
  node.target = "_blank";
  node.rel = "noopener noreferrer nofollow";
  if (title) node.title = title;
}

function scrolled(table) {
  return element("div", { class: "table", tabindex: 0, role: "group", "aria-label": "Table" }, table);
}

function codeBlock(text, language) {
  const bar = element("div", { class: "code-bar" }, element("span", {}, language));
  bar.append(element("button", { type: "button", class: "quiet", "data-action": "copy-code" }, "Copy code"));
  const pre = element("pre", { tabindex: 0 }, element("code", {}, text));
  return element("div", { class: "code" }, bar, pre);
}
