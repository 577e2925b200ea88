// Renders text as DOM nodes: paragraphs, and code between fences or backticks. Never HTML.

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)\s*$/;

/** The nodes of a text, which may be incomplete. */
export function markdown(text) {
  const nodes = [];
  let lines = [];
  let code = null;
  const close = () => {
    const joined = lines.join("\n");
    lines = [];
    if (code) nodes.push(block(joined, code.language));
    else if (joined.trim()) nodes.push(paragraph(joined.replace(/^\n+|\s+$/g, "")));
  };
  for (const line of text.split("\n")) {
    const fence = FENCE.exec(line);
    if (!code && fence) {
      close();
      code = { fence: fence[1], language: fence[2] };
    } else if (code && fence && !fence[2] && fence[1].startsWith(code.fence)) {
      close();
      code = null;
    } else {
      lines.push(line);
    }
  }
  close();
  return nodes;
}

function paragraph(text) {
  const node = document.createElement("p");
  node.className = "text";
  // Every second part is between backticks.
  node.append(...text.split(/`([^`\n]+)`/).map((part, index) => (index % 2 ? inlineCode(part) : part)));
  return node;
}

function inlineCode(text) {
  const node = document.createElement("code");
  node.textContent = text;
  return node;
}

function block(text, language) {
  const node = document.createElement("pre");
  node.tabIndex = 0;
  const code = document.createElement("code");
  code.textContent = text;
  if (language) node.dataset.language = language;
  node.append(code);
  return node;
}
